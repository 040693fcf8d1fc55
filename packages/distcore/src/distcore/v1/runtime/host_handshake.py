"""How the ranks of a group find out which of them share a host, and what the host allows.

Three rows are gathered over the inner channel.
1. Who am I: host, process, where a random word lies in my memory, where my socket listens.
2. What worked: whom I reached over a socket, whose word I could read.
3. What stands: the links that both ends hold, the segments that both ends mapped.
Nothing is believed that was not tried: equal names of hosts or processes prove nothing. All
ranks see all rows, so both ends of every pair come to one result.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError
from distcore.v1.runtime.host_link import HostLink
from distcore.v1.runtime.process_memory import may_read
from distcore.v1.runtime.shared_segment import SharedSegment, make_segment

_CARD = struct.Struct("<4s16s16s16s16sQQ16s")
_MAGIC = b"dch1"  # the last character is the number of the form
_HELLO = struct.Struct("<16sI")
# Bits of the second row: I reached you, I can read you.
_REACHED, _READABLE = 1, 2
# Bits of the third: we are linked, I mapped the segment that I send or receive through.
_LINKED, _SENDS, _RECEIVES = 1, 2, 4
_SEGMENT, _NO_SEGMENT = b"S", b"N"
# Who said that it has connected is in the queue already; this only bounds a broken host.
_ANSWER_S = 5.0


class Mode(StrEnum):
    """What a wrapper may use; the last two are for tests and fail where the host refuses."""

    AUTO = "auto"
    OFF = "off"
    CROSS_MEMORY = "cross_memory"
    SEGMENT = "segment"


class Carrier(StrEnum):
    """How the messages of one direction between two ranks travel."""

    CROSS_MEMORY = "cross_memory"
    SEGMENT = "segment"
    INNER = "inner"


class _Card(NamedTuple):
    """What a rank says of itself. `word` and `secret` are random and known to the group alone."""

    magic: bytes
    mode: bytes
    host: bytes
    socket_name: bytes
    secret: bytes
    pid: int
    address: int
    word: bytes


@dataclass(slots=True)
class Neighbour:
    """What this rank holds towards one peer of its host."""

    link: HostLink
    pid: int
    outgoing: SharedSegment | None = None
    incoming: SharedSegment | None = None

    def close(self) -> None:
        """Close the link and unmap the segments."""
        self.link.close()
        for segment in (self.outgoing, self.incoming):
            if segment is not None:
                segment.close()


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result: own neighbours by index, and what stands between any two positions.

    The matrices are the same on all ranks, by (sender, receiver).
    """

    neighbours: Mapping[int, Neighbour]
    linked: NDArray[np.bool_]
    readable: NDArray[np.bool_]
    shared: NDArray[np.bool_]

    def carrier(self, sender: int, receiver: int) -> Carrier:
        """Return how messages from position `sender` to position `receiver` travel."""
        way = (sender, receiver)
        if self.linked[way] and self.readable[way]:
            return Carrier.CROSS_MEMORY
        return Carrier.SEGMENT if self.linked[way] and self.shared[way] else Carrier.INNER

    @property
    def all_linked(self) -> bool:
        """Whether every rank has a link to every other rank."""
        size = len(self.linked)
        return int(self.linked.sum()) == size * (size - 1)

    @classmethod
    def of_strangers(cls, size: int) -> Meeting:
        """Return the meeting of `size` ranks that share nothing."""
        none = np.zeros((size, size), dtype=np.bool_)
        return cls({}, none, none, none)


def meet(channel: Channel, mode: Mode, *, timeout_s: float) -> Meeting:
    """Let the ranks of `channel` find each other. Collective.

    What the result holds is the caller's to close; nothing is left open on an error.
    Raises DisagreementError where ranks ask for different modes.
    """
    with ExitStack() as for_now, ExitStack() as opened:
        listener = _listen(channel.size, for_now)
        handshake = _Handshake(channel, mode, time.monotonic() + timeout_s, listener, opened)
        handshake.introduce()
        handshake.attempt()
        handshake.share_segments()
        meeting = handshake.settle()
        opened.pop_all()
        return meeting


class _Handshake:
    """The steps in their order; `opened` closes whatever was opened where a step fails."""

    def __init__(
        self,
        channel: Channel,
        mode: Mode,
        deadline: float,
        listener: socket.socket | None,
        opened: ExitStack,
    ) -> None:
        self._channel = channel
        self._mode = mode
        self._deadline = deadline
        self._listener = listener
        self._opened = opened
        self._index = channel.index
        # The word must stay where it is until the peers have read it.
        self._word = np.frombuffer(secrets.token_bytes(16), dtype=np.uint8)
        self._card = _Card(
            magic=_MAGIC,
            mode=mode.encode(),
            host=_host(),
            socket_name=b"" if listener is None else listener.getsockname(),
            secret=secrets.token_bytes(16),
            pid=os.getpid(),
            address=self._word.ctypes.data,
            word=self._word.tobytes(),
        )
        self._cards: list[_Card] = []
        self._connections: dict[int, socket.socket] = {}
        self._outgoing: dict[int, SharedSegment] = {}
        self._incoming: dict[int, SharedSegment] = {}
        self._reads = np.zeros((0, 0), dtype=np.bool_)  # by (reader, read)

    def introduce(self) -> None:
        """Tell all ranks who I am, and hear who they are."""
        rows = self._channel.all_gather(_CARD.pack(*self._card), timeout_s=self._left_s())
        self._cards = [_Card(*_CARD.unpack(row)) for row in rows]
        modes = [card.mode.rstrip(b"\0").decode(errors="replace") for card in self._cards]
        if set(modes) != {self._mode.value}:
            values = dict(zip(self._channel.ranks, modes, strict=True))
            raise DisagreementError("the mode of with_same_host", values)

    def attempt(self) -> None:
        """Try to reach and to read every rank of this host, and tell all ranks what worked."""
        found = bytearray(self._channel.size)
        for index in self._near():
            card = self._cards[index]
            # One end of each pair connects, the other accepts.
            if index < self._index and (made := self._connect(card)) is not None:
                self._connections[index] = made
                found[index] |= _REACHED
            if may_read(card.pid, card.address, card.word):
                found[index] |= _READABLE
        matrix = self._gather_matrix(found)
        self._reads = (matrix & _READABLE) != 0
        callers = np.flatnonzero(matrix[:, self._index] & _REACHED)
        self._connections |= self._accept(int(index) for index in callers)

    def share_segments(self) -> None:
        """Make a segment for each direction that needs one, and hand it to its receiver."""
        for index, connection in self._connections.items():
            if self._needs_segment(self._index, index):
                segment = _send_segment(connection)
                if segment is not None:
                    self._outgoing[index] = segment
                    self._opened.callback(segment.close)
        for index, connection in self._connections.items():
            if self._needs_segment(index, self._index):
                segment = _receive_segment(connection)
                if segment is not None:
                    self._incoming[index] = segment
                    self._opened.callback(segment.close)

    def settle(self) -> Meeting:
        """Tell all ranks what stands, and conclude alike."""
        found = bytearray(self._channel.size)
        for index in self._connections:
            found[index] = _LINKED
            found[index] |= _SENDS if index in self._outgoing else 0
            found[index] |= _RECEIVES if index in self._incoming else 0
        matrix = self._gather_matrix(found)
        linked = (matrix & matrix.T & _LINKED) != 0
        shared = ((matrix & _SENDS) != 0) & ((matrix.T & _RECEIVES) != 0)
        neighbours = {}
        for index, connection in self._connections.items():
            neighbours[index] = Neighbour(
                HostLink(self._channel.ranks[index], connection),
                self._cards[index].pid,
                self._outgoing.get(index),
                self._incoming.get(index),
            )
            if not linked[self._index, index]:
                neighbours.pop(index).close()
        # Whoever asks for segments alone is not told that it could read.
        readable = self._reads.T & (self._mode != Mode.SEGMENT)
        return Meeting(neighbours, linked, readable, shared)

    def _needs_segment(self, sender: int, receiver: int) -> bool:
        if self._mode == Mode.SEGMENT:
            return True
        return self._mode == Mode.AUTO and not self._reads[receiver, sender]

    def _near(self) -> list[int]:
        if self._listener is None or self._mode == Mode.OFF:
            return []
        return [
            index
            for index, card in enumerate(self._cards)
            if index != self._index and (card.magic, card.host) == (_MAGIC, self._card.host)
        ]

    def _connect(self, card: _Card) -> socket.socket | None:
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError:  # no more descriptors
            return None
        self._opened.callback(connection.close)
        try:
            connection.settimeout(_ANSWER_S)
            connection.connect(b"\0" + card.socket_name.strip(b"\0"))
            connection.sendall(_HELLO.pack(card.secret, self._index))
        except OSError:  # another host or network namespace after all
            connection.close()
            return None
        return connection

    def _accept(self, callers: Iterable[int]) -> dict[int, socket.socket]:
        """Return the connections of `callers`; others that come without our secret are dropped."""
        missing, found = set(callers), {}
        limit = min(self._deadline, time.monotonic() + _ANSWER_S)
        while self._listener is not None and missing and time.monotonic() < limit:
            try:
                self._listener.settimeout(max(limit - time.monotonic(), 0.001))
                connection, _ = self._listener.accept()
            except OSError:
                break
            self._opened.callback(connection.close)
            index = _hello(connection, self._card.secret)
            if index in missing:
                missing.discard(index)
                found[index] = connection
            else:
                connection.close()
        return found

    def _gather_matrix(self, row: bytearray) -> NDArray[np.uint8]:
        rows = self._channel.all_gather(bytes(row), timeout_s=self._left_s())
        return np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), len(rows))

    def _left_s(self) -> float:
        return max(self._deadline - time.monotonic(), 0.001)


def _host() -> bytes:
    """Return what ranks of one host have in common; equality is a hint, no proof."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = socket.gethostname().encode()
    return hashlib.blake2b(name, digest_size=16).digest()


def _listen(backlog: int, for_now: ExitStack) -> socket.socket | None:
    """Return a listening socket under a name that the kernel chose; it is no file."""
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for_now.callback(listener.close)
        listener.bind("")
        listener.listen(backlog)
    except (AttributeError, OSError):  # no such sockets here, or no more descriptors
        return None
    return listener


def _hello(connection: socket.socket, secret: bytes) -> int | None:
    """Return the position that a caller states, None for one that does not know the secret."""
    try:
        connection.settimeout(_ANSWER_S)
        got = connection.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(got) != _HELLO.size:
        return None
    theirs, index = _HELLO.unpack(got)
    return int(index) if secrets.compare_digest(theirs, secret) else None


def _send_segment(connection: socket.socket) -> SharedSegment | None:
    """Make a segment and send its descriptor, or send that there is none."""
    try:
        descriptor = make_segment()
    except (AttributeError, OSError):
        descriptor = -1
    try:
        if descriptor < 0:
            connection.sendall(_NO_SEGMENT)
            return None
        socket.send_fds(connection, [_SEGMENT], [descriptor])
        return SharedSegment(descriptor)
    except OSError:  # the peer gave up, or no memory to map
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _receive_segment(connection: socket.socket) -> SharedSegment | None:
    """Map the segment whose descriptor the peer sends; None where it sends none."""
    try:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError:
        return None
    try:
        return SharedSegment(descriptors[0]) if descriptors else None
    except OSError:
        return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
