"""Caller: this rank as one that makes labelled calls in a group.

It counts the calls, and it waits: the bytes move on a thread of its own, while the thread of the
call looks at the board now and then. So a rank that fails elsewhere wakes those that wait for it,
and Ctrl-C works while they wait. (gloo offers no other way: its sends and receives cannot be
asked whether they are done, and a wait that ends early closes the connections for good.)
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch

from distcore.board import Board, board_of
from distcore.v1.channel import Channel
from distcore.v1.errors import ChannelError
from distcore.world import channel_of

T = TypeVar("T")

_FIRST_LOOK_S: Final = 0.05
_LAST_LOOK_S: Final = 0.5


class Caller:
    """What outlives one labelled call: the count, the thread that waits, what broke.

    Holds neither the group nor its channel, so it ends with the group.
    """

    def __init__(self, board: Board | None) -> None:
        self.board = board
        self.calls = 0
        self.broken: str | None = None
        self._jobs: SimpleQueue[_Job[object] | None] | None = None

    def wait(self, job: Callable[[], T], channel: Channel, label: str) -> T:
        """Run `job`, which may wait for peers, and return what it returns.

        Raises PeerError as soon as the board tells of a failure, and what the job raises. After
        a failure, a broken channel or an interrupt nothing more can be called in this group.
        """
        if channel.size == 1:
            return job()
        done: SimpleQueue[_Job[T]] = SimpleQueue()
        self._submit(_Job(job, channel.device, done))
        try:
            finished = self._watch(done, label)
        except BaseException as error:
            self.give_up(label, error)
            raise
        if finished.error is None:
            return finished.result()
        if isinstance(finished.error, ChannelError):
            self._blame(finished.error, label)
        raise finished.error

    def give_up(self, label: str, error: BaseException) -> None:
        """Note that this rank left a call in its middle, and tell the peers that may wait in it."""
        self.broken = self.broken or f"left {label!r} on {type(error).__name__}: {error}"
        if self.board is not None:
            self.board.report(label, error)

    def close(self) -> None:
        """End the thread once it has nothing to do."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _watch(self, done: SimpleQueue[_Job[T]], label: str) -> _Job[T]:
        pause_s: float | None = _FIRST_LOOK_S if self.board else None
        while True:
            try:
                return done.get(timeout=pause_s)
            except Empty:
                self._raise_failure(label)
                pause_s = self.board.interval_s if self.board else None

    def _blame(self, error: ChannelError, label: str) -> None:
        """Raise what the board tells where the carrier broke because a peer had failed."""
        self.broken = str(error)
        deadline = monotonic() + _LAST_LOOK_S
        while self.board is not None and monotonic() < deadline:
            self._raise_failure(label, error)
            threading.Event().wait(self.board.interval_s)

    def _raise_failure(self, label: str, cause: Exception | None = None) -> None:
        failure = self.board.look() if self.board else None
        if failure is not None:
            raise failure.error(label) from cause

    def _submit(self, job: _Job[T]) -> None:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(self._jobs,), name="distcore-labelled-calls", daemon=True
            )
            thread.start()
        self._jobs.put(job)  # type: ignore[arg-type]  # the thread does not look at the type


class _Job(Generic[T]):
    """Something to run on the caller's thread, and then what became of it."""

    def __init__(self, fn: Callable[[], T], device: str, done: SimpleQueue[_Job[T]]) -> None:
        self._fn: Callable[[], T] | None = fn
        self._device = device
        self._done = done
        self._value: T | None = None
        self.error: BaseException | None = None

    def run(self) -> None:
        """Run it and hand it back. Lets go of the function, which holds the group."""
        fn, self._fn = self._fn, None
        try:
            if self._device.startswith("cuda"):  # the current device is each thread's own
                torch.cuda.set_device(self._device)
            self._value = None if fn is None else fn()
        except BaseException as error:  # noqa: BLE001 - raised by who waits for it
            self.error = error
        self._done.put(self)

    def result(self) -> T:
        """What the function returned, once it has."""
        return self._value  # type: ignore[return-value]  # None only where that is what it returned


def _work(jobs: SimpleQueue[_Job[object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # while waiting, hold neither a group nor an exception


def caller_in(group: object) -> tuple[Caller, Channel]:
    """This rank as a caller in a group, and a channel over it; None is the default world.

    The caller hangs on the group object itself, so another group, or a new one in its place,
    begins to count anew.
    """
    channel = channel_of(group)
    member: object = getattr(channel, "group", channel)
    caller = _CALLERS.get(member)
    if caller is None:
        board = board_of(channel)
        with _LOCK:
            caller = _CALLERS.get(member)
            if caller is None:
                caller = _CALLERS[member] = Caller(board)
                weakref.finalize(member, caller.close).atexit = False
    return caller, channel


# The only state of the module. It hangs on the group object itself and ends with it.
_CALLERS: Final[WeakKeyDictionary[object, Caller]] = WeakKeyDictionary()
_LOCK: Final = threading.Lock()
