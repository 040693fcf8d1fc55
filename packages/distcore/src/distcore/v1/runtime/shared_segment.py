"""The lane through a shared memory segment, for hosts on which no process reads another.

The segment is memory without a name (memfd), so it does not depend on the size of any mount and
is gone with the last process that maps it. It has two slots: while the receiver empties one, the
sender fills the other.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distcore.v1.errors import ChannelError
from distcore.v1.runtime.host_lane import Ticket
from distcore.v1.runtime.host_link import FILLED, FREED, Frame, HostLink
from distcore.v1.runtime.process_memory import Memory, memory_of

if TYPE_CHECKING:
    import torch

NUM_SLOTS = 2
SLOT_NBYTES = 2 * 1024 * 1024


def make_segment() -> int:
    """Return the descriptor of a new segment of `NUM_SLOTS` slots, for the caller to close."""
    descriptor = os.memfd_create("distcore", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, NUM_SLOTS * SLOT_NBYTES)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class SharedSegment:
    """A mapping of a segment; slots are taken in turn by both ends."""

    def __init__(self, descriptor: int) -> None:
        self._map = mmap.mmap(descriptor, NUM_SLOTS * SLOT_NBYTES)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        self._address = self._bytes.ctypes.data
        self._turn = 0

    def next_slot(self) -> int:
        """Return the address of the slot whose turn it is."""
        address = self._address + self._turn * SLOT_NBYTES
        self._turn = (self._turn + 1) % NUM_SLOTS
        return address

    def close(self) -> None:
        """Unmap the segment; idempotent."""
        self._bytes = np.empty(0, dtype=np.uint8)
        self._map.close()


class _Cursor:
    """A message and how many of its bytes have been moved."""

    def __init__(self, ticket: Ticket, memory: Memory) -> None:
        self.ticket = ticket
        self.left = memory.nbytes
        self._pieces = deque((address, nbytes) for address, nbytes in memory.spans.tolist())

    def advance(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield the next `nbytes` bytes as pieces of memory (address, bytes)."""
        self.left -= nbytes
        while nbytes:
            address, length = self._pieces.popleft()
            if length > nbytes:
                self._pieces.appendleft((address + nbytes, length - nbytes))
                length = nbytes
            nbytes -= length
            yield address, length


class FillingLane:
    """The sending direction; a message is done when all its bytes lie in slots."""

    def __init__(self, link: HostLink, segment: SharedSegment) -> None:
        self._link = link
        self._segment = segment
        self._free = NUM_SLOTS
        self._waiting: deque[_Cursor] = deque()

    def submit(self, buffers: Sequence[torch.Tensor]) -> Ticket:
        """Queue the message behind those that wait for a free slot."""
        memory = memory_of(buffers)
        ticket = Ticket(self._link.peer, done=not memory.nbytes)
        if not ticket.done:
            self._waiting.append(_Cursor(ticket, memory))
        return ticket

    def handle(self, frame: Frame) -> None:
        """Take in that a slot is free again."""
        self._free += 1

    def step(self) -> None:
        """Fill every slot that is free; a slot holds bytes of one message."""
        while self._free and self._waiting:
            cursor = self._waiting[0]
            nbytes = min(cursor.left, SLOT_NBYTES)
            at = self._segment.next_slot()
            for address, length in cursor.advance(nbytes):
                ctypes.memmove(at, address, length)
                at += length
            self._free -= 1
            self._link.send(FILLED, nbytes=nbytes)
            if not cursor.left:
                self._waiting.popleft().ticket.done = True

    def close(self) -> None:
        """Unmap the segment."""
        self._segment.close()


class EmptyingLane:
    """The receiving direction; a message is done when all its bytes have been copied out."""

    def __init__(self, link: HostLink, segment: SharedSegment) -> None:
        self._link = link
        self._segment = segment
        self._filled: deque[int] = deque()
        self._waiting: deque[_Cursor] = deque()

    def submit(self, buffers: Sequence[torch.Tensor]) -> Ticket:
        """Wait behind the messages that were submitted before."""
        memory = memory_of(buffers)
        ticket = Ticket(self._link.peer, done=not memory.nbytes)
        if not ticket.done:
            self._waiting.append(_Cursor(ticket, memory))
        return ticket

    def handle(self, frame: Frame) -> None:
        """Keep a filled slot until the caller wants its bytes."""
        self._filled.append(frame.nbytes)

    def step(self) -> None:
        """Empty every filled slot that has a message waiting for it."""
        while self._filled and self._waiting:
            cursor = self._waiting[0]
            nbytes = self._filled.popleft()
            if nbytes != min(cursor.left, SLOT_NBYTES):
                raise ChannelError(
                    f"rank {self._link.peer} sends {nbytes} bytes more, expected {cursor.left}",
                    peer=self._link.peer,
                )
            at = self._segment.next_slot()
            for address, length in cursor.advance(nbytes):
                ctypes.memmove(address, at, length)
                at += length
            self._link.send(FREED)
            if not cursor.left:
                self._waiting.popleft().ticket.done = True

    def close(self) -> None:
        """Unmap the segment."""
        self._segment.close()
