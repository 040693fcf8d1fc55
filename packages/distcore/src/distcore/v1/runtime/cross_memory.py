"""The lane on which the receiver reads the sender's memory.

The sender offers its addresses; the receiver reads from there straight into its own buffers and
says that it has. Nothing is copied twice and nothing packed, however many buffers there are.
A small message goes with the offer instead, and needs no answer.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from distcore.v1.errors import ChannelError
from distcore.v1.runtime.host_lane import Ticket
from distcore.v1.runtime.host_link import CARRIED, OFFERED, TAKEN, Frame, HostLink
from distcore.v1.runtime.process_memory import Memory, Spans, memory_of

if TYPE_CHECKING:
    import torch

CARRIED_NBYTES = 32 * 1024
"""Up to this size, two copies through a socket take less than an answer."""

Read = Callable[[Memory, Spans], None]
"""Fills the first argument with what the peer has at the second."""


class OfferingLane:
    """The sending direction: offers messages until they are taken."""

    def __init__(self, link: HostLink) -> None:
        self._link = link
        self._offered: deque[Ticket] = deque()
        self._number = 0

    def submit(self, buffers: Sequence[torch.Tensor]) -> Ticket:
        """Offer the message; it is done when the other end has taken it, or when it was sent."""
        memory = memory_of(buffers)
        ticket = Ticket(self._link.peer, done=memory.nbytes <= CARRIED_NBYTES)
        if not ticket.done:
            self._offered.append(ticket)
            self._link.send(
                OFFERED,
                number=self._number,
                nbytes=memory.nbytes,
                payload=memory.spans[:, 0].tobytes(),
            )
            self._number += 1
        elif memory.nbytes:
            payload = b"".join(ctypes.string_at(*span) for span in memory.spans.tolist())
            self._link.send(
                CARRIED, number=len(memory.spans), nbytes=memory.nbytes, payload=payload
            )
        return ticket

    def handle(self, frame: Frame) -> None:
        """Take in that the oldest offer was taken."""
        self._offered.popleft().done = True

    def step(self) -> None:
        """Do nothing: the other end moves the bytes."""

    def close(self) -> None:
        """Do nothing: the memory is the caller's."""


class TakingLane:
    """The receiving direction: reads each offer into the oldest message that waits."""

    def __init__(self, link: HostLink, read: Read) -> None:
        self._link = link
        self._read = read
        self._offers: deque[Frame] = deque()
        self._waiting: deque[tuple[Ticket, Memory]] = deque()

    def submit(self, buffers: Sequence[torch.Tensor]) -> Ticket:
        """Wait for the next offer; the message is done when it has been read."""
        memory = memory_of(buffers)
        ticket = Ticket(self._link.peer, done=not memory.nbytes)
        if not ticket.done:
            self._waiting.append((ticket, memory))
        return ticket

    def handle(self, frame: Frame) -> None:
        """Keep an offer until the caller wants it."""
        self._offers.append(frame)

    def step(self) -> None:
        """Read every offer that has a message waiting for it."""
        while self._offers and self._waiting:
            offer = self._offers.popleft()
            ticket, ours = self._waiting.popleft()
            count = offer.number if offer.kind == CARRIED else len(offer.payload) // 8
            if (count, offer.nbytes) != (len(ours.spans), ours.nbytes):
                raise ChannelError(
                    f"rank {self._link.peer} sends {count} buffers of {offer.nbytes} bytes, "
                    f"expected {len(ours.spans)} of {ours.nbytes}",
                    peer=self._link.peer,
                )
            if offer.kind == CARRIED:
                _unpack(offer.payload, ours)
            else:
                self._take(offer, ours)
            ticket.done = True

    def _take(self, offer: Frame, ours: Memory) -> None:
        theirs = ours.spans.copy()
        theirs[:, 0] = np.frombuffer(offer.payload, dtype=np.uint64)
        self._read(ours, theirs)
        if not self._link.is_open():
            # The sender may have reused its memory while we were reading.
            raise ChannelError(
                f"rank {self._link.peer} gave up a message that was being read",
                peer=self._link.peer,
            )
        self._link.send(TAKEN, number=offer.number)

    def close(self) -> None:
        """Do nothing: the memory is the caller's."""


def _unpack(payload: bytes, ours: Memory) -> None:
    at = 0
    for address, nbytes in ours.spans.tolist():
        ctypes.memmove(address, payload[at : at + nbytes], nbytes)
        at += nbytes
