"""What a client makes of a peer that does not answer as a source does."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from fttransport import HTTPTransport, SourceLost, SourceSilent

Make = Callable[..., HTTPTransport[Any]]


@contextmanager
def peer(answer: bytes) -> Iterator[str]:
    """Something that answers the first request of each connection with `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        socks: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                    socks.append(sock)
                    sock.recv(65536)
                    sock.sendall(answer)
                    if answer:
                        sock.shutdown(socket.SHUT_WR)
                except OSError:
                    return

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/checkpoint/"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for sock in socks:
            sock.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    ],
    ids=["no http", "no length", "chunked", "cut", "redirect", "endless head"],
)
def test_what_is_no_answer_of_a_source_loses_it(http: Make, answer: bytes) -> None:
    with peer(answer) as address, pytest.raises(SourceLost):
        http().recv_checkpoint(0, address, 1, timedelta(seconds=5))


def test_a_peer_that_never_answers_is_lost_after_a_quarter_of_the_time(http: Make) -> None:
    with peer(b"") as address:
        begin = time.monotonic()
        with pytest.raises(SourceSilent, match="timed out"):
            http().recv_checkpoint(0, address, 1, timedelta(seconds=2))
        assert time.monotonic() - begin < 1.9


def test_a_head_that_drips_keeps_nobody_past_the_deadline(http: Make, proxy: Any) -> None:
    def fault(data: bytes, before: int) -> bytes:
        time.sleep(0.05)
        return data

    source, receiver = http(), http()
    source.send_checkpoint([], 1, {}, timedelta(seconds=5))
    with proxy(source.address(), fault, piece=1) as front:
        with pytest.raises(TimeoutError):
            receiver.recv_checkpoint(0, front.address, 1, timedelta(seconds=0.6))
        asking = [t for t in threading.enumerate() if t.name.startswith("fttransport-ask")]
        for thread in asking:
            thread.join(2)
        assert not any(thread.is_alive() for thread in asking)
