"""Agreement: equal values pass, every difference and every failure raises on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import NoReturn

import pytest

from distcore.testing import rank_threads
from distcore.v1 import Plan, Region, Transfer
from distcore.v1.channel import Channel
from distcore.v1.errors import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PeerError,
    PlanError,
)
from distcore.v1.header import Call, Header, digest16
from distcore.v1.runtime.agree import agree, canonical_text, gather_texts, meet, run_together

# A text that is longer than a rank may tell, compressed or not.
NOISE = Random(0).randbytes(1_200_000).hex()
PLAN = Plan([Transfer("w", 0, 1, Region((0,), (4,)))])


def then_works(channel: Channel) -> None:
    """What went wrong before has left the channel as it was."""
    assert agree("afterwards", "fine", channel) == "fine"


class NeedsKeywords(Exception):
    """Cannot be made again from its args, nor pickled."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.callback = lambda: code


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


# Values that are equal


@pytest.mark.parametrize(
    "value",
    [
        "text",
        "",
        7,
        None,
        1.5,
        [1, "two", [3.0]],
        {"b": 1, "a": {"c": None}},
        MappingProxyType({"lr": 0.1}),
        PLAN,
        "\ud800 and \N{GREEK SMALL LETTER ALPHA}",
    ],
    ids=repr,
)
def test_equal_values_are_returned_as_they_are(value: object) -> None:
    outcomes = rank_threads(3, lambda channel: agree("value", value, channel))
    assert all(returned is value for returned in outcomes.values())


def test_the_order_of_a_mapping_does_not_matter() -> None:
    def turned(channel: Channel) -> object:
        items = [("a", 1), ("b", 2)]
        return agree("mapping", dict(items if channel.rank else items[::-1]), channel)

    assert rank_threads(2, turned).values() == ({"a": 1, "b": 2},) * 2


def test_a_group_of_one_agrees_with_itself() -> None:
    assert rank_threads(1, lambda channel: agree("alone", 3, channel)).values() == (3,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", 1),
        (1, True),
        (None, "null"),
        ([1, 2], [2, 1]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, [["a", 1]]),
        (PLAN, PLAN.inverse()),
        (PLAN, f"Plan {PLAN.digest}"),
    ],
    ids=repr,
)
def test_different_values_have_different_texts(one: object, other: object) -> None:
    assert canonical_text(one) != canonical_text(other)


# Values that differ


def differing(values: list[object]) -> tuple[DisagreementError, ...]:
    def each_its_own(channel: Channel) -> None:
        try:
            agree("value", values[channel.rank], channel)
        finally:
            then_works(channel)

    outcomes = rank_threads(len(values), each_its_own)
    return outcomes.raised(DisagreementError, within_s=3)


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (["a", "a", "b"], {0: '"a"', 1: '"a"', 2: '"b"'}),
        ([1, "1"], {0: "1", 1: '"1"'}),
        ([None, 0], {0: "null", 1: "0"}),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], {0: "'b' is 2", 1: "'b' is 3"}),
        ([{"a": 1}, {"a": 1, "b": 3}], {0: "'b' is missing", 1: "'b' is 3"}),
        ([{}, [1]], {0: "{}", 1: "[1]"}),
    ],
    ids=repr,
)
def test_a_difference_shows_the_value_of_every_rank(
    values: list[object], shown: dict[int, str]
) -> None:
    for error in differing(values):
        assert error.values == shown
        assert error.label == "value"


def test_different_plans_show_their_digests() -> None:
    other = PLAN.inverse()
    for error in differing([PLAN, other]):
        assert error.values == {0: f"Plan {PLAN.digest}", 1: f"Plan {other.digest}"}


def test_one_key_among_many_thousands_is_named() -> None:
    table = {f"model.layers.{n}.weight": f"Layout of {n * 7919}" for n in range(20_000)}
    odd = {**table, "model.layers.19999.weight": "Layout of 1"}
    for error in differing([table, odd]):
        assert error.values[1] == "'model.layers.19999.weight' is \"Layout of 1\""


def test_texts_too_long_to_be_told_still_tell_values_from_calls() -> None:
    for error in differing([NOISE, NOISE[1:]]):
        assert error.hint == ""
        assert all(len(text) < 500 for text in error.values.values())


# Ranks that are elsewhere


def test_different_labels_at_one_point_show_both() -> None:
    def elsewhere(channel: Channel) -> None:
        try:
            agree("left" if channel.rank else "right", 1, channel)
        finally:
            then_works(channel)

    for error in rank_threads(3, elsewhere).raised(DisagreementError, within_s=3):
        assert error.values == {0: "agree 'right'", 1: "agree 'left'", 2: "agree 'left'"}
        assert "different calls" in error.hint


def test_different_calls_at_one_point_show_both() -> None:
    def elsewhere(channel: Channel) -> None:
        try:
            if channel.rank:
                run_together("step", lambda: None, channel)
            else:
                agree("step", 1, channel)
        finally:
            then_works(channel)

    for error in rank_threads(2, elsewhere).raised(DisagreementError, within_s=3):
        assert error.values == {0: "agree 'step'", 1: "together 'step'"}


def test_a_failing_rank_elsewhere_is_chained_to_its_own_error() -> None:
    def elsewhere(channel: Channel) -> None:
        agree(f"label {channel.rank}", KeyError("mine") if channel.rank else 1, channel)

    errors = rank_threads(2, elsewhere).raised(DisagreementError, within_s=3)
    assert errors[0].__cause__ is None
    assert isinstance(errors[1].__cause__, KeyError)


def test_calls_that_differ_in_a_number_show_it() -> None:
    def from_elsewhere(channel: Channel) -> None:
        header = Header(Call.BROADCAST, failed=False, label=digest16("cfg"), source=channel.rank)
        meet("cfg", header, "", channel)

    for error in rank_threads(2, from_elsewhere).raised(DisagreementError, within_s=3):
        assert error.values == {0: "broadcast 'cfg', source 0", 1: "broadcast 'cfg', source 1"}


def test_what_is_no_header_is_a_disagreement() -> None:
    def raw(channel: Channel) -> None:
        if channel.rank == 1:
            channel.all_gather(bytes(64))
            return
        with pytest.raises(DisagreementError, match="some other call") as caught:
            agree("step", 1, channel)
        assert caught.value.values[0] == "agree"

    rank_threads(3, raw).values()


def test_numbers_for_the_call_alone_may_differ() -> None:
    def with_extra(channel: Channel) -> list[tuple[int, int]]:
        label = digest16("x")
        header = Header(Call.RUN, False, label, extra=channel.rank, flags=channel.rank * 2)
        return [(found.extra, found.flags) for found in meet("x", header, "", channel)]

    assert rank_threads(2, with_extra).values() == ([(0, 0), (1, 2)],) * 2


# Ranks that have failed


def failing(size: int, fn: Callable[[int], object]) -> tuple[PeerError, ...]:
    def each_its_own(channel: Channel) -> None:
        try:
            run_together("step", lambda: fn(channel.rank), channel)
        finally:
            then_works(channel)

    return rank_threads(size, each_its_own).raised(PeerError, within_s=3)


def test_what_succeeds_everywhere_returns_each_its_own() -> None:
    def own(channel: Channel) -> int:
        return run_together("step", lambda: channel.rank * 10, channel)

    assert rank_threads(3, own).values() == (0, 10, 20)


def test_a_failure_reaches_every_rank_and_is_chained_where_it_happened() -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            raise FileNotFoundError("no such shard")

    errors = failing(3, fn)
    for error in errors:
        assert set(error.failures) == {1}
        assert error.failures[1].startswith("FileNotFoundError: no such shard (test_agree.py:")
    assert [type(error.__cause__) for error in errors] == [
        type(None),
        FileNotFoundError,
        type(None),
    ]


def test_an_exception_as_value_tells_the_peers() -> None:
    def early(channel: Channel) -> None:
        agree("step", ValueError("bad config") if channel.rank == 0 else {"a": 1}, channel)

    for error in rank_threads(2, early).raised(PeerError, within_s=3):
        assert error.failures == {0: "ValueError: bad config"}


def test_different_failures_are_all_told() -> None:
    def fn(rank: int) -> None:
        raise ValueError(f"rank {rank} has its own trouble")

    for error in failing(2, fn):
        assert "0 has its own" in error.failures[0]
        assert "1 has its own" in error.failures[1]


def test_an_exception_that_cannot_be_pickled_is_told() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            raise NeedsKeywords(code=7)

    errors = failing(2, fn)
    assert "NeedsKeywords: code 7" in errors[1].failures[0]
    assert isinstance(errors[0].__cause__, NeedsKeywords)


def test_an_exception_without_a_text_is_told() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            raise Mute

    assert "Mute: <no message: RuntimeError>" in failing(2, fn)[1].failures[0]


def test_a_failure_told_at_length_loses_its_end_alone() -> None:
    def fn(rank: int) -> None:
        if rank == 0:
            raise ValueError(NOISE)

    for error in failing(2, fn):
        told = error.failures[0].removeprefix("ValueError: ")
        assert len(told) > 1_000_000
        assert NOISE.startswith(told)


def test_ranks_that_all_fail_alike_raise_each_its_own() -> None:
    def same(channel: Channel) -> None:
        try:
            run_together("step", lambda: int("x"), channel)
        finally:
            then_works(channel)

    errors = rank_threads(3, same).raised(ValueError, within_s=3)
    assert len({id(error) for error in errors}) == 3


def test_a_rank_alone_raises_its_own() -> None:
    def alone(channel: Channel) -> None:
        run_together("step", lambda: int("x"), channel)

    rank_threads(1, alone).raised(ValueError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_told_to_the_peers_and_raised_as_it_is(kind: type[BaseException]) -> None:
    def fn(rank: int) -> None:
        if rank == 1:
            raise kind("stop")

    def interrupted(channel: Channel) -> None:
        expected = kind if channel.rank == 1 else PeerError
        with pytest.raises(expected, match="stop"):
            run_together("step", lambda: fn(channel.rank), channel)
        then_works(channel)

    rank_threads(3, interrupted).values()


# Values that cannot be compared


class Opaque:
    """No JSON, and no digest either: asking for one fails."""

    @property
    def digest(self) -> NoReturn:
        raise OSError("gone")


def deep() -> object:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    return value


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), Opaque(), {"a": {3}}, {(1, 2): 3}])
def test_a_value_that_cannot_be_compared_reaches_every_rank(value: object) -> None:
    def wrong(channel: Channel) -> None:
        try:
            agree("value", value if channel.rank else "fine", channel)
        finally:
            then_works(channel)

    errors = rank_threads(2, wrong).raised(PeerError, within_s=3)
    for error in errors:
        assert set(error.failures) == {1}
        assert "cannot be compared between ranks" in error.failures[1]
    assert isinstance(errors[1].__cause__, PlanError)


def test_a_value_that_is_too_deep_reaches_every_rank() -> None:
    value = deep()

    def wrong(channel: Channel) -> None:
        agree("value", value if channel.rank else "fine", channel)

    rank_threads(2, wrong).raised(PeerError, within_s=3)


def test_where_no_rank_can_compare_each_raises_its_own() -> None:
    rank_threads(2, lambda channel: agree("value", {1}, channel)).raised(PlanError, within_s=3)


# Ranks that do not answer


def agree_soon(channel: Channel) -> None:
    agree("step", 1, channel, timeout_s=0.3)


def run_soon(channel: Channel) -> None:
    run_together("step", lambda: None, channel, timeout_s=0.3)


@pytest.mark.parametrize("call", [agree_soon, run_soon])
def test_a_silent_rank_is_a_timeout_on_the_others(call: Callable[[Channel], None]) -> None:
    def silent(channel: Channel) -> type[Exception] | None:
        if channel.rank == 2:
            time.sleep(1.5)
            return None
        begin = time.monotonic()
        with pytest.raises(ChannelError) as caught:
            call(channel)
        assert time.monotonic() - begin < 1.3
        return caught.type

    # The first rank that gives up closes its connections, so the other may see that instead.
    assert ChannelTimeout in rank_threads(3, silent).values()


def test_texts_are_gathered_by_index() -> None:
    def tell(channel: Channel) -> tuple[str, ...]:
        return gather_texts("" if channel.rank == 1 else "\N{EURO SIGN}" * channel.rank, channel)

    euro = "\N{EURO SIGN}"
    assert rank_threads(3, tell).values() == (("", "", euro * 2),) * 3


def test_texts_are_not_mistaken_where_a_peer_is_elsewhere() -> None:
    def other(channel: Channel) -> tuple[str, ...] | None:
        if channel.rank == 0:
            channel.all_gather(b"\xff" * 64)
            return None
        return gather_texts("mine", channel)

    assert rank_threads(2, other).values() == (None, ("", ""))


def test_a_mapping_of_any_kind_is_compared_key_by_key() -> None:
    def views(channel: Channel) -> None:
        value: Mapping[str, object] = MappingProxyType({"a": channel.rank})
        agree("view", value, channel)

    for error in rank_threads(2, views).raised(DisagreementError, within_s=3):
        assert error.values == {0: "'a' is 0", 1: "'a' is 1"}
