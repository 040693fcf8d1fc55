"""Wire: many buffers through one socket, without copying them."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterable
from socket import socket
from typing import Final

_MOST_BUFFERS: Final = 256
_TLS_NBYTES: Final = 1 << 20


def send_all(sock: socket, parts: Iterable[memoryview | bytes]) -> None:
    """Send buffers one after another; each call of the system must make progress in time."""
    views = [view for part in parts if len(view := memoryview(part))]
    at = 0
    while at < len(views):
        if isinstance(sock, ssl.SSLSocket):
            sent = sock.send(views[at][:_TLS_NBYTES])
        else:
            sent = sock.sendmsg(views[at : at + _MOST_BUFFERS])
        while at < len(views) and sent >= len(views[at]):
            sent -= len(views[at])
            at += 1
        if sent:
            views[at] = views[at][sent:]


def receive_all(sock: socket, parts: Iterable[memoryview], on_bytes: Callable[[int], None]) -> None:
    """Fill buffers one after another, telling of each arrival; EOFError where they end early."""
    views = [part for part in parts if len(part)]
    at = 0
    while at < len(views):
        if isinstance(sock, ssl.SSLSocket) or len(views) - at == 1:
            got = sock.recv_into(views[at])
        else:
            got = sock.recvmsg_into(views[at : at + _MOST_BUFFERS])[0]
        if not got:
            raise EOFError("the source closed the connection in the middle")
        on_bytes(got)
        while at < len(views) and got >= len(views[at]):
            got -= len(views[at])
            at += 1
        if got:
            views[at] = views[at][got:]
