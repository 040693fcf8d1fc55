"""GroupChannel: a channel over a process group object.

Any object serves that sends and receives lists of tensors: a group of `init_process_group` or
`new_group`, a bare `ProcessGroupGloo` that is in no default world, an NCCL group, a group of
several backends, or a fault-tolerant group in the manner of torchft.
On CPU groups rows and buffers both go point to point. (gloo's own all_gather takes longer at
every size of row and number of ranks that were measured, and ends the process where a row is
longer than expected.)
"""

from __future__ import annotations

import copy
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Backend

from distcore.v1.channel import Message, Pending
from distcore.v1.errors import ChannelError, ChannelTimeout, PlanError
from distcore.v1.runtime.addressing import check_peers
from distcore.v1.runtime.operation_rounds import Operation, cut_groups, in_pair_order
from distcore.v1.runtime.row_frame import HEADER_NBYTES, frame_row, read_rows, slot_nbytes
from distcore.v1.runtime.same_host import SameHostChannel, with_same_host

# Tags of their own, so that messages never match the caller's own sends with the default tag 0.
# One tag serves all messages of a kind: backends keep messages of one tag and pair in order.
_ROW_TAG = 0x64630001
_BUFFER_TAG = 0x64630002


class TensorWork(Protocol):
    """An operation under way; the part of `torch.distributed.Work` that a channel uses."""

    def wait(self, timeout: timedelta = ..., /) -> bool | None:
        """Return when the operation is done, raise where it failed or `timeout` ran out."""


class TensorGroup(Protocol):
    """The part of a process group that a channel uses; positions, not global ranks."""

    def rank(self) -> int:
        """Return the caller's position in the group."""

    def size(self) -> int:
        """Return the number of ranks in the group."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> TensorWork:
        """Start to send `tensors` to position `dst`."""

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> TensorWork:
        """Start to receive `tensors` from position `src`."""

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: object,
        /,
    ) -> TensorWork:
        """Start to gather `inputs[0]` of all ranks into `outputs[0]`."""


class GroupChannel:
    """Carries bytes over `group`; see `Channel` for what its methods promise.

    `ranks` are the global ranks by position. They default to what the default world says of the
    group, or to the group's own positions where it is in no default world.
    `device` defaults to `"cpu"` where the group carries CPU tensors, else to the current CUDA
    device; `"cuda"` may be asked for on a group that carries both.
    `timeout_s` bounds every call that names no timeout of its own; without either, the group's
    own timeout holds. On CUDA a wait without a timeout orders the current stream after the
    transfer and does not stop the host.

    The group stays the caller's: the channel neither makes nor destroys it. One thread at
    a time may use the channels of one group. After a ChannelError with `usable=False` every
    further call raises at once. On NCCL the first call must be an `all_gather`, in which all
    ranks meet and the group connects.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Backend | TensorGroup,
        *,
        ranks: Sequence[int] | None = None,
        device: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        # A rank outside the group of `new_group` gets a marker instead of a group.
        if not hasattr(group, "send"):
            raise PlanError(f"group: expected a process group with this rank in it, got {group!r}")
        self._group = cast("TensorGroup", group)
        self._index = self._group.rank()
        self._ranks = _global_ranks(self._group) if ranks is None else tuple(ranks)
        if len(self._ranks) != self._group.size() or len(set(self._ranks)) != len(self._ranks):
            raise PlanError(
                f"ranks: expected {self._group.size()} different global ranks, got {self._ranks}"
            )
        self._positions = {rank: position for position, rank in enumerate(self._ranks)}
        self._device = _device_of(group, device)
        self._timeout_s = timeout_s
        self._broken: str | None = None
        self._same_host: SameHostChannel | None = None

    @property
    def group(self) -> TensorGroup:
        """The process group, as it was handed in."""
        return self._group

    @property
    def rank(self) -> int:
        """The global rank of the caller."""
        return self._ranks[self._index]

    @property
    def index(self) -> int:
        """The caller's position in the group."""
        return self._index

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self._ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group, by index."""
        return self._ranks

    @property
    def device(self) -> str:
        """The device on which buffers must lie."""
        return self._device

    def same_host(self, *, timeout_s: float | None = None) -> SameHostChannel:
        """Return this channel with short ways between ranks of one host. Collective at first.

        The first call makes a wrapper, which later calls return; `close` frees it, and so does
        dropping this channel. See `with_same_host`.
        """
        if self._same_host is None:
            # The wrapper has a copy inside, so that the two do not keep each other alive.
            self._same_host = with_same_host(
                copy.copy(self), timeout_s=self._timeout_s, handshake_timeout_s=timeout_s
            )
        return self._same_host

    def close(self) -> None:
        """Free what `same_host` made; idempotent. The group is left as it is."""
        if self._same_host is not None:
            self._same_host.close()
            self._same_host = None

    def scatters(self, peer: int) -> bool:
        """Return False: each buffer is a message of its own."""
        return False

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Return every rank's `row`, by index. All rows must have one length on all ranks.

        On the CPU, lengths that differ by up to 16 KiB raise DisagreementError on every rank; a
        larger difference can end the process (gloo), and so can any difference on NCCL. So
        callers keep one fixed length per kind of exchange.
        """
        if self.size == 1:
            return (bytes(row),)
        self._refuse_if_broken()
        deadline = self._deadline(timeout_s)
        if self._device == "cpu":
            slots = self._gather_by_messages(row, deadline)
        else:
            slots = self._gather_by_collective(row, deadline)
        return read_rows(slots, len(row), self._ranks)

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        """Start messages to and from other ranks, at most one per peer and direction.

        Empty buffers are skipped on both ends. The timeout counts from here to the end of
        `wait`. A receive that is shorter than what the peer sends ends the process (gloo).
        """
        check_peers(self, sends, receives)
        outgoing, incoming = self._by_position(sends), self._by_position(receives)
        deadline = self._deadline(timeout_s)
        pending = _Works(self, deadline)
        if not outgoing and not incoming:
            return pending
        self._refuse_if_broken()
        if self._device == "cpu":
            # Receives first: a message that finds its buffer posted is not queued by the peer.
            for operation in _receives_first(outgoing, incoming):
                pending.works.append((operation.peer, self._post(operation, deadline)))
        elif (coalesce := _coalescing(self._group, self._device)) is not None:
            for group in cut_groups(self._index, self.size, outgoing, incoming):
                with self.carried(None, deadline):
                    works = coalesce(group)
                pending.works.extend((None, work) for work in works)
        else:
            for operation in in_pair_order(self._index, outgoing, incoming):
                pending.works.append((operation.peer, self._post(operation, deadline)))
        return pending

    def finish(self, position: int | None, work: TensorWork, deadline: float | None) -> None:
        """Wait for one operation with the rank at `position` and turn its error into ours."""
        with self.carried(position, deadline):
            if deadline is None:
                done = work.wait()
            else:
                # A timeout of zero would mean none at all.
                left_s = max(deadline - time.monotonic(), 0.001)
                done = work.wait(timedelta(seconds=left_s))
            if done is False:
                raise RuntimeError("the operation was aborted")

    @contextmanager
    def carried(self, position: int | None, deadline: float | None) -> Iterator[None]:
        """Turn what the backend raises into a ChannelError that names the peer."""
        try:
            yield
        except (RuntimeError, OSError) as error:
            peer = None if position is None else self._ranks[position]
            who = f"ranks {list(self._ranks)}" if peer is None else f"rank {peer}"
            reason = _reason(error)
            text = f"rank {self.rank}: the exchange with {who} failed: {reason}"
            self.give_up(text)
            if _ran_out(error, deadline):
                raise ChannelTimeout(text, peer=peer, usable=False) from error
            raise ChannelError(text, peer=peer, usable=False) from error

    def give_up(self, reason: str) -> None:
        """Make every later call raise: what the peers sent and what we expect no longer fit."""
        if self._broken is None:
            self._broken = reason

    def _refuse_if_broken(self) -> None:
        if self._broken is not None:
            raise ChannelError(f"the channel broke before: {self._broken}", usable=False)

    def _deadline(self, timeout_s: float | None) -> float | None:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        return None if limit_s is None else time.monotonic() + limit_s

    def _by_position(self, messages: Sequence[Message]) -> dict[int, list[torch.Tensor]]:
        buffers = {
            self._positions[message.peer]: [b for b in message.buffers if b.numel()]
            for message in messages
        }
        return {position: found for position, found in buffers.items() if found}

    def _post(
        self, operation: Operation, deadline: float | None, tag: int = _BUFFER_TAG
    ) -> TensorWork:
        with self.carried(operation.peer, deadline):
            post = self._group.send if operation.sends else self._group.recv
            return post([operation.buffer], operation.peer, tag)

    def _gather_by_messages(self, row: bytes, deadline: float | None) -> list[bytes]:
        mine = frame_row(row)
        sent = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        slots = torch.zeros((self.size, slot_nbytes(len(row))), dtype=torch.uint8)
        peers = [(self._index + step) % self.size for step in range(1, self.size)]
        operations = [Operation(False, peer, slots[peer]) for peer in reversed(peers)]
        operations += [Operation(True, peer, sent) for peer in peers]
        works = [(op.peer, self._post(op, deadline, _ROW_TAG)) for op in operations]
        for peer, work in works:
            self.finish(peer, work, deadline)
        found = [slot.numpy().tobytes() for slot in slots[:, : HEADER_NBYTES + len(row)]]
        found[self._index] = mine
        return found

    def _gather_by_collective(self, row: bytes, deadline: float | None) -> list[bytes]:
        mine = torch.frombuffer(bytearray(frame_row(row)), dtype=torch.uint8).to(self._device)
        slots = [torch.empty_like(mine) for _ in self._ranks]
        with self.carried(None, deadline):
            options = AllgatherOptions()
            work = self._group.allgather([slots], [mine], options)
        self.finish(None, work, deadline)
        return [slot.numpy().tobytes() for slot in torch.stack(slots).cpu()]


class _Works:
    """Operations under way; each with its peer's position where there is one."""

    def __init__(self, channel: GroupChannel, deadline: float | None) -> None:
        self.works: deque[tuple[int | None, TensorWork]] = deque()
        self._channel = channel
        self._deadline = deadline

    def wait(self) -> None:
        """Return when every operation is done; where one fails, the others are given up."""
        while self.works:
            self._channel.finish(*self.works[0], self._deadline)
            self.works.popleft()

    def __del__(self) -> None:
        # A later message would be taken for the one that nobody received.
        if self.works:
            self._channel.give_up("a message was dropped before it was waited for")


def _receives_first(
    outgoing: dict[int, list[torch.Tensor]], incoming: dict[int, list[torch.Tensor]]
) -> Iterator[Operation]:
    for sends, messages in ((False, incoming), (True, outgoing)):
        for peer, buffers in messages.items():
            for buffer in buffers:
                yield Operation(sends, peer, buffer)


def _reason(error: Exception) -> str:
    first = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[[^\]]*\] *", "", first) or type(error).__name__  # less the source line


def _ran_out(error: Exception, deadline: float | None) -> bool:
    if isinstance(error, TimeoutError) or "timed out" in str(error).lower():
        return True
    return deadline is not None and time.monotonic() >= deadline


def _global_ranks(group: TensorGroup) -> tuple[int, ...]:
    own = tuple(range(group.size()))
    if not dist.is_initialized():
        return own
    try:
        return tuple(dist.get_process_group_ranks(cast("dist.ProcessGroup", group)))
    except (KeyError, TypeError):  # a group that the default world does not know
        return own


def _device_of(group: object, wanted: str | None) -> str:
    if wanted is None:
        types = [device.type for device in getattr(group, "_device_types", None) or ()]
        if not types:
            types = ["cuda" if "nccl" in _backend_name(group) else "cpu"]
        wanted = "cpu" if "cpu" in types else types[0]
    return f"cuda:{torch.cuda.current_device()}" if wanted == "cuda" else wanted


def _backend_name(group: object) -> str:
    for method in ("getBackendName", "name"):
        named = getattr(group, method, None)
        if callable(named):
            return str(named()).lower()
    return ""


def _coalescing(
    group: TensorGroup, device: str
) -> Callable[[tuple[Operation, ...]], list[TensorWork]] | None:
    """Return what runs operations as one, or None for a group that is written in Python.

    Those have the names of torch's coalescing only by inheritance.
    """
    if isinstance(getattr(type(group), "send", None), FunctionType):
        return None
    begin = getattr(group, "_start_coalescing", None)
    end = getattr(group, "_end_coalescing", None)
    if begin is None or end is None:
        return None
    # A ProcessGroup of several backends asks for the device, a bare backend has but one.
    where = (torch.device(device),) if isinstance(group, dist.ProcessGroup) else ()

    def run(operations: tuple[Operation, ...]) -> list[TensorWork]:
        begin(*where)
        for operation in operations:
            post = group.send if operation.sends else group.recv
            post([operation.buffer], operation.peer, _BUFFER_TAG)
        work = end(*where)
        return [] if work is None else [work]

    return run
