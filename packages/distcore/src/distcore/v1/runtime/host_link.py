"""HostLink: the small messages between two ranks of one host, over a Unix socket.

A link says where data lies, when it was taken, and that the other end lives; of the data itself it
carries only small messages. What a rank closes, the kernel closes for it when it dies: the other
end always learns.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from typing import NamedTuple

_HEADER = struct.Struct("<BxxxIQQ")
_RECEIVE_NBYTES = 256 * 1024

# What a frame says. ROW: a row of an all_gather.
# OFFERED: a message lies at these addresses. TAKEN: it has been read.
# CARRIED: a small message itself, of `number` buffers.
# FILLED: the next slot of the segment holds so many bytes. FREED: a slot may be filled again.
ROW, OFFERED, TAKEN, CARRIED, FILLED, FREED = range(1, 7)


class Frame(NamedTuple):
    """One message of a link; what `number` and `nbytes` mean depends on `kind`."""

    kind: int
    number: int
    nbytes: int
    payload: bytes


class HostLink:
    """One end of a link to the rank `peer`. It owns its socket.

    Nothing here blocks: `send` keeps what the socket does not take, and `flush` tries again.
    `lost` is True once the other end has closed the link; frames that came before are still
    returned by `receive`.
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self.lost = False
        self._deaf = False  # the other end takes nothing more, but may have said something
        self._socket = connection
        self._socket.setblocking(False)
        self._out = bytearray()
        self._in = bytearray()
        self._owner = os.getpid()
        self._alive = select.poll()
        self._alive.register(connection, select.POLLRDHUP)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    @property
    def has_output(self) -> bool:
        """Whether bytes wait for room in the socket."""
        return bool(self._out)

    def send(self, kind: int, *, number: int = 0, nbytes: int = 0, payload: bytes = b"") -> None:
        """Send a frame now, or keep it until the next `flush`."""
        self._out += _HEADER.pack(kind, len(payload), number, nbytes)
        self._out += payload
        self.flush()

    def flush(self) -> None:
        """Send as much of the waiting bytes as the socket takes."""
        while self._out:
            try:
                sent = len(self._out) if self._deaf else self._socket.send(self._out)
            except BlockingIOError:
                return
            except OSError:  # closed by the other end, or reset because it died
                self._deaf = True
                continue
            del self._out[:sent]

    def receive(self) -> list[Frame]:
        """Return the frames that have come whole since the last call."""
        while not self.lost:
            try:
                found = self._socket.recv(_RECEIVE_NBYTES)
            except BlockingIOError:
                break
            except OSError:
                found = b""
            if not found:
                self.lost = True
            self._in += found
            if len(found) < _RECEIVE_NBYTES:
                break
        return self._frames()

    def _frames(self) -> list[Frame]:
        frames: list[Frame] = []
        at = 0
        while len(self._in) - at >= _HEADER.size:
            kind, length, number, nbytes = _HEADER.unpack_from(self._in, at)
            body = at + _HEADER.size
            if len(self._in) - body < length:
                break
            frames.append(Frame(kind, number, nbytes, bytes(self._in[body : body + length])))
            at = body + length
        del self._in[:at]
        return frames

    def is_open(self) -> bool:
        """Whether the other end had not closed the link when this was called.

        An end closes the link before it gives up memory that it has offered. So memory read
        before a call that returns True was what was offered.
        """
        return not self.lost and not self._alive.poll(0)

    def shut(self) -> None:
        """Tell the other end that nothing more will come; the socket stays ours to close."""
        # A forked child shares the connection: it may drop its copy, but not end the parent's.
        if self._socket.fileno() >= 0 and os.getpid() == self._owner:
            with contextlib.suppress(OSError):  # the other end was faster
                self._socket.shutdown(socket.SHUT_RDWR)
        self.lost = self._deaf = True
        self._out.clear()

    def close(self) -> None:
        """Shut the link and give the socket back."""
        self.shut()
        self._socket.close()
