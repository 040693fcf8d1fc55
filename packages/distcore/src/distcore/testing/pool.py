"""Ranks as processes that stay: for what needs the default group (DeviceMesh, DTensor, FSDP2).

Starting a process that imports torch takes seconds, so one pool serves a whole test session.
With pytest, a fixture makes it, and costs nothing until the first `run`:

    @pytest.fixture(scope="session")
    def pool() -> Iterator[RankPool]:
        with rank_pool(4) as pool:
            yield pool

    def mesh_size(channel: Channel) -> int:
        return init_device_mesh("cpu", (2, 2)).size()

    def test_mesh(pool: RankPool) -> None:
        assert pool.run(mesh_size).values() == (4, 4, 4, 4)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, TypeVarTuple

from distcore.testing.outcomes import DeadlineError, Outcome, Outcomes
from distcore.testing.pool_worker import Reply, Start, Task, in_step, serve
from distcore.v1.runtime.group_channel import GroupChannel

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_START_S = 120.0
_STEP_S = 6.0


class RankDiedError(RuntimeError):
    """The process of a rank ended while it was at work; `exit_code` is negative for a signal."""

    def __init__(self, rank: int, exit_code: int | None) -> None:
        self.rank = rank
        self.exit_code = exit_code
        super().__init__(f"the process of rank {rank} ended with exit code {exit_code}")


def rank_pool(size: int) -> RankPool:
    """Return a pool of `size` ranks that starts its processes at the first `run`."""
    return RankPool(size)


class RankPool:
    """Persistent processes with a default gloo group each; use it as a context manager."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size: expected at least 1 rank, got {size}")
        self.size = size
        self._ranks: list[_RankProcess] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0

    def run(
        self, fn: Callable[[GroupChannel, *Ts], T], /, *args: *Ts, deadline_s: float = 60.0
    ) -> Outcomes[T]:
        """Run `fn(channel, *args)` on all ranks and return all outcomes by rank.

        `fn` is a function of a module (a test module too), found by its name; `args`, values and
        exceptions are pickled, so this is for code that you wrote. The channel carries the
        default group. An exception keeps its type and attributes and gains a note with the
        traceback of its rank; a rank that dies has RankDiedError as its outcome, and the others
        have what came of it for them.
        After `deadline_s` all ranks are killed and DeadlineError is raised with all stacks.
        After a death, a deadline, or where ranks that raised have lost step with each other, the
        next `run` starts new processes.
        """
        task = Task.of(fn, args)
        self._start()
        outcomes: Outcomes[T] = self._call(task, deadline_s)
        if any(isinstance(error, RankDiedError) for error in outcomes.exceptions):
            self._kill()
        elif any(error is not None for error in outcomes.exceptions):
            self._check_step()
        return outcomes

    def close(self) -> None:
        """End the processes; idempotent."""
        for rank in self._ranks:
            rank.stop()
        deadline = time.monotonic() + 5
        for rank in self._ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> None:
        if self._ranks:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="rank-pool-")
        folder = Path(self._folder.name)
        self._ranks = [_RankProcess(rank, self.size, folder) for rank in range(self.size)]
        started: Outcomes[None] = self._collect(time.monotonic() + _START_S, _START_S)
        if any(error is not None for error in started.exceptions):
            self._kill()
            started.values()

    def _call(self, task: Task, deadline_s: float) -> Outcomes[T]:
        for rank in self._ranks:
            rank.send(task)
        return self._collect(time.monotonic() + deadline_s, deadline_s)

    def _collect(self, deadline: float, deadline_s: float) -> Outcomes[T]:
        found: dict[int, Outcome[T]] = {}
        by_connection = {rank.connection: rank for rank in self._ranks}
        while len(found) < self.size:
            waiting = [c for c, rank in by_connection.items() if rank.rank not in found]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                stacks = {rank.rank: rank.stacks() for rank in self._ranks}
                self._kill()
                for rank in found:
                    stacks.pop(rank)
                raise DeadlineError.of(deadline_s, stacks, [*found.values()])
            for connection in ready:
                process = by_connection[connection]  # type: ignore[index]
                found[process.rank] = process.outcome()
        return Outcomes(tuple(found[rank] for rank in range(self.size)))

    def _check_step(self) -> None:
        self._number += 1
        try:
            outcomes: Outcomes[bool] = self._call(Task.of(in_step, (self._number,)), _STEP_S)
        except DeadlineError:
            return  # killed already
        if any(outcome.value is not True for outcome in outcomes):
            self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


class _RankProcess:
    """One rank's process, as its parent sees it."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self._stacks = folder / f"stacks-{rank}"
        context = get_context("spawn")
        self.connection: Connection[Task | None, Reply]
        self.connection, theirs = context.Pipe()
        start = Start(rank, size, str(folder / "store"), str(self._stacks))
        self.process: BaseProcess = context.Process(
            target=serve, args=(start, theirs), name=f"rank-{rank}", daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, task: Task) -> None:
        """Hand a task over; a process that is gone is noticed when its outcome is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(task)

    def outcome(self) -> Outcome[T]:
        """Return the reply that is ready, or that the process died."""
        try:
            reply = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            return Outcome(
                self.rank, 0.0, exception=RankDiedError(self.rank, self.process.exitcode)
            )
        return reply.outcome(self.rank)

    def stacks(self) -> str:
        """Return the stacks of all threads of the process, as text."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)
            deadline = time.monotonic() + 1
            while time.monotonic() < deadline and not self._dumped():
                time.sleep(0.01)
        text = self._stacks.read_text(errors="replace") if self._dumped() else "  (no stacks)\n"
        print(f"rank {self.rank}:\n{text}", file=sys.stderr)  # noqa: T201 - the test run's output
        return text

    def _dumped(self) -> bool:
        return self._stacks.exists() and self._stacks.stat().st_size > 0

    def stop(self) -> None:
        """Ask the process to end."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(None)

    def kill(self) -> None:
        """End the process now and give the connection back."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.connection.close()
