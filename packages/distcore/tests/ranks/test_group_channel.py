"""GroupChannel over each kind of group: bare gloo, of the default world, torchft-like, NCCL."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, HashStore, Store
from torch.distributed.device_mesh import init_device_mesh

from distcore.testing import RankPool, check_channel, loopback_group, rank_threads
from distcore.v1.channel import Channel, Message
from distcore.v1.errors import ChannelError, ChannelTimeout, DisagreementError, PlanError
from distcore.v1.runtime.group_channel import GroupChannel


def filled(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_every_rank_sends_to_every_other_rank() -> None:
    def exchange(channel: Channel) -> dict[int, list[list[int]]]:
        peers = [rank for rank in channel.ranks if rank != channel.rank]
        sends = [
            Message(peer, (filled(channel.rank, 2), filled(9, 0), filled(10 + peer, 1)))
            for peer in peers
        ]
        receives = [Message(peer, (filled(0, 2), filled(0, 0), filled(0, 1))) for peer in peers]
        channel.start(sends, receives).wait()
        return {got.peer: [buffer.tolist() for buffer in got.buffers] for got in receives}

    assert rank_threads(3, exchange).values() == (
        {1: [[1, 1], [], [10]], 2: [[2, 2], [], [10]]},
        {0: [[0, 0], [], [11]], 2: [[2, 2], [], [11]]},
        {0: [[0, 0], [], [12]], 1: [[1, 1], [], [12]]},
    )


def test_all_gather_returns_rows_by_index() -> None:
    gathered = rank_threads(3, lambda channel: channel.all_gather(bytes([channel.rank]) * 2))
    assert gathered.values() == ((b"\0\0", b"\1\1", b"\2\2"),) * 3


def test_rows_of_different_lengths_raise_on_every_rank() -> None:
    outcomes = rank_threads(3, lambda channel: channel.all_gather(b"x" * (8 + channel.rank)))
    for error in outcomes.raised(DisagreementError, within_s=3):
        assert error.values == {0: "8 bytes", 1: "9 bytes", 2: "10 bytes"}


def test_a_group_of_one_needs_no_peer() -> None:
    def alone(channel: Channel) -> tuple[bytes, ...]:
        channel.start([], []).wait()
        return channel.all_gather(b"row")

    assert rank_threads(1, alone).values() == ((b"row",),)


def test_a_silent_peer_is_a_timeout_that_names_it() -> None:
    def rank_one_is_silent(channel: Channel) -> None:
        if channel.rank == 1:
            time.sleep(1.5)
            return
        begin = time.monotonic()
        with pytest.raises(ChannelTimeout, match="rank 1") as caught:
            channel.start([], [Message(1, (filled(0, 4),))], timeout_s=0.3).wait()
        assert time.monotonic() - begin < 1.4
        assert (caught.value.peer, caught.value.usable) == (1, False)
        with pytest.raises(ChannelError, match="broke before"):
            channel.all_gather(b"row")

    rank_threads(2, rank_one_is_silent).values()


def test_the_channels_own_timeout_bounds_all_gather() -> None:
    def rank_one_is_silent(channel: GroupChannel) -> None:
        if channel.rank == 1:
            time.sleep(1)
            return
        with pytest.raises(ChannelTimeout):
            GroupChannel(channel.group, timeout_s=0.3).all_gather(b"row")

    rank_threads(2, rank_one_is_silent).values()


@pytest.mark.parametrize("peer", [0, 2, -1])
def test_a_peer_that_is_no_other_rank_is_refused(peer: int) -> None:
    def wrong(channel: Channel) -> None:
        channel.start([Message(peer if channel.rank == 0 else 1, (filled(0, 1),))], [])

    rank_threads(2, wrong).raised(PlanError)


def test_a_second_message_for_one_peer_is_refused() -> None:
    def twice(channel: Channel) -> None:
        message = Message(1 - channel.rank, (filled(0, 1),))
        channel.start([message, message], [])

    rank_threads(2, twice).raised(PlanError)


def test_no_group_is_refused() -> None:
    with pytest.raises(PlanError, match="process group"):
        GroupChannel(-100)  # type: ignore[arg-type]


def test_global_ranks_may_be_given_for_a_group_outside_the_default_world() -> None:
    def named(channel: GroupChannel) -> tuple[int, tuple[int, ...], tuple[bytes, ...]]:
        other = GroupChannel(channel.group, ranks=[7, 3])
        peer = 3 if other.rank == 7 else 7
        got = filled(0, 1)
        other.start([Message(peer, (filled(other.rank, 1),))], [Message(peer, (got,))]).wait()
        return other.rank, other.ranks, (bytes(got.tolist()),)

    assert rank_threads(2, named).values() == ((7, (7, 3), (b"\3",)), (3, (7, 3), (b"\7",)))


def test_a_message_that_was_dropped_breaks_the_channel() -> None:
    """Else the next message would be taken for it."""

    def drop(channel: Channel) -> None:
        pending = channel.start([], [Message(1 - channel.rank, (filled(0, 4),))])
        del pending
        channel.all_gather(b"row")

    for error in rank_threads(2, drop).raised(ChannelError, within_s=3):
        assert "dropped before it was waited for" in str(error)


class FakeWork:
    """A work in the manner of torchft: wait takes an optional timeout and says True."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        return self._work.wait() if timeout is None else self._work.wait(timeout)


class FaultTolerantGroup:
    """A group in the manner of torchft: written in Python, in no world, over another group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._group = loopback_group(store, rank, size)

    def getBackendName(self) -> str:  # noqa: N802 - the name that torch asks for
        return "torchft-gloo"

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> FakeWork:
        return FakeWork(self._group.send(tensors, dst_rank, tag))  # type: ignore[attr-defined]

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> FakeWork:
        return FakeWork(self._group.recv(tensors, src_rank, tag))  # type: ignore[attr-defined]

    def allgather(
        self,
        output_tensors: list[list[torch.Tensor]],
        input_tensor: list[torch.Tensor],
        opts: object,
    ) -> FakeWork:
        assert isinstance(opts, AllgatherOptions)
        return FakeWork(self._group.allgather(output_tensors, input_tensor, opts))  # type: ignore[attr-defined]


class SwallowingGroup(FaultTolerantGroup):
    """A group whose work says False instead of raising."""

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> FakeWork:
        work = super().recv(tensors, src_rank, tag)
        work.wait = lambda timeout=None: False  # type: ignore[method-assign]
        return work


def test_a_bare_group_keeps_the_contract() -> None:
    check_channel(lambda rank, size, store: GroupChannel(loopback_group(store, rank, size)))


def test_a_torchft_like_group_keeps_the_contract() -> None:
    check_channel(lambda rank, size, store: GroupChannel(FaultTolerantGroup(store, rank, size)))


def test_work_that_was_given_up_silently_is_an_error() -> None:
    store = HashStore()

    def exchange(channel: Channel) -> None:
        own = GroupChannel(SwallowingGroup(store, channel.rank, channel.size))
        peer = 1 - channel.rank
        with pytest.raises(ChannelError, match="aborted") as caught:
            own.start([Message(peer, (filled(0, 1),))], [Message(peer, (filled(0, 1),))]).wait()
        assert caught.value.peer == peer
        channel.all_gather(b"both have seen it")

    rank_threads(2, exchange).values()


def subgroups(channel: Channel) -> list[object]:
    """Ranks 1 and 3 meet in a group of their own; 0 and 2 are not in it."""
    group = dist.new_group([1, 3])
    if channel.rank not in {1, 3}:
        with pytest.raises(PlanError, match="process group"):
            GroupChannel(group)
        return []
    pair = GroupChannel(group)
    peer = 4 - pair.rank
    got = filled(0, 2)
    pair.start([Message(peer, (filled(pair.rank, 2),))], [Message(peer, (got,))]).wait()
    rows = pair.all_gather(bytes([pair.rank]))
    return [pair.rank, pair.index, pair.size, pair.ranks, pair.device, got.tolist(), rows]


def test_a_subgroup_speaks_of_global_ranks(pool: RankPool) -> None:
    assert pool.run(subgroups).values() == (
        [],
        [1, 0, 2, (1, 3), "cpu", [3, 3], (b"\1", b"\3")],
        [],
        [3, 1, 2, (1, 3), "cpu", [1, 1], (b"\1", b"\3")],
    )


def ranks_of_a_mesh_axis(channel: Channel) -> tuple[int, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    return GroupChannel(mesh["outer"].get_group()).ranks


def test_a_mesh_axis_is_a_group(pool: RankPool) -> None:
    assert pool.run(ranks_of_a_mesh_axis).values() == ((0, 2), (1, 3), (0, 2), (1, 3))


def send_only(channel: Channel) -> str:
    """The others wait for rank 2, which raised before it came here."""
    if channel.rank == 2:
        raise KeyError("own trouble")
    receive = Message(2, (filled(0, 8),))
    channel.start([], [receive], timeout_s=0.5).wait()
    return "arrived"


def test_a_process_that_fails_elsewhere_is_a_timeout(pool: RankPool) -> None:
    outcomes = pool.run(send_only)
    for outcome in outcomes:
        kind = KeyError if outcome.rank == 2 else ChannelTimeout
        assert isinstance(outcome.exception, kind)
        assert outcome.seconds < 3


@pytest.mark.gpu
def test_nccl_keeps_the_contract() -> None:
    if torch.cuda.device_count() < 3:
        pytest.skip(f"needs 3 CUDA devices for 3 ranks, found {torch.cuda.device_count()}")

    def make(rank: int, size: int, store: Store) -> Channel:
        torch.cuda.set_device(rank)
        options = dist.ProcessGroupNCCL.Options()
        channel = GroupChannel(dist.ProcessGroupNCCL(store, rank, size, options), timeout_s=20)
        channel.all_gather(b"connect")
        return channel

    check_channel(make, deadline_s=60)


@pytest.mark.gpu
def test_a_group_of_both_backends_carries_either() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        assert GroupChannel(world).device == "cpu"
        assert GroupChannel(world, device="cuda").device == "cuda:0"
        assert GroupChannel(world, device="cuda").all_gather(b"row") == (b"row",)
    finally:
        dist.destroy_process_group()
