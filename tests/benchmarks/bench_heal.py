"""What healing over loopback costs: fttransport, torchft's HTTP transport and a bare socket.

Each round runs all ways in turn, with the source in a process of its own; the best round counts.
Seconds are those of `send_checkpoint` and the receive together, into the receiver's own tensors
(torchft's receive plus a copy); `cpu` is that of the receiver. The floor is one socket that fills
memory of the same size, and copies nothing. torchft is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from fttransport import HTTPTransport, join_metadata

LIMIT = timedelta(seconds=60)
KINDS = {"4 tensors": (4, None), "4096 x 4 KiB": (4096, 1024)}


def state_of(kind: str, mib: int) -> dict[str, torch.Tensor]:
    count, numel = KINDS[kind]
    numel = numel or (mib << 20) // 4 // count
    return {f"w{i}": torch.full((numel,), float(i)) for i in range(count)}


def serve(way: str, kind: str, mib: int) -> None:
    """The source: sends once per line of its input, and prints where and in how many seconds."""
    state = state_of(kind, mib)
    if way == "floor":
        _serve_floor(state)
        return
    transport = _transport(way)
    for _ in sys.stdin:
        begin = time.perf_counter()
        transport.send_checkpoint([], 1, state, LIMIT)
        print(json.dumps([transport.metadata(), time.perf_counter() - begin]), flush=True)
    transport.shutdown()


def _serve_floor(state: dict[str, torch.Tensor]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    for _ in sys.stdin:
        print(json.dumps([str(listener.getsockname()[1]), 0.0]), flush=True)
        connection, _ = listener.accept()
        with connection:
            for tensor in state.values():
                connection.sendall(memoryview(tensor.numpy()).cast("B"))  # type: ignore[arg-type]
    listener.close()


def _transport(way: str, **options: Any) -> Any:
    if way == "torchft":
        module = importlib.import_module("torchft.checkpointing.http_transport")
        return module.HTTPTransport(LIMIT, 0)
    return HTTPTransport(LIMIT, 0, **options)


def receivers(own: dict[str, torch.Tensor]) -> dict[str, Callable[[list[str]], None]]:
    """For each way what receives once from sources."""
    fresh, in_place = _transport("ours"), _transport("ours", state_dict=lambda: own)

    def floor(metadata: list[str]) -> None:
        with socket.create_connection(("127.0.0.1", int(metadata[0]))) as connection:
            for tensor in own.values():
                view = memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
                while len(view):
                    view = view[connection.recv_into(view) :]

    def torchft(metadata: list[str]) -> None:
        found = peer.recv_checkpoint(0, metadata[0], 1, LIMIT)
        for key, tensor in own.items():
            tensor.copy_(found[key])

    ways: dict[str, Callable[[list[str]], None]] = {
        "floor": floor,
        "in place": lambda found: in_place.recv_checkpoint(0, join_metadata(found), 1, LIMIT),
        "fresh": lambda found: fresh.recv_checkpoint(0, join_metadata(found), 1, LIMIT),
    }
    ways["two sources"] = ways["in place"]
    try:
        peer = _transport("torchft")
        ways["torchft"] = torchft
    except ImportError as error:
        print(f"without torchft: {error}", file=sys.stderr)
    return ways


class Source:
    """A source in a process of its own."""

    def __init__(self, way: str, kind: str, mib: int) -> None:
        command = [sys.executable, __file__, "--serve", way, "--kind", kind, "--mib", str(mib)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def send(self) -> tuple[str, float]:
        """Stage the state; where it is, and how long that took."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the source has no pipes")
        self._process.stdin.write("send\n")
        self._process.stdin.flush()
        metadata, seconds = json.loads(self._process.stdout.readline())
        return str(metadata), float(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def rounds(kind: str, mib: int, repeats: int) -> Iterator[tuple[str, float, float]]:
    """For each way and round the seconds and the receiver's CPU seconds."""
    own = {key: torch.zeros_like(tensor) for key, tensor in state_of(kind, mib).items()}
    ways = receivers(own)
    names = {way: way if way in ("floor", "torchft") else "ours" for way in ways}
    sources = {name: [Source(name, kind, mib)] for name in set(names.values())}
    sources["two"] = [*sources["ours"], Source("ours", kind, mib)]
    try:
        for _ in range(repeats):
            for way, receive in ways.items():
                serving = sources["two" if way == "two sources" else names[way]]
                sent = [source.send() for source in serving]
                cpu, begin = time.process_time(), time.perf_counter()
                receive([metadata for metadata, _ in sent])
                seconds = time.perf_counter() - begin + sent[0][1]
                yield way, seconds, time.process_time() - cpu
    finally:
        for source in sources["two"] + sources["floor"] + sources.get("torchft", []):
            source.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve")
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.serve:
        serve(chosen.serve, chosen.kind, chosen.mib)
        return
    for kind in [chosen.kind] if chosen.kind else KINDS:
        best: dict[str, tuple[float, float]] = {}
        for way, seconds, cpu in rounds(kind, chosen.mib, chosen.repeats):
            best[way] = min(best.get(way, (seconds, cpu)), (seconds, cpu))
        floor = best["floor"][0]
        for way, (seconds, cpu) in best.items():
            figures = {"seconds": round(seconds, 4), "cpu": round(cpu, 4)}
            ratio = round(seconds / floor, 2)
            print(json.dumps({"state": kind, "way": way, **figures, "to_floor": ratio}))


if __name__ == "__main__":
    main()
