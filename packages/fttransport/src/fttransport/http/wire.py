"""Wire: many buffers through one socket, without copying them."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable, Iterable
from socket import socket
from typing import Final

_MOST_BUFFERS: Final = 256
_TLS_NBYTES: Final = 1 << 20
_TIOCOUTQ: Final = 0x5411


def send_all(sock: socket, parts: Iterable[memoryview | bytes]) -> None:
    """Send buffers one after another; TimeoutError where the peer took nothing for a timeout."""
    views = [view for part in parts if len(view := memoryview(part))]
    at = 0
    while at < len(views):
        queued = _queued_nbytes(sock)
        try:
            if isinstance(sock, ssl.SSLSocket):
                sent = sock.send(views[at][:_TLS_NBYTES])
            else:
                sent = sock.sendmsg(views[at : at + _MOST_BUFFERS])
        except TimeoutError:
            # A socket takes more only once a third of what it holds is gone, which is megabytes.
            if _queued_nbytes(sock) >= queued:
                raise
            continue
        while at < len(views) and sent >= len(views[at]):
            sent -= len(views[at])
            at += 1
        if sent:
            views[at] = views[at][sent:]


def _queued_nbytes(sock: socket) -> int:
    """What the system holds of a socket's bytes that the peer has not taken (Linux; else 0)."""
    if sys.platform != "linux":
        return 0
    import fcntl

    return int.from_bytes(fcntl.ioctl(sock.fileno(), _TIOCOUTQ, bytes(4)), sys.byteorder)


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
