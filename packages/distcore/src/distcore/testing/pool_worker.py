"""What runs inside a process of a rank pool.

This is the one module that unpickles: test code of one project, on one machine, over a pipe that
no other process can open.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist

from distcore.testing.outcomes import Outcome
from distcore.v1.runtime.group_channel import GroupChannel

_GROUP_TIMEOUT_S = 60.0


class RemoteError(RuntimeError):
    """An exception of a rank that cannot be pickled, as text."""


@dataclass(frozen=True, slots=True)
class Start:
    """What a process needs to know to be a rank."""

    rank: int
    size: int
    store_path: str
    stacks_path: str


@dataclass(frozen=True, slots=True)
class Task:
    """A function by its name, and its arguments, pickled."""

    module: str
    file: str | None
    name: str
    args: bytes

    @classmethod
    def of(cls, fn: Callable[..., object], args: tuple[object, ...]) -> Self:
        """Return the task to call `fn`; raise ValueError unless it can be found by its name."""
        name = fn.__qualname__
        if "<" in name:
            raise ValueError(f"fn: expected a function of a module, got {name} of {fn.__module__}")
        file = getattr(sys.modules[fn.__module__], "__file__", None)
        return cls(fn.__module__, file, name, bytes(ForkingPickler.dumps(args)))

    def call(self, channel: GroupChannel) -> Any:
        """Call the function and return its value."""
        module = _load(self.module, self.file)
        fn = reduce(getattr, self.name.split("."), module)
        return fn(channel, *ForkingPickler.loads(self.args))  # type: ignore[operator]


@dataclass(frozen=True, slots=True)
class Reply:
    """A value, or an exception in parts: its constructor may take other arguments."""

    seconds: float
    value: bytes | None = None
    exception: bytes | None = None
    text: str = ""

    @classmethod
    def of_value(cls, seconds: float, value: object) -> Self:
        """Return the reply of a rank that returned `value`."""
        try:
            return cls(seconds, value=bytes(ForkingPickler.dumps(value)))
        except Exception as error:  # noqa: BLE001 - anything can fail in a value's own pickling
            return cls.of_exception(seconds, error)

    @classmethod
    def of_exception(cls, seconds: float, error: BaseException) -> Self:
        """Return the reply of a rank that raised `error`."""
        text = "".join(traceback.format_exception(error))
        try:
            parts = ForkingPickler.dumps((type(error), error.args, error.__dict__))
            _rebuilt(bytes(parts))
        except Exception:  # noqa: BLE001 - the text goes instead
            return cls(seconds, text=text)
        return cls(seconds, exception=bytes(parts), text=text)

    def outcome(self, rank: int) -> Outcome[Any]:
        """Return the outcome of `rank`, in the parent."""
        if self.value is not None:
            return Outcome(rank, self.seconds, value=ForkingPickler.loads(self.value))
        if self.exception is None:
            return Outcome(rank, self.seconds, exception=RemoteError(self.text))
        error = _rebuilt(self.exception)
        error.add_note(f"on rank {rank}:\n{self.text}")
        return Outcome(rank, self.seconds, exception=error)


def serve(start: Start, connection: Connection[Reply, Task | None]) -> None:
    """Be one rank: join the group, then answer tasks until None or the parent's end."""
    stacks = Path(start.stacks_path).open("w")  # noqa: SIM115 - open as long as the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    begin = time.monotonic()
    try:
        channel = _join(start)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        connection.send(Reply.of_exception(time.monotonic() - begin, error))
        return
    connection.send(Reply.of_value(time.monotonic() - begin, None))
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        if task is None:
            break
        connection.send(_answer(task, channel))
    dist.destroy_process_group()


def in_step(channel: GroupChannel, number: int) -> bool:
    """Whether all ranks come to this point together, with nothing left from before."""
    try:
        rows = channel.all_gather(number.to_bytes(8, "little"), timeout_s=4)
    except OSError:
        return False
    return len(set(rows)) == 1


def _join(start: Start) -> GroupChannel:
    os.environ.update(
        RANK=str(start.rank),
        LOCAL_RANK=str(start.rank),
        WORLD_SIZE=str(start.size),
        LOCAL_WORLD_SIZE=str(start.size),
        GLOO_SOCKET_IFNAME="lo",
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{start.store_path}",
        rank=start.rank,
        world_size=start.size,
        timeout=timedelta(seconds=_GROUP_TIMEOUT_S),
    )
    return _world_channel()


def _world_channel() -> GroupChannel:
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the default group is gone")
    return GroupChannel(group)


def _answer(task: Task, channel: GroupChannel) -> Reply:
    begin = time.monotonic()
    try:
        value = task.call(channel)
    except BaseException as error:  # noqa: BLE001 - the outcome carries it
        return Reply.of_exception(time.monotonic() - begin, error)
    return Reply.of_value(time.monotonic() - begin, value)


def _load(name: str, file: str | None) -> ModuleType:
    """Return the module of that name; from its file where the name alone does not lead there."""
    if name not in sys.modules:
        try:
            importlib.import_module(name)
        except ImportError:
            sys.modules.pop(name, None)
    module = sys.modules.get(name)
    if module is not None and (file is None or getattr(module, "__file__", None) == file):
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {name} from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _rebuilt(parts: bytes) -> BaseException:
    kind, args, state = ForkingPickler.loads(parts)
    error: BaseException = kind.__new__(kind, *args)
    error.args = args  # an OSError with a constructor of its own does not keep them
    error.__dict__.update(state)
    return error
