"""Gathers of bytes on several ranks: straight into place, bounded, or an error on all."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from distcore import all_reduce, broadcast_from, gather_bytes
from distcore.testing import RankPool, rank_threads
from distcore.v1.channel import Channel, Message, Pending
from distcore.v1.errors import DisagreementError, PeerError, PlanError
from distcore.v1.runtime import GroupChannel

SOON_S = 3.0
DATA = (b"", b"bb", b"ccccc")


class Recorder:
    """A channel that writes down what it receives: for each start, the sizes by peer."""

    def __init__(self, channel: GroupChannel) -> None:
        self._channel = channel
        self.received: list[dict[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name) if name != "group" else self._missing()

    def _missing(self) -> Any:
        raise AttributeError("group")

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        return self._channel.all_gather(row, timeout_s=timeout_s)

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        if receives:
            self.received.append({message.peer: message.nbytes for message in receives})
        return self._channel.start(sends, receives, timeout_s=timeout_s)


def test_the_destination_gets_all_in_order_and_the_others_nothing() -> None:
    def gather(channel: Channel) -> list[bytearray] | None:
        return gather_bytes(DATA[channel.rank], 1, channel, 2)

    none, found, nothing = rank_threads(3, gather).values()
    assert (none, nothing) == (None, None)
    assert found == [bytearray(item) for item in DATA]
    found[2].append(1)  # it is the caller's, and nobody's buffer any more


def test_a_chunk_of_each_rank_travels_at_a_time_and_nothing_is_padded() -> None:
    def gather(channel: GroupChannel) -> list[dict[int, int]]:
        recorder = Recorder(channel)
        gather_bytes(DATA[channel.rank], 0, recorder, 2)
        return recorder.received

    assert rank_threads(3, gather).values() == ([{1: 2, 2: 2}, {2: 2}, {2: 1}], [], [])


class Elsewhere(Recorder):
    """A channel whose device is not plainly the CPU, so that everything is staged."""

    device = "cpu:0"


def test_bytes_are_staged_where_the_channel_has_a_device_of_its_own() -> None:
    def gather(channel: GroupChannel) -> tuple[object, ...]:
        other = Elsewhere(channel)
        found = gather_bytes(DATA[channel.rank], 0, other, 2)
        value = all_reduce("x", lambda: DATA[channel.rank], list, group=other)
        return found, broadcast_from("y", lambda: 7, rank=1, group=other), value

    rows = [bytearray(item) for item in DATA]
    assert rank_threads(3, gather).values() == (
        (rows, 7, list(DATA)),
        (None, 7, list(DATA)),
        (None, 7, list(DATA)),
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_any_size_and_chunk(size: int, chunk: int) -> None:
    sent = [bytearray([rank]) * (7 * rank % 5) for rank in range(size)]

    def gather(channel: Channel) -> list[bytearray] | None:
        return gather_bytes(sent[channel.rank], size - 1, channel, chunk)

    assert rank_threads(size, gather).values() == (None,) * (size - 1) + (sent,)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_anything_that_is_bytes_is_gathered(kind: type) -> None:
    def gather(channel: Channel) -> list[bytearray] | None:
        return gather_bytes(kind(b"ab"), 0, channel)

    assert rank_threads(2, gather).values() == ([bytearray(b"ab")] * 2, None)


def test_a_group_outside_the_default_world_whose_ranks_do_not_start_at_zero() -> None:
    def gather(channel: GroupChannel) -> list[bytearray] | None:
        other = GroupChannel(channel.group, ranks=[4, 2])
        return gather_bytes(bytes([other.rank]), 2, other)

    assert rank_threads(2, gather).values() == (None, [bytearray(b"\4"), bytearray(b"\2")])


def in_world(channel: Channel) -> list[bytes]:
    """`dst` is a global rank, in the world and in the subgroup of ranks 1 and 3."""
    rank = channel.rank
    odd = dist.new_group([1, 3])
    found = gather_bytes(bytes([rank]), 2)
    if rank in (1, 3):
        found = gather_bytes(bytes([rank]), 3, odd) or found
        with pytest.raises(PlanError, match=r"dst: expected a rank of the group, \[1, 3\], got 0"):
            gather_bytes(b"", 0, odd)
    return [bytes(item) for item in found or []]


def test_dst_is_a_global_rank_in_a_subgroup_too_pytorch_74602_60356(pool: RankPool) -> None:
    assert pool.run(in_world).values() == (
        [],
        [],
        [b"\0", b"\1", b"\2", b"\3"],
        [b"\1", b"\3"],
    )


def bad(**given: Any) -> Callable[[Channel], object]:
    def call(channel: Channel) -> object:
        arguments: dict[str, Any] = {"data": b"x", "dst": 0, "chunk_bytes": 4, **given}
        try:
            return gather_bytes(arguments["data"], arguments["dst"], channel,
                                arguments["chunk_bytes"])  # fmt: skip
        finally:
            assert all_reduce("next", lambda: 1, list, group=channel) == [1, 1]

    return call


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dst": 2}, r"dst: expected a rank of the group, \[0, 1\], got 2"),
        ({"chunk_bytes": 0}, "chunk_bytes: expected a positive number of bytes, got 0"),
        ({"data": "text"}, "data: expected bytes, got a str"),
        ({"data": memoryview(b"abcd")[::2]}, "data: expected bytes without gaps"),
    ],
)
def test_wrong_arguments_raise_on_all_and_the_next_call_works(
    given: dict[str, Any], words: str
) -> None:
    for error in rank_threads(2, bad(**given)).raised(PlanError, within_s=SOON_S):
        assert isinstance(error, ValueError)
        with pytest.raises(PlanError, match=words):
            raise error


def test_a_wrong_argument_of_one_rank_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return gather_bytes(b"x" if channel.rank == 0 else None, 0, channel)  # type: ignore[arg-type]

    for error in rank_threads(3, call).raised(PeerError, within_s=SOON_S):
        assert list(error.failures) == [1, 2]


@pytest.mark.parametrize("given", [{"dst": (0, 1)}, {"chunk_bytes": (4, 8)}])
def test_another_destination_or_chunk_raises_on_all(given: dict[str, tuple[int, int]]) -> None:
    def call(channel: Channel) -> object:
        mine = {name: values[channel.rank] for name, values in given.items()}
        return gather_bytes(b"x", mine.get("dst", 0), channel, mine.get("chunk_bytes", 4))

    rank_threads(2, call).raised(DisagreementError, within_s=SOON_S)


def test_no_room_at_the_destination_raises_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    from distcore import gather

    def no_room(*_: object) -> list[bytearray]:
        raise MemoryError("no room")

    monkeypatch.setattr(gather, "_room", no_room)
    for error in rank_threads(3, lambda channel: gather_bytes(b"x", 1, channel)).raised(
        PeerError, within_s=SOON_S
    ):
        assert error.failures[1].startswith("MemoryError: no room")


def test_no_world_times_the_largest_is_held_eole_327_maskrcnn_383() -> None:
    """One of four ranks sends 16 MiB: the destination holds them once, the sender no copy."""
    nbytes, data = 16 << 20, bytes(16 << 20)

    def gather(channel: Channel) -> int:
        found = gather_bytes(data if channel.rank == 2 else b"", 0, channel, 1 << 20)
        return sum(map(len, found or []))

    rank_threads(4, gather).values()
    tracemalloc.start()
    assert rank_threads(4, gather).values() == (nbytes, 0, 0, 0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert nbytes <= peak < nbytes + (2 << 20)


def test_without_a_run_it_is_a_run_of_one() -> None:
    assert gather_bytes(b"ab", 0) == [bytearray(b"ab")]
    with pytest.raises(PlanError, match=r"\[0\], got 1"):
        gather_bytes(b"ab", 1)
    with pytest.raises(PlanError, match="chunk_bytes"):
        gather_bytes(b"ab", 0, None, 0)
