"""Labelled calls on several ranks: every rank gets the value, or every rank raises, in time."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import distcore
from distcore import all_reduce, barrier, broadcast_from
from distcore.testing import RankPool, rank_threads
from distcore.v1.channel import Channel
from distcore.v1.errors import ChannelError, DisagreementError, PeerError, PlanError
from distcore.v1.runtime import GroupChannel, agree

TOTAL: Callable[[list[int]], int] = sum
MIXED: Callable[[list[Any]], int] = sum
SOON_S = 3.0


def ok(channel: Channel) -> int:
    """A call that works, after one that did not."""
    return all_reduce("next", lambda: channel.rank, TOTAL, group=channel)


def raising(error: BaseException, *ranks: int) -> Callable[[Channel], object]:
    """A rank function in which fn raises on some ranks."""

    def fn_of(channel: Channel) -> object:
        if channel.rank in ranks:
            raise error
        return channel.rank

    return lambda channel: all_reduce("batch", lambda: fn_of(channel), list, group=channel)


def then_ok(call: Callable[[Channel], object]) -> Callable[[Channel], tuple[str, str, int]]:
    """The error of a call, its cause, and what the next call returns."""

    def run(channel: Channel) -> tuple[str, str, int]:
        with pytest.raises((PeerError, DisagreementError, PlanError, ValueError)) as caught:
            call(channel)
        return repr(caught.value), repr(caught.value.__cause__), ok(channel)

    return run


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("combine", "value"), [(min, 4), (list, [8, 4, 16]), (sum, 28)])
def test_every_rank_gets_the_combination_in_rank_order(
    combine: Callable[[list[Any]], Any], value: object
) -> None:
    values = [8, 4, 16]

    def reduce(channel: Channel) -> object:
        return all_reduce("batch", lambda: values[channel.rank], combine, group=channel)

    assert rank_threads(3, reduce).values() == (value,) * 3


def test_values_of_any_size_and_shape_are_combined() -> None:
    def reduce(channel: Channel) -> list[Any]:
        value = {"w": torch.full((channel.rank,), channel.rank), "name": "x" * channel.rank}
        found = all_reduce("state", lambda: [value], lambda rows: [r[0] for r in rows],
                           group=channel)  # fmt: skip
        return [(item["w"].tolist(), item["name"]) for item in found]

    expected = [([], ""), ([1], "x"), ([2, 2], "xx")]
    assert rank_threads(3, reduce).values() == (expected,) * 3


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_broadcast_from_runs_fn_on_its_rank_only(size: int) -> None:
    for source in range(size):
        ran: list[int] = []

        def cast(channel: Channel, source: int = source, ran: list[int] = ran) -> object:
            def fn() -> dict[str, int]:
                ran.append(channel.rank)
                return {"from": channel.rank}

            return broadcast_from("cfg", fn, rank=source, group=channel)

        assert rank_threads(size, cast).values() == ({"from": source},) * size
        assert ran == [source]


def test_the_source_keeps_its_own_value_and_the_peers_get_copies() -> None:
    value = torch.arange(10)[2:4]

    def cast(channel: Channel) -> bool:
        got = broadcast_from("w", lambda: value, rank=1, group=channel)
        assert got.tolist() == [2, 3]
        return got is value

    assert rank_threads(2, cast).values() == (False, True)


def test_pickle_by_choice_carries_what_the_safe_codec_refuses() -> None:
    def reduce(channel: Channel) -> list[Path]:
        return all_reduce("p", lambda: [Path(str(channel.rank))], lambda v: [*v[0], *v[1]],
                          group=channel, codec="pickle")  # fmt: skip

    assert rank_threads(2, reduce).values() == ([Path("0"), Path("1")],) * 2


def test_one_rank_takes_the_same_way() -> None:
    def alone(channel: Channel) -> tuple[object, ...]:
        barrier(channel)
        return (
            all_reduce("a", lambda: 1, lambda v: v * 2, group=channel),
            broadcast_from("b", lambda: "x", group=channel),
        )

    assert rank_threads(1, alone).values() == (([1, 1], "x"),)


# --- groups ----------------------------------------------------------------------------------


def test_a_group_outside_the_default_world_is_called_by_its_object() -> None:
    def reduce(channel: GroupChannel) -> tuple[int, int]:
        total = all_reduce("batch", lambda: 1, TOTAL, group=channel.group)
        return total, broadcast_from("cfg", lambda: 7, rank=1, group=channel.group)

    assert rank_threads(2, reduce).values() == ((2, 7),) * 2


def test_ranks_of_a_channel_that_do_not_start_at_zero() -> None:
    def cast(channel: GroupChannel) -> str:
        other = GroupChannel(channel.group, ranks=[5, 3])
        barrier(other)
        return broadcast_from("cfg", lambda: f"from {other.rank}", rank=3, group=other)

    assert rank_threads(2, cast).values() == ("from 3",) * 2


def in_world(channel: Channel) -> dict[str, object]:
    """In the default world of four, then in the subgroup of ranks 1 and 3."""
    rank = channel.rank
    odd = dist.new_group([1, 3])
    found: dict[str, object] = {
        "world": all_reduce("batch", lambda: rank, list),
        "cfg": broadcast_from("cfg", lambda: rank * 10, rank=2),
    }
    barrier()
    if rank in (1, 3):
        found["odd"] = all_reduce("odd", lambda: rank, list, group=odd)
        found["odd cfg"] = broadcast_from("odd", lambda: f"from {rank}", 3, group=odd)
        barrier(odd)
        with pytest.raises(PlanError, match=r"\[1, 3\], got 0"):
            broadcast_from("odd", lambda: 0, rank=0, group=odd)
    else:
        with pytest.raises(PlanError, match="process group with this rank in it"):
            barrier(odd)
    return found


def test_the_world_and_a_subgroup_not_from_zero_pytorch_141825_152310(pool: RankPool) -> None:
    world = {"world": [0, 1, 2, 3], "cfg": 20}
    odd = {**world, "odd": [1, 3], "odd cfg": "from 3"}
    assert pool.run(in_world).values() == (world, odd, world, odd)


def fails_in_world(channel: Channel) -> tuple[str, list[int]]:
    """Rank 3 fails in the subgroup, rank 2 in the world; then both work again."""
    rank = channel.rank
    odd = dist.new_group([1, 3])

    def fn(bad: int) -> int:
        if rank == bad:
            raise ValueError("OOM")
        return rank

    if rank in (1, 3):
        with pytest.raises(PeerError, match="rank 3: ValueError: OOM"):
            all_reduce("odd", lambda: fn(3), list, group=odd)
        assert all_reduce("odd", lambda: rank, list, group=odd) == [1, 3]
    with pytest.raises(PeerError) as caught:
        all_reduce("batch", lambda: fn(2), list)
    return str(caught.value).split(" (")[0], all_reduce("next", lambda: rank, list)


def test_a_failing_rank_of_the_world_or_a_subgroup_raises_on_all(pool: RankPool) -> None:
    told = "'batch' failed: rank 2: ValueError: OOM"
    assert pool.run(fails_in_world).values() == ((told, [0, 1, 2, 3]),) * 4


# --- failures: what the helpers of torch get wrong ---------------------------------------------


class KeywordOnly(Exception):
    """Cannot be made anew by unpickling."""

    def __init__(self, *, detail: str) -> None:
        self.detail = detail
        super().__init__(detail)


class Unpicklable(Exception):
    """Holds a function of no module."""

    def __init__(self) -> None:
        self.hook = lambda: 0
        super().__init__("holds a lambda")


class Unspeakable(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("OOM"), "ValueError: OOM"),
        (KeywordOnly(detail="d"), "KeywordOnly: d"),
        (Unpicklable(), "Unpicklable: holds a lambda"),
        (Unspeakable(), "Unspeakable: <no message"),
        (MemoryError(), "MemoryError: "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_exception_of_one_rank_raises_on_all_as_text(error: Exception, text: str) -> None:
    outcomes = rank_threads(3, raising(error, 1))
    for rank, raised in enumerate(outcomes.raised(PeerError, within_s=SOON_S)):
        assert raised.label == "batch"
        assert list(raised.failures) == [1]
        assert raised.failures[1].startswith(text)
        assert raised.__cause__ is (error if rank == 1 else None)


def test_the_next_call_works_after_an_error() -> None:
    told = "PeerError(\"'batch' failed: rank 1: ValueError: OOM (test_collectives.py:"
    outcomes = rank_threads(3, then_ok(raising(ValueError("OOM"), 1))).values()
    assert [text.startswith(told) for text, _, _ in outcomes] == [True] * 3
    assert [(cause, value) for _, cause, value in outcomes] == [
        ("None", 3),
        ("ValueError('OOM')", 3),
        ("None", 3),
    ]


def test_where_all_ranks_fail_alike_each_raises_its_own() -> None:
    rank_threads(3, raising(ValueError("no data"), 0, 1, 2)).raised(ValueError, within_s=SOON_S)


def test_half_the_ranks_raise_while_the_others_wait_pytorch_76760() -> None:
    outcomes = rank_threads(4, raising(ValueError("x"), 1, 3))
    for raised in outcomes.raised(PeerError, within_s=SOON_S):
        assert list(raised.failures) == [1, 3]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_told_to_the_peers_and_raised_as_it_is(kind: type[BaseException]) -> None:
    outcomes = rank_threads(3, raising(kind("now"), 1))
    assert [type(error) for error in outcomes.exceptions] == [PeerError, kind, PeerError]
    assert f"{kind.__name__}: now" in str(outcomes.exceptions[0])
    assert max(outcome.seconds for outcome in outcomes) < SOON_S


def test_an_interrupt_on_the_source_of_a_broadcast() -> None:
    def fn() -> int:
        raise KeyboardInterrupt

    outcomes = rank_threads(3, lambda channel: broadcast_from("x", fn, rank=2, group=channel))
    assert [type(error) for error in outcomes.exceptions] == [
        PeerError,
        PeerError,
        KeyboardInterrupt,
    ]


def test_other_labels_at_one_point_raise_on_all_naming_both() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("ab"[channel.rank], lambda: 1, min, group=channel)

    for error in rank_threads(2, call).raised(DisagreementError, within_s=SOON_S):
        assert error.values[0].startswith("reduce 'a'")
        assert error.values[1].startswith("reduce 'b'")
    assert [value for _, _, value in rank_threads(2, then_ok(call)).values()] == [1, 1]


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (lambda channel: broadcast_from("a", lambda: 1, group=channel), "broadcast 'a'"),
        (barrier, "together 'barrier'"),
        (lambda channel: agree("a", "plan", channel), "agree 'a'"),
        (lambda channel: distcore.gather_bytes(b"", 0, channel), "gather 'gather_bytes'"),
    ],
    ids=["broadcast", "barrier", "agree", "gather"],
)
def test_another_call_at_one_point_raises_on_all(
    other: Callable[[Channel], object], name: str
) -> None:
    def call(channel: Channel) -> object:
        if channel.rank == 0:
            return all_reduce("a", lambda: 1, TOTAL, group=channel)
        return other(channel)

    for error in rank_threads(2, call).raised(DisagreementError, within_s=SOON_S):
        assert error.values[0].startswith("reduce 'a'")
        assert error.values[1].startswith(name)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank": (0, 1)}, ("source 0", "source 1")),
        ({"codec": ("safe", "pickle")}, ("from rank 0 as safe", "from rank 0 as pickle")),
    ],
    ids=["source", "codec"],
)
def test_another_source_or_codec_raises_on_all(
    given: dict[str, tuple[Any, Any]], told: tuple[str, str]
) -> None:
    def call(channel: Channel) -> object:
        mine = {name: values[channel.rank] for name, values in given.items()}
        return broadcast_from("cfg", lambda: 1, group=channel, **mine)

    for error in rank_threads(2, call).raised(DisagreementError, within_s=SOON_S):
        assert [text in error.values[rank] for rank, text in enumerate(told)] == [True, True]


@pytest.mark.parametrize("source", [9, -1, "two"])
def test_a_source_outside_the_group_raises_on_all(source: Any) -> None:
    def call(channel: Channel) -> object:
        return broadcast_from("cfg", lambda: 1, rank=source, group=channel)

    for error in rank_threads(3, call).raised(PlanError, within_s=SOON_S):
        assert f"expected a rank of the group, [0, 1, 2], got {source!r}" in str(error)
    assert [value for _, _, value in rank_threads(3, then_ok(call)).values()] == [3, 3, 3]


def test_a_source_outside_the_group_on_one_rank_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return broadcast_from("cfg", lambda: 1, rank=9 if channel.rank else 0, group=channel)

    for error in rank_threads(2, call).raised(PeerError, within_s=SOON_S):
        assert list(error.failures) == [1]


def test_a_value_that_cannot_be_sent_is_refused_at_the_sender_on_all_ranks() -> None:
    def call(channel: Channel) -> object:
        return broadcast_from("cfg", lambda: lambda: 0, rank=2, group=channel)

    for error in rank_threads(3, call).raised(PeerError, within_s=SOON_S):
        assert "the value of 'cfg' from rank 2 cannot be sent: value: a builtins.function" in str(
            error
        )
    assert [value for _, _, value in rank_threads(3, then_ok(call)).values()] == [3, 3, 3]


def test_pickle_refuses_at_the_sender_too() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", lambda: channel.rank or (lambda: 0), list, group=channel,
                          codec="pickle")  # fmt: skip

    for error in rank_threads(2, call).raised(PeerError, within_s=SOON_S):
        assert "cannot be pickled" in error.failures[0]


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return builtins.setattr, (builtins, "shardworks_bomb", 1)  # type: ignore[return-value]


def test_no_code_of_a_peer_runs_by_default_pytorch_52596() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", Bomb, list, group=channel)

    rank_threads(2, call).raised(PeerError, within_s=SOON_S)
    assert not hasattr(builtins, "shardworks_bomb")


class Touchy:
    """Cannot be read on a rank where the mark is set."""

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _read_touchy, ()


def _read_touchy() -> object:
    raise RuntimeError("not here")


@pytest.mark.parametrize("call", ["reduce", "broadcast"])
def test_a_value_whose_own_code_fails_raises_on_all(call: str) -> None:
    def run(channel: Channel) -> object:
        if call == "reduce":
            return all_reduce("x", Touchy, list, group=channel, codec="pickle")
        return broadcast_from("x", Touchy, group=channel, codec="pickle")

    for error in rank_threads(2, run).exceptions:
        assert isinstance(error, PeerError | RuntimeError)
        assert "not here" in str(error)


def test_a_combine_that_raises_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", lambda: 1, lambda values: values[9], group=channel)

    rank_threads(2, call).raised(IndexError, within_s=SOON_S)


def test_a_known_combine_that_raises_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", lambda: [1, "a"][channel.rank], MIXED, group=channel)

    rank_threads(2, call).raised(TypeError, within_s=SOON_S)
    told = [value for _, _, value in rank_threads(2, then_type_error).values()]
    assert told == [1, 1]


def then_type_error(channel: Channel) -> tuple[str, str, int]:
    with pytest.raises(TypeError):
        all_reduce("x", lambda: [1, "a"][channel.rank], MIXED, group=channel)
    return "", "", ok(channel)


def test_a_combine_that_raises_on_one_rank_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", lambda: 1, lambda values: values[channel.rank * 9], group=channel)

    for error in rank_threads(2, call).raised(PeerError, within_s=SOON_S):
        assert error.failures[1].startswith("IndexError")
    assert [value for _, _, value in rank_threads(2, then_ok(call)).values()] == [1, 1]


def test_a_combine_of_different_values_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", lambda: 1, lambda values: values[0] + channel.rank, group=channel)

    for error in rank_threads(2, call).raised(DisagreementError, within_s=SOON_S):
        assert error.values == {0: "call 1: combine returned 1", 1: "call 1: combine returned 2"}


def test_a_combine_of_what_cannot_be_sent_is_the_callers_own() -> None:
    def call(channel: Channel) -> object:
        return all_reduce("x", lambda: 1, lambda values: Path(str(sum(values))), group=channel)

    assert rank_threads(2, call).values() == (Path("2"),) * 2


def test_unequal_sizes_do_not_break_the_next_call_pytorch_174844() -> None:
    def call(channel: Channel) -> tuple[int, int]:
        sizes = all_reduce(
            "w", lambda: [torch.zeros(3 + channel.rank)], lambda v: [len(x[0]) for x in v],
            group=channel,
        )  # fmt: skip
        barrier(channel)
        return sizes[0], sizes[1]

    assert rank_threads(2, call).values() == ((3, 4),) * 2


# --- silence -----------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_is_a_timeout_that_names_the_call() -> None:
    def call(channel: Channel) -> str:
        if channel.rank == 1:
            time.sleep(1.5)
            return ""
        begin = time.monotonic()
        with pytest.raises(ChannelError, match=r"'load weights' \(call 1\).*rank 1") as caught:
            all_reduce("load weights", lambda: 1, TOTAL, group=channel, timeout_s=0.4)
        assert time.monotonic() - begin < 1.4
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(ChannelError, match="no call is possible any more"):
            barrier(channel)
        return "told"

    assert rank_threads(2, call).values() == ("told", "")
