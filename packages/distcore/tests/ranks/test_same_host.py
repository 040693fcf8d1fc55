"""with_same_host: every carrier keeps the contract, and a rank that fails or dies is told."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import Store

from distcore.testing import RankDiedError, RankPool, check_channel, loopback_group, rank_threads
from distcore.v1.channel import Channel, Message
from distcore.v1.errors import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PlanError,
)
from distcore.v1.runtime import host_handshake, shared_segment
from distcore.v1.runtime.cross_memory import CARRIED_NBYTES
from distcore.v1.runtime.group_channel import GroupChannel
from distcore.v1.runtime.host_link import OFFERED
from distcore.v1.runtime.process_memory import may_read
from distcore.v1.runtime.same_host import SameHostChannel, with_same_host

SHORT = ["cross_memory", "segment"]
# More than goes through the socket itself.
LARGE = 2 * CARRIED_NBYTES


def filled(value: int, nbytes: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def exchange(channel: Channel, *, nbytes: int = 1000) -> list[int]:
    """Send own rank to all, and return what came from each peer."""
    peers = [rank for rank in channel.ranks if rank != channel.rank]
    receives = [Message(peer, (filled(255, nbytes), filled(255, 1))) for peer in peers]
    sends = [Message(peer, (filled(channel.rank, nbytes), filled(7, 1))) for peer in peers]
    channel.start(sends, receives, timeout_s=10).wait()
    for message in receives:
        assert bool((message.buffers[0] == message.peer).all())
        assert message.buffers[1].tolist() == [7]
    return [message.peer for message in receives]


def ways(channel: SameHostChannel) -> dict[tuple[int, int], str]:
    return {
        (src, dst): channel.carrier(src, dst)
        for src in channel.ranks
        for dst in channel.ranks
        if src != dst
    }


def this_rank() -> int:
    """The rank of the thread that is running: thread ranks are named for it."""
    return int(threading.current_thread().name.removeprefix("rank-"))


@pytest.mark.parametrize("mode", ["auto", "off", *SHORT])
def test_every_mode_keeps_the_contract(mode: str) -> None:
    def make(rank: int, size: int, store: Store) -> Channel:
        inner = GroupChannel(loopback_group(store, rank, size))
        return inner if size == 1 else with_same_host(inner, mode=mode)

    check_channel(make)


def test_a_group_of_one_has_nobody_to_meet() -> None:
    def alone(channel: Channel) -> tuple[bytes, ...]:
        with with_same_host(channel, mode="segment") as short:
            short.start([], []).wait()
            return short.all_gather(b"row")

    assert rank_threads(1, alone).values() == ((b"row",),)


@pytest.mark.parametrize(
    ("mode", "carrier"),
    [
        ("auto", "cross_memory"),
        ("cross_memory", "cross_memory"),
        ("segment", "segment"),
        ("off", "inner"),
    ],
)
def test_the_mode_decides_the_carrier(mode: str, carrier: str) -> None:
    def look(channel: Channel) -> tuple[set[str], bool]:
        with with_same_host(channel, mode=mode) as short:
            exchange(short)
            return set(ways(short).values()), short.scatters(1 - short.rank)

    assert rank_threads(2, look).values() == (({carrier}, carrier != "inner"),) * 2


def test_an_unknown_mode_is_refused() -> None:
    rank_threads(2, lambda channel: with_same_host(channel, mode="fast")).raised(PlanError)


def test_modes_that_differ_raise_on_every_rank() -> None:
    def differ(channel: Channel) -> None:
        with_same_host(channel, mode="off" if channel.rank == 1 else "auto")

    for error in rank_threads(3, differ).raised(DisagreementError, within_s=3):
        assert error.values == {0: "auto", 1: "off", 2: "auto"}


def test_who_may_not_read_gets_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 2 is refused: what it receives goes through segments, the rest does not."""

    def refuse_rank_two(pid: int, address: int, expected: bytes) -> bool:
        return this_rank() != 2 and may_read(pid, address, expected)

    monkeypatch.setattr(host_handshake, "may_read", refuse_rank_two)

    def look(channel: Channel) -> dict[tuple[int, int], str]:
        with with_same_host(channel) as short:
            exchange(short, nbytes=5_000_000)
            exchange(short)
            assert short.scatters((short.rank + 1) % 3)
            return ways(short)

    expected = {
        (0, 1): "cross_memory",
        (0, 2): "segment",
        (1, 0): "cross_memory",
        (1, 2): "segment",
        (2, 0): "cross_memory",
        (2, 1): "cross_memory",
    }
    assert rank_threads(3, look).values() == (expected,) * 3


def test_what_is_not_allowed_at_all_goes_through_the_inner_channel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> int:
        raise OSError("no more memory")

    def refuse_rank_zero(pid: int, address: int, expected: bytes) -> bool:
        return this_rank() != 0 and may_read(pid, address, expected)

    monkeypatch.setattr(host_handshake, "may_read", refuse_rank_zero)
    monkeypatch.setattr(host_handshake, "make_segment", refuse)

    def look(channel: Channel) -> tuple[str, str, bool]:
        with with_same_host(channel) as short:
            exchange(short)
            return short.carrier(0, 1), short.carrier(1, 0), short.scatters(1 - short.rank)

    assert rank_threads(2, look).values() == (("cross_memory", "inner", False),) * 2


def test_a_forced_mode_that_is_not_allowed_raises_on_every_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_handshake, "may_read", lambda *_: this_rank() != 0)

    def force(channel: Channel) -> None:
        with_same_host(channel, mode="cross_memory")

    for error in rank_threads(3, force).raised(ChannelError, within_s=3):
        assert "[(1, 0), (2, 0)]" in str(error)
        assert error.usable


def test_ranks_of_two_hosts_use_the_inner_channel_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_handshake, "_host", lambda: bytes([this_rank() // 2]) * 16)

    def look(channel: Channel) -> tuple[set[tuple[int, int]], tuple[bytes, ...]]:
        with with_same_host(channel) as short:
            exchange(short)
            rows = short.all_gather(bytes([short.rank]))
            return {pair for pair, way in ways(short).items() if way == "cross_memory"}, rows

    expected = {(0, 1), (1, 0), (2, 3), (3, 2)}, (b"\0", b"\1", b"\2", b"\3")
    assert rank_threads(4, look).values() == (expected,) * 4


def test_equal_names_of_hosts_are_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the name that a peer gives, and its process is somebody else's."""
    monkeypatch.setattr(host_handshake._Handshake, "_connect", lambda *_: None)

    def look(channel: Channel) -> set[str]:
        with with_same_host(channel) as short:
            exchange(short)
            return set(ways(short).values())

    assert rank_threads(2, look).values() == ({"inner"},) * 2


def test_a_stranger_at_the_door_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that does not know the secret gets no link, and the right caller still does."""
    connect = host_handshake._Handshake._connect
    strangers: list[socket.socket] = []

    def with_a_stranger_first(
        self: host_handshake._Handshake, card: host_handshake._Card
    ) -> object:
        stranger = connect(self, card._replace(secret=b"\0" * 16))
        assert stranger is not None
        strangers.append(stranger)
        return connect(self, card)

    monkeypatch.setattr(host_handshake._Handshake, "_connect", with_a_stranger_first)

    def look(channel: Channel) -> set[str]:
        with with_same_host(channel) as short:
            exchange(short)
            return set(ways(short).values())

    assert rank_threads(3, look).values() == ({"cross_memory"},) * 3
    assert len(strangers) == 3
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("mode", SHORT)
def test_rows_of_different_lengths_raise_on_every_rank(mode: str) -> None:
    def gather(channel: Channel) -> None:
        with with_same_host(channel, mode=mode) as short:
            with pytest.raises(DisagreementError) as caught:
                short.all_gather(b"x" * (1 + short.rank))
            assert caught.value.values == {0: "1 bytes", 1: "2 bytes", 2: "3 bytes"}
            assert short.all_gather(b"fine") == (b"fine",) * 3

    rank_threads(3, gather).values()


@pytest.mark.parametrize("nbytes", [10, LARGE])
@pytest.mark.parametrize("mode", SHORT)
def test_sizes_that_differ_raise(mode: str, nbytes: int) -> None:
    def differ(channel: Channel) -> None:
        with with_same_host(channel, mode=mode) as short:
            peer = 1 - short.rank
            sent, received = (filled(0, nbytes),), (filled(0, nbytes + short.rank),)
            short.start([Message(peer, sent)], [Message(peer, received)], timeout_s=5).wait()
            short.all_gather(b"done")

    outcomes = rank_threads(2, differ)
    outcomes.raised(ChannelError, within_s=3)
    assert "rank 0 sends" in str(outcomes[1].exception)


@pytest.mark.parametrize("mode", SHORT)
def test_a_rank_that_fails_between_start_and_wait_is_told_at_once(mode: str) -> None:
    """Its buffers may be reused, so nobody may read them late and take them for the message."""

    def rank_zero_fails(channel: Channel) -> None:
        short = with_same_host(channel, mode=mode)
        peer = 1 - short.rank
        if short.rank == 0:
            pending = short.start([Message(peer, (filled(1, 9_000_000),))], [], timeout_s=30)
            del pending
            with pytest.raises(ChannelError, match="dropped before it was waited for"):
                short.all_gather(b"row")
            raise ChannelError("own trouble")
        time.sleep(0.3)
        short.start([], [Message(peer, (filled(0, 9_000_000),))], timeout_s=30).wait()

    rank_threads(2, rank_zero_fails).raised(ChannelError, within_s=3)


def test_what_lies_in_the_segment_outlives_its_sender() -> None:
    nbytes = shared_segment.NUM_SLOTS * shared_segment.SLOT_NBYTES

    def send_and_leave(channel: Channel) -> bool:
        with with_same_host(channel, mode="segment") as short:
            if short.rank == 0:
                short.start([Message(1, (filled(1, nbytes),))], [], timeout_s=5).wait()
                return True
            time.sleep(0.3)
            got = filled(0, nbytes)
            short.start([], [Message(0, (got,))], timeout_s=5).wait()
            return bool((got == 1).all())

    assert rank_threads(2, send_and_leave).values() == (True, True)


@pytest.mark.parametrize("nbytes", [9, LARGE])
@pytest.mark.parametrize("mode", SHORT)
def test_buffers_of_a_dropped_receive_are_not_written_late(mode: str, nbytes: int) -> None:
    """Their memory may be somebody else's by then."""

    def drop_the_first(channel: Channel) -> None:
        with with_same_host(channel, mode=mode) as short:
            if short.rank == 0:
                started = [short.start([Message(1, (filled(1, nbytes),))], []) for _ in range(2)]
                short.all_gather(b"sent")
                for pending in started:
                    pending.wait()
                short.all_gather(b"row")
            short.all_gather(b"sent")
            first, second = filled(0, nbytes), filled(0, nbytes)
            dropped = short.start([], [Message(0, (first,))])
            kept = short.start([], [Message(0, (second,))])
            del dropped
            try:
                kept.wait()
            finally:
                assert not first.any()
                assert not second.any()

    rank_threads(2, drop_the_first).raised(ChannelError, within_s=3)


def test_what_a_sender_gave_up_is_not_read_late() -> None:
    def impatient_sender(channel: Channel) -> None:
        short = with_same_host(channel, mode="cross_memory")
        if short.rank == 0:
            with pytest.raises(ChannelTimeout) as caught:
                short.start([Message(1, (filled(1, LARGE),))], [], timeout_s=0.1).wait()
            assert caught.value.peer == 1
        else:
            time.sleep(0.5)
            with pytest.raises(ChannelError, match="gave up") as broken:
                short.start([], [Message(0, (filled(0, LARGE),))], timeout_s=5).wait()
            assert broken.value.peer == 0

    rank_threads(2, impatient_sender).values()


def test_a_small_message_needs_no_answer() -> None:
    """Its buffers may be changed at once, and the sender may leave."""

    def send_and_leave(channel: Channel) -> list[list[int]]:
        with with_same_host(channel, mode="cross_memory") as short:
            if short.rank == 0:
                sent = (filled(1, 2), filled(9, 0), filled(3, 1))
                short.start([Message(1, sent)], [], timeout_s=5).wait()
                return []
            time.sleep(0.3)
            got = (filled(0, 2), filled(0, 0), filled(0, 1))
            short.start([], [Message(0, got)], timeout_s=5).wait()
            return [buffer.tolist() for buffer in got]

    assert rank_threads(2, send_and_leave).values() == ([], [[1, 1], [], [3]])


def test_sizes_around_what_the_socket_carries() -> None:
    sizes = [CARRIED_NBYTES - 1, CARRIED_NBYTES, CARRIED_NBYTES + 1, 5, LARGE, 1]

    def send(channel: Channel) -> bool:
        with with_same_host(channel, mode="cross_memory") as short:
            peer = 1 - short.rank
            sent = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in sizes]
            got = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
            started = [
                short.start([Message(peer, (one,))], [Message(peer, (other,))], timeout_s=5)
                for one, other in zip(sent, got, strict=True)
            ]
            for pending in started:
                pending.wait()
            return all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))

    assert rank_threads(2, send).values() == (True, True)


def test_memory_that_cannot_be_read_names_the_peer() -> None:
    """As where a process gave memory back that it had offered."""

    def unreadable(channel: Channel) -> None:
        with with_same_host(channel, mode="cross_memory") as short:
            if short.rank == 0:
                short._peers[1].link.send(OFFERED, nbytes=8, payload=(4096).to_bytes(8, "little"))
                short.all_gather(b"row", timeout_s=5)
            else:
                short.start([], [Message(0, (filled(0, 8),))], timeout_s=5).wait()

    outcomes = rank_threads(2, unreadable)
    for error in outcomes.raised(ChannelError, within_s=3):
        assert error.peer is not None
    assert "rank 0 cannot be read: Bad address" in str(outcomes[1].exception)


@pytest.mark.parametrize("mode", SHORT)
def test_close_gives_everything_back(mode: str) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    counts: dict[str, int] = {}

    def use(channel: Channel) -> None:
        channel.all_gather(b"row")
        if channel.rank == 0:
            counts["before"] = descriptors()
        channel.all_gather(b"row")
        with with_same_host(channel, mode=mode) as short:
            exchange(short, nbytes=5_000_000)
            short.close()
        with pytest.raises(ChannelError, match="closed"):
            short.all_gather(b"row")
        channel.all_gather(b"row")
        if channel.rank == 0:
            counts["after"] = descriptors()
        channel.all_gather(b"row")

    rank_threads(3, use).values()
    assert counts["after"] == counts["before"]


def test_a_group_channel_keeps_its_wrapper_until_it_is_dropped() -> None:
    def use(channel: GroupChannel) -> tuple[bool, bool]:
        own = GroupChannel(channel.group, timeout_s=10)
        short = own.same_host()
        exchange(short)
        kept = short is own.same_host()
        link = short._peers[1 - own.rank].link
        channel.all_gather(b"done")
        del own, short
        return kept, link.lost

    assert rank_threads(2, use).values() == ((True, True),) * 2


def test_the_segment_is_used_in_turn_however_large_a_message_is() -> None:
    slots = shared_segment.SLOT_NBYTES
    sizes = [slots - 1, 1, 3, 2 * slots, 0, slots // 2 + 7]

    def send(channel: Channel) -> bool:
        with with_same_host(channel, mode="segment") as short:
            sent = [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in sizes]
            got = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
            peer = 1 - short.rank
            for _ in range(2):
                short.start([Message(peer, tuple(sent))], [Message(peer, tuple(got))]).wait()
            return all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))

    assert rank_threads(2, send).values() == (True, True)


def exchange_between_processes(channel: Channel, mode: str) -> list[str]:
    with with_same_host(channel, mode=mode) as short:
        for nbytes in (1, 100, 9_000_000):
            exchange(short, nbytes=nbytes)
        rows = short.all_gather(bytes([short.rank]))
        assert rows == tuple(bytes([rank]) for rank in short.ranks)
        return sorted(set(ways(short).values()))


@pytest.mark.parametrize(("mode", "carriers"), [("segment", ["segment"]), ("off", ["inner"])])
def test_processes_exchange_too(pool: RankPool, mode: str, carriers: list[str]) -> None:
    assert pool.run(exchange_between_processes, mode).values() == (carriers,) * 4


def test_processes_read_each_other_where_the_host_allows_it(pool: RankPool) -> None:
    (first, *others) = pool.run(exchange_between_processes, "auto").values()
    assert set(first) <= {"cross_memory", "segment"}
    assert others == [first] * 3


def half_silent(channel: Channel, mode: str) -> None:
    """Rank 3 takes no part; all that wait for it time out or learn that somebody gave up."""
    short = with_same_host(channel, mode=mode)
    if short.rank == 3:
        time.sleep(1.5)
        short.close()
        raise ChannelError("silent")
    peers = [rank for rank in short.ranks if rank != short.rank]
    short.start(
        [Message(peer, (filled(0, 10),)) for peer in peers],
        [Message(peer, (filled(0, 10),)) for peer in peers],
        timeout_s=0.5,
    ).wait()


@pytest.mark.parametrize("mode", SHORT)
def test_a_silent_process_is_a_timeout_on_all_that_wait(pool: RankPool, mode: str) -> None:
    pool.run(half_silent, mode, deadline_s=20).raised(ChannelError, within_s=2.5)


def die_while_others_wait(channel: Channel) -> list[str]:
    """Rank 1 dies while messages from it are awaited on every carrier."""
    channels = [with_same_host(channel, mode=mode) for mode in SHORT]
    if channel.rank == 1:
        channel.all_gather(b"all are ready")
        os.kill(os.getpid(), signal.SIGKILL)
    channel.all_gather(b"all are ready")
    maps = Path("/proc/self/maps")
    assert "memfd:distcore" in maps.read_text()
    found = []
    for carrier in (*channels, channel):
        begin = time.monotonic()
        send, receive = Message(1, (filled(0, 1000),)), Message(1, (filled(0, 1000),))
        with pytest.raises(ChannelError) as caught:
            carrier.start([send], [receive], timeout_s=20).wait()
        assert time.monotonic() - begin < 3
        assert caught.value.peer == 1
        with pytest.raises(ChannelError):
            carrier.all_gather(b"row", timeout_s=20)
        found.append(type(caught.value).__name__)
    for short in channels:
        short.close()
    # A segment has no name outside the processes that map it.
    assert "memfd:distcore" not in maps.read_text()
    return found


def test_a_process_that_dies_is_told_at_once_and_leaves_nothing(pool: RankPool) -> None:
    outcomes = pool.run(die_while_others_wait, deadline_s=60)
    assert isinstance(outcomes[1].exception, RankDiedError)
    assert [outcome.value for outcome in outcomes if outcome.rank != 1] == [
        ["ChannelError"] * 3
    ] * 3
