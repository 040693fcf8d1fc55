"""The active set: which parameters step where ranks have different gradients."""

from __future__ import annotations

import pytest

from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, PeerError, PlanError
from ownerplan.active_set import Holding, MissingGrads, choose_active, exchange_presence

TERMS = "0123456789abcdef" * 2
BOTH = Holding("both", frozenset({0, 1}))
FIRST = Holding("first", frozenset({0}))
EMPTY = Holding("empty", frozenset())


def presence_of(channel: Channel) -> tuple[tuple[bool, ...], ...]:
    own = [at % (channel.rank + 2) == 0 for at in range(9)]
    return exchange_presence(own, TERMS, None, channel)


def test_every_rank_learns_of_every_gradient() -> None:
    expected = tuple(tuple(at % (rank + 2) == 0 for at in range(9)) for rank in range(3))
    assert rank_threads(3, presence_of).values() == (expected,) * 3


def other_terms(channel: Channel) -> None:
    exchange_presence([True], TERMS if channel.rank else TERMS[::-1], None, channel, timeout_s=5)


def test_ranks_with_other_hyperparameters_are_found() -> None:
    for error in rank_threads(3, other_terms).raised(DisagreementError, within_s=3):
        assert sorted(error.values) == [0, 1, 2]


def one_fails(channel: Channel) -> None:
    failure = ArithmeticError("overflow") if channel.rank == 2 else None
    exchange_presence([True], TERMS, failure, channel, timeout_s=5)


def test_a_rank_that_failed_before_is_heard_by_all() -> None:
    for error in rank_threads(3, one_fails).raised(PeerError, within_s=3):
        assert list(error.failures) == [2]
        assert "ArithmeticError: overflow" in error.failures[2]


@pytest.mark.parametrize(
    ("presence", "skip", "zero"),
    [
        ([[True, True], [True, False]], (True, True), (True, True)),
        ([[False, False], [False, True]], (False, False), (False, False)),
        ([[True, False], [False, True]], (False, False), (True, False)),
    ],
)
def test_only_ranks_that_hold_something_count(
    presence: list[list[bool]], skip: tuple[bool, ...], zero: tuple[bool, ...]
) -> None:
    rules: tuple[MissingGrads, ...] = ("skip", "zero")
    found = [choose_active(presence, [BOTH, FIRST], rule) for rule in rules]
    assert found == [skip, zero]


def test_a_missing_gradient_may_be_an_error_that_names_parameter_and_ranks() -> None:
    with pytest.raises(PlanError, match=r"both: has a gradient, but not .* positions \[1\]"):
        choose_active([[True], [False]], [BOTH], "error")
    assert choose_active([[False], [False]], [BOTH], "error") == (False,)
    assert choose_active([[True], [True]], [BOTH], "error") == (True,)


def test_a_parameter_that_nobody_holds_does_not_step() -> None:
    assert choose_active([[True], [True]], [EMPTY], "zero") == (False,)
