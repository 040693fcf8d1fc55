"""Run: who makes the process group of a run, who destroys it, and how a failed rank leaves."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from distcore.board import board_of
from distcore.exits import exit_code, leave
from distcore.launch import Launch, is_distributed_launch, is_elastic, read_launch
from distcore.turn import take_turn
from distcore.v1.errors import ChannelError, PlanError, Problem
from distcore.v1.header import Call
from distcore.world import is_initialized, world

OnError: TypeAlias = Literal["auto", "abort", "raise"]

_LINGER_S: Final = 0.3
_SCOPE: Final = "distributed_run"


@dataclass(frozen=True, slots=True)
class DistributedState:
    """This process's place in a run: its rank, the run's size, and the device it computes on."""

    rank: int
    world_size: int
    device: torch.device | str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the rank that writes what the run puts out."""
        return self.rank == 0


@contextmanager
def distributed_run(
    timeout: timedelta | None = None,
    device: torch.device | str = "cuda",
    *,
    on_error: OnError = "auto",
) -> Iterator[DistributedState]:
    """Own the run's process group for the block, and yield this process's place in the run.

    On a launch of several ranks this makes the group, with `timeout`, on gloo for CPU tensors and
    NCCL for CUDA's, and binds this rank's device; with `device="cpu"`, or where there is no CUDA,
    gloo alone. A single process sets nothing up and keeps `device` as given. `"auto"` is CUDA
    where there is one. A wrong launch is one PlanError that names every variable.

    At the end, also when the block raises, the group that the block or this function made is
    destroyed, once all ranks came there. A group that was there before stays as it is.

    Where the block raises on one of several ranks, the peers that wait in a labelled call raise
    PeerError, and then this rank, as `on_error` says:

    - `"abort"`: prints the traceback, records it for torchrun's report and ends the process at
      once, without waiting for peers that may wait for it. The exit code is 1, that of the
      SystemExit, or 130 for KeyboardInterrupt. A rank that only met a peer's failure waits a
      moment before it does, so that the launcher names the right one.
    - `"raise"`: raises on, and destroys the group only if this function made it.
    - `"auto"`: aborts if this function made the group or torchrun watches over the process.

    `sys.exit(0)` is no failure. In a single process the exception always passes on.
    """
    if on_error not in get_args(OnError):
        text = f"expected one of {get_args(OnError)}, got {on_error!r}"
        raise PlanError(Problem("on_error", "unknown", text))
    found = is_initialized()
    state = _found_state(device) if found else _entered_state(timeout, device)
    owns = not found
    board = board_of()
    try:
        yield from _until_all_end(state, owns)
    except BaseException as error:
        if exit_code(error) != 0 and state.world_size > 1:
            if board is not None and not board.is_shared(error):
                board.report(_SCOPE, error)
            if on_error == "abort" or (on_error == "auto" and (owns or is_elastic(os.environ))):
                leave(error, state.rank, board)
            if owns:
                time.sleep(_LINGER_S)  # the peers can read why before the connections close
                _cut_off()
        raise
    finally:
        if owns and is_initialized():
            dist.destroy_process_group()


def _until_all_end(state: DistributedState, owns: bool) -> Iterator[DistributedState]:
    try:
        yield state
    except SystemExit as error:
        if owns and exit_code(error) == 0:
            _end_together()
        raise
    if owns:
        _end_together()


def _cut_off() -> None:
    """Give up what is on its way, so that destroying the group waits for no peer."""
    abort = getattr(world(), "abort", None) if is_initialized() else None
    if abort is not None:
        abort()


def _end_together() -> None:
    """Wait for the peers, as well as can be: who is late or gone does not keep this rank."""
    if not is_initialized() or dist.get_world_size() == 1:
        return
    try:
        with take_turn(Call.TOGETHER, "the end of distributed_run", None) as turn:
            turn.meet("is at the end")
    except ChannelError as error:
        warnings.warn(f"the run ends without its peers: {error}", RuntimeWarning, stacklevel=5)


def _found_state(device: torch.device | str) -> DistributedState:
    size = dist.get_world_size()
    if size > 1:
        device = _plain_device(device)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
    return DistributedState(dist.get_rank(), size, device)


def _entered_state(timeout: timedelta | None, device: torch.device | str) -> DistributedState:
    if not is_distributed_launch():
        if str(device) == "auto":
            device = _plain_device(device)
        return DistributedState(0, 1, device)
    launch = read_launch(os.environ)
    bound = _bound_device(launch, _plain_device(device))
    cuda = bound.type == "cuda"
    if cuda:
        torch.cuda.set_device(bound)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=_store_of(launch, timeout),
        timeout=timeout,
        rank=launch.rank,
        world_size=launch.world_size,
        device_id=bound if cuda else None,
    )
    return DistributedState(launch.rank, launch.world_size, bound)


def _store_of(launch: Launch, timeout: timedelta | None) -> Store:
    """The store of this run: a part of the launch's own, which can outlive a run.

    In a second run on one store gloo would take the peers' addresses of the first.
    """
    by_env = launch.launcher == "torch" and os.environ.get("RANK")
    address = "env://" if by_env else f"tcp://{launch.master_addr}:{launch.master_port}"
    limit = {} if timeout is None else {"timeout": timeout}
    store, _, _ = next(rendezvous(address, launch.rank, launch.world_size, **limit))
    if timeout is not None:
        store.set_timeout(timeout)
    number = store.add(f"distcore/runs/{launch.rank}", 1)
    return PrefixStore(f"distcore/run/{number}", store)


def _plain_device(device: torch.device | str) -> torch.device:
    """The device of a rank among several: the CPU where CUDA is wished for but absent."""
    wanted = torch.device("cuda" if str(device) == "auto" else device)
    if wanted.type == "cuda" and not torch.cuda.is_available():
        return torch.device("cpu")
    return wanted


def _bound_device(launch: Launch, device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    visible, local_rank = torch.cuda.device_count(), launch.local_rank
    if visible == 1:  # the launcher shows each rank its own
        return torch.device("cuda", 0)
    if local_rank is None:
        text = f"not set: which of the {visible} visible CUDA devices is this rank's?"
        raise PlanError(Problem("LOCAL_RANK", "missing", text))
    if local_rank >= visible:
        text = f"is {local_rank}, but only {visible} CUDA devices are visible"
        raise PlanError(Problem("LOCAL_RANK", "range", text))
    return torch.device("cuda", local_rank)
