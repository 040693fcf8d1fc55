"""Board: which chunks are still to be fetched, and who fetches which, as sources come and go.

Workers, one per connection, take runs of chunks: each as much as its source's share of the speed
measured so far. What a failed source leaves goes back on the board. When the board is empty, idle
workers wait for the others, and a source that would keep them waiting long is given up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from fttransport.errors import AuthError, SourceLost, StepMismatch, TransportError

MAX_FAILURES: Final = 3
_LAGGARD_FACTOR: Final = 4.0
_LAGGARD_S: Final = 0.25
_POLL_S: Final = 0.05


@dataclass(eq=False)
class Link:
    """One source: how it is doing."""

    name: str
    addresses: tuple[str, ...]
    nbytes: int = 0
    busy_s: float = 0.0
    failures: int = 0
    dropped: TransportError | None = None


@dataclass(eq=False)
class Run:
    """A run of chunks that one worker fetches; `cut` ends its connection.

    `is_read` says whether its bytes may be on their way into memory.
    """

    link: Link
    start: int
    stop: int
    cut: Callable[[], None]
    is_read: bool = False
    begun: float = field(default_factory=time.monotonic)


class Board:
    """Hands out the chunks of one transfer. All methods may be called from any thread."""

    def __init__(self, missing: list[int], links: list[Link], streams: int) -> None:
        self._changed = threading.Condition()
        self._pending = _runs_of(missing)
        self._links = links
        self._streams = streams
        self._flying: list[Run] = []
        self._ended = False
        self.missing = len(missing)
        self.error: BaseException | None = None
        self.retried = 0

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to do, for good or bad."""
        return self._ended or not self.missing

    def take(self, link: Link, cut: Callable[[], None]) -> Run | None:
        """The next run for a worker of `link`; None where it has nothing more to do.

        `cut` is called from another thread to end what the worker waits for.
        """
        with self._changed:
            while not self.is_over and link.dropped is None:
                if self._pending:
                    start, stop = self._pending.pop(0)
                    size = min(stop - start, self._share(link, stop - start))
                    if start + size < stop:
                        self._pending.insert(0, (start + size, stop))
                    run = Run(link, start, start + size, cut)
                    self._flying.append(run)
                    return run
                self._drop_laggard(link)
                self._changed.wait(_POLL_S)
            return None

    def begin(self, run: Run) -> bool:
        """Whether a run is to be read, once its connection can be cut; from now on it is."""
        with self._changed:
            run.is_read = self.still_wants(run)
            return run.is_read

    def still_wants(self, run: Run) -> bool:
        """Whether a run is to go on, once its connection can be cut."""
        return not self._ended and run.link.dropped is None

    def progress(self, run: Run) -> None:
        """The first chunk of a run has arrived whole and right."""
        with self._changed:
            run.start += 1
            self.missing -= 1
            run.link.failures = 0
            if not self.missing:
                self._changed.notify_all()

    def finish(self, run: Run) -> None:
        """A run is over: what it has left goes back."""
        with self._changed:
            self._flying.remove(run)
            run.link.busy_s += time.monotonic() - run.begun
            if run.start < run.stop:
                self.retried += 1
                self._pending.append((run.start, run.stop))
            self._changed.notify_all()

    def fail(self, link: Link, error: TransportError) -> None:
        """A worker of `link` failed: give the source up, or let it try again.

        Only the last one left has a few more tries, where it may recover.
        """
        with self._changed:
            link.failures += 1
            others = any(other.dropped is None for other in self._links if other is not link)
            final = isinstance(error, AuthError | StepMismatch) or _is_gone(error)
            if link.dropped is None and (others or final or link.failures >= MAX_FAILURES):
                link.dropped = error
            if all(other.dropped is not None for other in self._links):
                self.end(error)
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Nothing more is handed out; all connections are cut."""
        with self._changed:
            if self.error is None and self.missing:
                self.error = error
            self._ended = True
            for run in self._flying:
                run.cut()
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait a while for the end; whether it has come and nobody writes any more.

        A run that waits for its connection is not waited for: it will find that it is over.
        """

        def ended() -> bool:
            return self.is_over and not any(run.is_read for run in self._flying)

        with self._changed:
            return self._changed.wait_for(ended, timeout_s)

    def _share(self, link: Link, run: int) -> int:
        """How many chunks a worker takes."""
        alive = [other for other in self._links if other.dropped is None]
        if len(alive) == 1:
            # Nobody else could take over a part, so each stream has one long run.
            return max(1, -(-run // max(1, self._streams - len(self._flying))))
        pending = sum(stop - start for start, stop in self._pending) + run
        speeds = {other: _speed(other) for other in alive}
        known = [speed for speed in speeds.values() if speed]
        if len(known) < len(alive):
            return max(1, pending // (8 * self._streams))
        weight = speeds[link] / sum(known) if link in speeds else 0
        return max(1, int(pending * weight / 2))

    def _drop_laggard(self, idle: Link) -> None:
        """Give up the source of a run that would take far longer than `idle` would."""
        mine = _speed(idle)
        for run in self._flying:
            if run.link is idle or run.link.dropped is not None or not mine:
                continue
            waited = time.monotonic() - run.begun
            theirs = run.link.nbytes / (run.link.busy_s + waited)
            if waited > _LAGGARD_S and theirs * _LAGGARD_FACTOR < mine:
                text = f"{run.link.name} is too slow: {theirs / 1e6:.3g} against {mine / 1e6:.3g}"
                run.link.dropped = SourceLost(f"{text} MB/s")
                run.cut()


def _speed(link: Link) -> float:
    return link.nbytes / link.busy_s if link.busy_s > 0 else 0.0


def _is_gone(error: TransportError) -> bool:
    """Whether nobody listens there any more."""
    return isinstance(error, SourceLost) and isinstance(error.__cause__, ConnectionRefusedError)


def _runs_of(chunks: list[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and runs[-1][1] == chunk:
            runs[-1] = (runs[-1][0], chunk + 1)
        else:
            runs.append((chunk, chunk + 1))
    return runs
