"""Fence: when a snapshot may be read, and the proof that nobody reads it any more.

A fence is closed until a step is allowed. Closing it lets no new reader in, gives those that are
reading a bounded time to come to their end, and then cuts them off. When `close` has returned,
nothing reads the snapshot, and the state may be changed.

A reader is a receiver, not a request: it may come back for the rest of the state while the fence
is closing, until its last connection is gone.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fttransport.snapshot import Snapshot

_CUT_S = 10.0


@dataclass(eq=False)
class Visitor:
    """One connection: its socket, whom it belongs to, and whether it is being served right now.

    `nbytes` is what it was sent of states.
    """

    sock: socket.socket
    reader: str = ""
    inside: bool = False
    snapshot: Snapshot | None = None
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """Why nothing was let in: the fence stayed closed, or (`empty`) nothing was staged."""

    empty: bool


@dataclass
class _State:
    step: int = -1
    allowed: bool = False
    closing: bool = False
    ended: bool = False
    snapshot: Snapshot | None = None
    visitors: set[Visitor] = field(default_factory=set)


class Fence:
    """Guards one snapshot at a time. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._state = _State()
        self._changed = threading.Condition()
        # One close at a time: a second one waits for the first and finds nothing to do.
        self._closing = threading.Lock()
        self.cut_count = 0

    @property
    def step(self) -> int:
        """The step that was allowed last; -1 before."""
        return self._state.step

    @property
    def allowed(self) -> bool:
        """Whether readers are let in."""
        return self._state.allowed

    @property
    def ended(self) -> bool:
        """Whether it is closed for good."""
        return self._state.ended

    @property
    def snapshot(self) -> Snapshot | None:
        """What is staged."""
        return self._state.snapshot

    def open(self, step: int, snapshot: Snapshot | None) -> None:
        """Let readers in to `snapshot`, under `step`."""
        with self._changed:
            if self._state.ended:
                raise RuntimeError("the transport was shut down")
            self._state.step = step
            self._state.snapshot = snapshot
            self._state.allowed = True
            self._changed.notify_all()

    def close(self, drain_s: float) -> None:
        """Let nobody in; return when nobody reads. Readers are cut off after `drain_s`.

        Idempotent, and immediate where nobody reads. TimeoutError where a reader that was cut
        off does not stop within some seconds.
        """
        if not self._state.allowed:
            with self._closing:
                return
        with self._closing, self._changed:
            self._state.allowed = False
            self._state.closing = True
            try:
                self._drain(drain_s)
            finally:
                self._state.closing = False
                self._state.snapshot = None

    def end(self) -> None:
        """Close for good and cut everybody off, at once."""
        with self._changed:
            self._state.ended = True
            self._state.allowed = False
            self._state.snapshot = None
            for visitor in self._state.visitors:
                _cut(visitor)
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait until no connection is left; False where the time ran out before."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._state.visitors, timeout_s)

    @contextmanager
    def visit(self, sock: socket.socket) -> Iterator[Visitor]:
        """Count a connection while it lasts."""
        visitor = Visitor(sock)
        with self._changed:
            self._state.visitors.add(visitor)
            if self._state.ended:
                _cut(visitor)
        try:
            yield visitor
        finally:
            with self._changed:
                self._state.visitors.discard(visitor)
                self._changed.notify_all()

    @contextmanager
    def enter(
        self, visitor: Visitor, reader: str, wait_s: float, fits: Callable[[int], bool]
    ) -> Iterator[Snapshot | Closed | int]:
        """Let a connection read while the block lasts: gives the snapshot.

        Waits up to `wait_s` where the fence is closed, and then gives Closed. Gives the step that
        is served where `fits` does not take it.
        """
        with self._changed:
            found = self._admit(visitor, reader, wait_s, fits)
            if isinstance(found, Snapshot):
                visitor.inside, visitor.reader, visitor.snapshot = True, reader, found
        try:
            yield found
        finally:
            with self._changed:
                visitor.inside = False
                self._changed.notify_all()

    def _admit(
        self, visitor: Visitor, reader: str, wait_s: float, fits: Callable[[int], bool]
    ) -> Snapshot | Closed | int:
        state = self._state

        def may_enter() -> bool:
            return state.allowed or state.ended or self._is_known(reader)

        self._changed.wait_for(may_enter, wait_s)
        if state.ended or not may_enter():
            return Closed(empty=False)
        if not fits(state.step):
            return state.step
        return Closed(empty=True) if state.snapshot is None else state.snapshot

    def _is_known(self, reader: str) -> bool:
        """Whether a reader may go on while the fence is closing."""
        state = self._state
        if not state.closing or not reader or state.snapshot is None:
            return False
        return any(v.reader == reader and v.snapshot is state.snapshot for v in state.visitors)

    def _busy(self) -> list[Visitor]:
        """Who is reading, or belongs to a receiver that has not read to its end."""
        snapshot = self._state.snapshot
        return [
            v
            for v in self._state.visitors
            if v.inside or (v.reader and snapshot is not None and v.snapshot is snapshot)
        ]

    def _drain(self, drain_s: float) -> None:
        deadline = time.monotonic() + drain_s
        if self._changed.wait_for(lambda: not self._busy(), deadline - time.monotonic()):
            return
        busy = self._busy()
        self.cut_count += len(busy)
        self._state.snapshot, staged = None, self._state.snapshot
        for visitor in busy:
            _cut(visitor)
        if not self._changed.wait_for(lambda: not any(v.inside for v in busy), _CUT_S):
            self._state.snapshot = staged
            raise TimeoutError("a reader that was cut off has not stopped; the state is still read")


def _cut(visitor: Visitor) -> None:
    """End a connection from outside the thread that serves it."""
    try:
        # Not the method of a TLS socket, which would go on in the clear.
        socket.socket.shutdown(visitor.sock, socket.SHUT_RDWR)
    except OSError:
        # It is gone already, which is what is wanted.
        return
