"""Sources in processes of their own, started by `test_http_transport_faults.py`.

Reads orders, a line of JSON each, and forks for each a process that serves until it is killed; it
prints its process id and its metadata on one line. All end with this one, which ends with its
input. Forking takes milliseconds where starting a process that imports torch takes seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch

from fttransport import HTTPTransport, Security

TIMEOUT = timedelta(seconds=10)


def serve(order: dict[str, Any], parent: int) -> None:
    """Serve a tensor that counts from a number, until killed or left alone."""
    torch.set_num_threads(1)
    source: HTTPTransport[Any] = HTTPTransport(TIMEOUT, 0, security=Security(mac=order["mac"]))
    words = torch.arange(order["first"], order["first"] + order["numel"])
    source.send_checkpoint([], order["step"], {"w": words, "n": order["first"]}, TIMEOUT)
    os.write(1, f"{os.getpid()} {source.metadata()}\n".encode())
    while os.getppid() == parent:
        time.sleep(0.1)


def main() -> None:
    """Fork for each line of the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    parent = os.getpid()
    os.write(1, b"ready\n")
    while line := sys.stdin.readline():
        if os.fork() == 0:
            try:
                serve(json.loads(line), parent)
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
