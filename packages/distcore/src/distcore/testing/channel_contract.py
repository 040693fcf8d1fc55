"""The contract of a channel, as a proof that any implementation can be put to.

A new channel is proven by one line:

    check_channel(lambda rank, size, store: MyChannel(rank, size, store))
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._C._distributed_c10d import HashStore, Store

from distcore.testing.threads import run_threads
from distcore.v1.channel import Channel, Message
from distcore.v1.errors import ChannelError, ChannelTimeout, PlanError

MakeChannel = Callable[[int, int, Store], Channel]
"""Makes the channel of one rank, on that rank's thread, from (rank, size, store).

The store is fresh for each check and shared by the ranks. A channel with `close` is closed when
all ranks are done.
"""

_SIZES = (0, 1, 7, 4096, 5 * 1024 * 1024 + 5, 0)
_SILENCE_S = 0.4


def check_channel(make_channel: MakeChannel, *, size: int = 3, deadline_s: float = 30.0) -> None:
    """Prove that `make_channel` keeps the contract of `Channel` on groups of `size` ranks and 1.

    Raises the failures of the first check that fails, with the name of the check as a note. No
    check takes longer than `deadline_s`. Channels on any device are checked; the two ends of a
    message lie in threads of one process.
    """
    if size < 2:
        raise ValueError(f"size: expected at least 2 ranks, got {size}")
    for check in _CHECKS:
        _run(check, make_channel, size, deadline_s)
    _run(_check_group_of_one, make_channel, 1, deadline_s)


def _run(
    check: Callable[[Channel], None], make_channel: MakeChannel, size: int, deadline_s: float
) -> None:
    store = HashStore()
    name = check.__name__.strip("_")
    with ExitStack() as closing:

        def run(rank: int) -> None:
            channel: Any = make_channel(rank, size, store)
            closing.callback(getattr(channel, "close", lambda: None))
            check(channel)

        try:
            run_threads(size, run, deadline_s=deadline_s).values()
        except BaseException as error:
            error.add_note(f"{name} with {size} ranks")
            raise


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)


def _pattern(src: int, dst: int, k: int, nbytes: int, device: str) -> torch.Tensor:
    """Return bytes that tell sender, receiver and place in the message apart."""
    first = src * 31 + dst * 7 + k * 13
    tile = torch.arange(first, first + 251, device=device).remainder(251).to(torch.uint8)
    return tile.repeat(nbytes // 251 + 1)[:nbytes]


def _outgoing(channel: Channel, peer: int, sizes: Sequence[int]) -> Message:
    return Message(
        peer,
        tuple(
            _pattern(channel.rank, peer, k, nbytes, channel.device)
            for k, nbytes in enumerate(sizes)
        ),
    )


def _incoming(channel: Channel, peer: int, sizes: Sequence[int]) -> Message:
    return Message(
        peer,
        tuple(
            torch.full((nbytes,), 255, dtype=torch.uint8, device=channel.device) for nbytes in sizes
        ),
    )


def _expect_arrived(channel: Channel, messages: Sequence[Message]) -> None:
    for message in messages:
        for k, buffer in enumerate(message.buffers):
            sent = _pattern(message.peer, channel.rank, k, buffer.numel(), channel.device)
            _expect(
                torch.equal(buffer, sent),
                f"rank {channel.rank}: buffer {k} ({buffer.numel()} bytes) from rank "
                f"{message.peer} is not what was sent",
            )


def _peers(channel: Channel) -> list[int]:
    return [rank for rank in channel.ranks if rank != channel.rank]


def _exchange(channel: Channel, sizes: Sequence[int]) -> None:
    """Every rank sends buffers of `sizes` to every other, and all arrive."""
    sends = [_outgoing(channel, peer, sizes) for peer in _peers(channel)]
    receives = [_incoming(channel, peer, sizes) for peer in reversed(_peers(channel))]
    channel.start(sends, receives).wait()
    _expect_arrived(channel, receives)


def _check_who_is_who(channel: Channel) -> None:
    _expect(channel.size == len(channel.ranks), "size differs from the number of ranks")
    _expect(channel.ranks[channel.index] == channel.rank, "ranks[index] is not rank")
    row = bytes([channel.scatters(rank) if rank != channel.rank else 0 for rank in channel.ranks])
    rows = channel.all_gather(row)
    for index, other in enumerate(rows):
        _expect(other[channel.index] == row[index], "scatters differs between two ends")


def _check_rows(channel: Channel) -> None:
    for nbytes in (1, 64, 4096, 64):
        rows = channel.all_gather(bytes([channel.index]) * nbytes)
        expected = tuple(bytes([index]) * nbytes for index in range(channel.size))
        _expect(rows == expected, f"rows of {nbytes} bytes are wrong")


def _check_sizes(channel: Channel) -> None:
    _exchange(channel, _SIZES)
    _exchange(channel, (0, 0))
    _exchange(channel, ())
    channel.start([], []).wait()


def _check_many_buffers(channel: Channel) -> None:
    _exchange(channel, [k % 97 for k in range(1500)])


def _check_one_direction(channel: Channel) -> None:
    ranks = channel.ranks
    after = ranks[(channel.index + 1) % channel.size]
    before = ranks[channel.index - 1]
    receives = [_incoming(channel, before, _SIZES)]
    channel.start([_outgoing(channel, after, _SIZES)], receives).wait()
    _expect_arrived(channel, receives)
    # From the first rank to the last only; the others start nothing.
    sends, receives = [], []
    if channel.index == 0:
        sends = [_outgoing(channel, ranks[-1], (5,))]
    if channel.index == channel.size - 1:
        receives = [_incoming(channel, ranks[0], (5,))]
    channel.start(sends, receives).wait()
    _expect_arrived(channel, receives)


def _check_several_at_once(channel: Channel) -> None:
    """Messages keep their order, whenever they are waited for, and rows do not mix with them."""
    sizes = ((5, 0, 300_000), (1,), (70_000,))
    receives = [[_incoming(channel, peer, size) for peer in _peers(channel)] for size in sizes]
    sends = [[_outgoing(channel, peer, size) for peer in _peers(channel)] for size in sizes]
    if channel.index == 0:
        for sending, receiving in zip(sends[:2], receives[:2], strict=True):
            channel.start(sending, receiving).wait()
        started = [channel.start(sends[2], receives[2])]
    else:
        started = [channel.start(*pair) for pair in zip(sends, receives, strict=True)]
        started = started[::-1] if channel.index == 1 else started
    rows = channel.all_gather(bytes([channel.index]))
    _expect(rows == tuple(bytes([i]) for i in range(channel.size)), "rows mixed with messages")
    for pending in started:
        pending.wait()
    for receiving in receives:
        _expect_arrived(channel, receiving)


def _check_buffers_may_change_after_wait(channel: Channel) -> None:
    peer_count = channel.size - 1
    buffer = torch.zeros(200_000, dtype=torch.uint8, device=channel.device)
    for step in range(8):
        buffer.fill_(step)
        got = [_incoming(channel, peer, (buffer.numel(),)) for peer in _peers(channel)]
        channel.start([Message(peer, (buffer,)) for peer in _peers(channel)], got).wait()
        buffer.fill_(200)
        same = sum(bool((message.buffers[0] == step).all()) for message in got)
        _expect(same == peer_count, f"round {step} got bytes of another round")


def _check_wrong_peers(channel: Channel) -> None:
    message = _outgoing(channel, _peers(channel)[0], (1,))
    stranger = max(channel.ranks) + 1
    for wrong in ([_outgoing(channel, channel.rank, (1,))], [message, message]):
        _expect_raises(PlanError, lambda wrong=wrong: channel.start(wrong, []))  # type: ignore[misc]
    _expect_raises(PlanError, lambda: channel.start([], [_incoming(channel, stranger, (1,))]))


def _check_silent_sender(channel: Channel) -> None:
    first, second = channel.ranks[:2]
    if channel.index == 0:
        error = _expect_raises(
            ChannelTimeout,
            lambda: channel.start(
                [], [_incoming(channel, second, (9,))], timeout_s=_SILENCE_S
            ).wait(),
        )
        _expect(error.peer == second, f"the error names rank {error.peer}, not {second}")
        if not error.usable:
            _expect_raises(ChannelError, lambda: channel.all_gather(b"row", timeout_s=5))
    elif channel.rank != first:
        time.sleep(_SILENCE_S * 2)


def _check_silent_row(channel: Channel) -> None:
    if channel.index == channel.size - 1:
        time.sleep(_SILENCE_S * 2)
    else:
        _expect_raises(ChannelError, lambda: channel.all_gather(b"row", timeout_s=_SILENCE_S))


def _check_group_of_one(channel: Channel) -> None:
    _expect(channel.all_gather(b"row") == (b"row",), "a group of one gathers its own row")
    channel.start([], []).wait()
    _expect((channel.index, channel.size) == (0, 1), "a group of one has size 1 and index 0")


def _expect_raises(kind: type[Any], call: Callable[[], object]) -> Any:
    """Return the error of `kind` that `call` raises in time."""
    begin = time.monotonic()
    try:
        value = call()
    except kind as error:
        took = time.monotonic() - begin
        _expect(took < _SILENCE_S + 2, f"{kind.__name__} came only after {took:.1f} s")
        return error
    raise AssertionError(f"expected {kind.__name__}, got {value!r}")


_CHECKS = (
    _check_who_is_who,
    _check_rows,
    _check_sizes,
    _check_many_buffers,
    _check_one_direction,
    _check_several_at_once,
    _check_buffers_may_change_after_wait,
    _check_wrong_peers,
    _check_silent_sender,
    _check_silent_row,
)
