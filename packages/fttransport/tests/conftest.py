"""Transports that are shut down with their test, and proxies that spoil what passes through."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import pytest

from fttransport import HTTPTransport

Make = Callable[..., HTTPTransport[Any]]
Fault = Callable[[bytes, int], bytes | None]
"""Given the next bytes of an answer and how many came before, what goes on; None ends it all."""


class Proxy:
    """Passes connections on to `address`; every answer goes through `fault`."""

    def __init__(self, address: str, fault: Fault, *, piece: int = 65536) -> None:
        parts = urlsplit(address)
        self._upstream = (parts.hostname or "", parts.port or 0)
        self._fault = fault
        self._piece = piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socks: list[socket.socket] = []
        self._before = 0
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}/checkpoint/"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sock in (self._listener, *self._socks):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._thread.join(5)
        for sock in (self._listener, *self._socks):
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._upstream, timeout=10)
            except OSError:
                return
            self._socks += [here, there]
            for job in (self._ask, self._answer):
                threading.Thread(target=job, args=(here, there), daemon=True).start()

    def _ask(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := here.recv(65536):
                there.sendall(data)
            there.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _answer(self, here: socket.socket, there: socket.socket) -> None:
        try:
            while data := there.recv(self._piece):
                passed = self._fault(data, self._before)
                self._before += len(data)
                if passed is None:
                    break
                here.sendall(passed)
            here.shutdown(socket.SHUT_RDWR)
            there.shutdown(socket.SHUT_RDWR)
        except OSError:
            return


@pytest.fixture
def proxy() -> type[Proxy]:
    """A class whose objects stand in front of a source while a `with` block lasts."""
    return Proxy


@pytest.fixture
def http() -> Iterator[Make]:
    """Makes HTTP transports with a timeout of 10 s and one stream, unless told otherwise."""
    with ExitStack() as stack:

        def make(num_chunks: int = 0, *, timeout_s: float = 10, **options: Any) -> Any:
            made: HTTPTransport[Any] = HTTPTransport(
                timedelta(seconds=timeout_s), num_chunks, **options
            )
            stack.callback(made.shutdown)
            return made

        yield make
