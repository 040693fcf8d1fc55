"""Collectives: labelled calls, in which every rank gets a value or every rank raises.

Every rank makes the same calls in the same order. Each call begins with a header in which the
ranks compare what they are about to do, so that a rank that failed, or makes another call, is
known to all before any value moves. Exceptions travel as text, whatever their class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from distcore.codec import Codec, codec_named, digest, is_plain
from distcore.probes import is_distributed_run
from distcore.turn import Turn, take_turn
from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError, Problem
from distcore.v1.header import Call, digest16

if TYPE_CHECKING:
    from distcore.world import Group

V = TypeVar("V")
W = TypeVar("W")

# What these make is the same on every rank, the latter of plain values: nothing to compare.
_LISTING: Final = (list, tuple)
_FOLDING: Final = (min, max, sum, any, all, len)


def all_reduce(
    label: str,
    fn: Callable[[], V],
    combine: Callable[[list[V]], W],
    *,
    group: Group | Channel | None = None,
    codec: str = "safe",
    timeout_s: float | None = None,
) -> W:
    """Return `combine` of every rank's `fn()`, on every rank.

    Collective. `combine` gets the values in rank order and runs on every rank, on copies: tensors
    are on the CPU there. Outside a run of several ranks it is `combine([fn()])`.

    Where `fn` raises on any rank, its value cannot be sent, or `combine` raises or returns
    different values, every rank raises and the next call works again:

    - PeerError with the text of each failure, chained to the own exception where there is one;
      where all ranks fail alike, each raises its own. KeyboardInterrupt and SystemExit are told
      to the peers and raised as they are.
    - DisagreementError where the ranks make different calls, or combine to different values.
    - PeerError as soon as a rank reports that it failed elsewhere (`failure_scope`), ChannelError
      or ChannelTimeout where one does not come; then the group can be called no more.

    `group` is a process group or a channel, the default world if None. `codec="pickle"` sends
    values that the safe codec refuses; it runs whatever code the peers send.
    """
    if group is None and not is_distributed_run():
        return combine([fn()])
    with take_turn(Call.REDUCE, label, group, timeout_s=timeout_s) as turn:
        way, data = turn.attempt(lambda: _produced(turn, fn, codec))
        rows = turn.aside(lambda: _exchange(turn, data, codec))
        return _combined(turn, way, rows, combine)


def broadcast_from(
    label: str,
    fn: Callable[[], V],
    rank: int = 0,
    *,
    group: Group | Channel | None = None,
    codec: str = "safe",
    timeout_s: float | None = None,
) -> V:
    """Return `fn()`, run on global rank `rank` only, on every rank.

    Collective: every rank names the same `rank`. That rank returns its value itself, the others
    a copy, with tensors on the CPU. Outside a run of several ranks `fn` runs alone.

    Errors are those of `all_reduce`; a `rank` that is not in the group is a PlanError.
    """
    if group is None and not is_distributed_run():
        return fn()
    with take_turn(Call.BROADCAST, label, group, timeout_s=timeout_s) as turn:
        way = turn.attempt(lambda: _source_checked(turn, rank, codec))
        if turn.channel.rank == rank:
            value, data = turn.attempt(lambda: _made(turn, fn, way))
            turn.aside(lambda: _relay(turn, data, rank, codec))
        else:
            held = turn.aside(lambda: _relay(turn, None, rank, codec))
            if way.name == "safe":
                decoded: V = way.decode(held)
                return decoded
            value = turn.attempt(lambda: way.decode(held))
        if way.name != "safe":  # what the value's own code did on one rank concerns all
            turn.meet("has read the value")
        return value


def barrier(group: Group | Channel | None = None, *, timeout_s: float | None = None) -> None:
    """Return when every rank of the group has called it.

    Collective, a labelled call under the name `barrier`: unlike torch's own it raises where a
    rank makes another labelled call, or reports that it failed elsewhere. Work that is queued on
    the current CUDA stream is waited for. Does nothing in a world of one rank or without a run.
    """
    if group is None and not is_distributed_run():
        return
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    with take_turn(Call.TOGETHER, "barrier", group, timeout_s=timeout_s) as turn:
        turn.meet("is at the barrier")


def _produced(turn: Turn, fn: Callable[[], V], codec: str) -> tuple[Codec, bytearray]:
    way = codec_named(codec)
    return way, _made(turn, fn, way)[1]


def _made(turn: Turn, fn: Callable[[], V], way: Codec) -> tuple[V, bytearray]:
    value = fn()
    try:
        return value, way.encode(value)
    except PlanError as error:
        text = f"the value of {turn.label!r} from rank {turn.channel.rank} cannot be sent: {error}"
        raise PlanError(Problem("value", "unsendable", text)) from error


def _source_checked(turn: Turn, rank: int, codec: str) -> Codec:
    if rank not in turn.channel.ranks:
        text = f"expected a rank of the group, {list(turn.channel.ranks)}, got {rank!r}"
        raise PlanError(Problem("rank", "rank", text))
    return codec_named(codec)


def _exchange(turn: Turn, data: bytearray, codec: str) -> list[memoryview]:
    """Every rank's bytes on every rank, by index, once all ranks agree that they come."""
    channel = turn.channel
    headers = turn.meet(f"sends a value as {codec}", value=digest16(codec), extra=len(data))
    peers = [at for at in range(channel.size) if at != channel.index]
    slots = {at: _buffer(headers[at].extra, channel) for at in peers}
    mine = _sendable(data, channel)
    turn.move(
        {channel.ranks[at]: mine for at in peers},
        {channel.ranks[at]: slot for at, slot in slots.items()},
    )
    rows = {at: _memory(slot) for at, slot in slots.items()}
    rows[channel.index] = memoryview(data)
    return [rows[at] for at in range(channel.size)]


def _relay(turn: Turn, data: bytearray | None, rank: int, codec: str) -> memoryview:
    """The source's bytes on every rank, along a binomial tree: no rank sends more than log2."""
    channel = turn.channel
    text = f"waits for a value from rank {rank} as {codec}"
    size, root = channel.size, channel.ranks.index(rank)
    headers = turn.meet(text, value=digest16(codec), source=rank, extra=len(data or b""))
    held = _buffer(headers[root].extra, channel) if data is None else _sendable(data, channel)
    place = (channel.index - root) % size  # the source is place 0
    reach = 1
    while reach < size:
        reach *= 2
    while reach > 1:  # first to the farthest, then ever nearer
        half = reach // 2
        if place % reach == half:
            turn.move({}, {channel.ranks[(place - half + root) % size]: held})
        elif place % reach == 0 and place + half < size:
            turn.move({channel.ranks[(place + half + root) % size]: held}, {})
        reach = half
    return _memory(held)


def _combined(turn: Turn, way: Codec, rows: list[memoryview], combine: Callable[[list[V]], W]) -> W:
    if way.name == "safe":
        values: list[V] = [way.decode(row) for row in rows]
        if _is_known(combine, values):
            return turn.attempt(lambda: combine(values), all_alike=True)
    else:  # what the values' own code does on one rank concerns all
        values = turn.attempt(lambda: [way.decode(row) for row in rows])
    rows.clear()
    result = turn.attempt(lambda: combine(values))
    turn.meet(lambda: f"combine returned {result!r}", value=digest(result))
    return result


def _is_known(combine: object, values: list[V]) -> bool:
    if any(combine is known for known in _LISTING):
        return True
    return any(combine is known for known in _FOLDING) and all(map(is_plain, values))


def _sendable(data: bytearray, channel: Channel) -> torch.Tensor:
    flat = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
    return flat if channel.device == "cpu" else flat.to(channel.device)


def _buffer(nbytes: int, channel: Channel) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=channel.device)


def _memory(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.cpu().numpy()
    return memoryview(array)
