"""Errors: five types, what each is caught as, what it says, and that a copy keeps it whole."""

from __future__ import annotations

import copy

import pytest

from distcore.v1 import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PeerError,
    PlanError,
    Problem,
)

SHAPE = Problem("layers.0", "shape", "expected (4, 2), got (4, 3)")
DTYPE = Problem("layers.1", "dtype", "expected bfloat16, got float32")


def test_a_plan_error_lists_every_problem_and_where_it_is() -> None:
    error = PlanError([SHAPE, DTYPE])
    assert isinstance(error, ValueError)
    assert error.problems == (SHAPE, DTYPE)
    assert str(error) == (
        "layers.0: expected (4, 2), got (4, 3); layers.1: expected bfloat16, got float32"
    )


def test_a_plan_error_takes_one_problem_a_generator_or_a_text() -> None:
    assert PlanError(SHAPE).problems == (SHAPE,)
    assert PlanError(one for one in (SHAPE, DTYPE)).problems == (SHAPE, DTYPE)
    assert PlanError("no ranks").problems == (Problem("arguments", "invalid", "no ranks"),)
    assert str(PlanError("no ranks")) == "no ranks"


def test_a_plan_error_of_many_problems_has_a_short_text() -> None:
    error = PlanError(Problem(f"key {i}", "missing", "not there") for i in range(1000))
    assert len(error.problems) == 1000
    assert "key 19: not there; and 980 more" in str(error)
    assert "key 20" not in str(error)
    assert str(PlanError([SHAPE] * 20)).endswith(str(SHAPE))


def test_a_disagreement_names_the_value_of_every_rank() -> None:
    error = DisagreementError("plan", {0: "a1", 3: "b2"}, "are the keys sorted?")
    assert isinstance(error, RuntimeError)
    assert (error.label, error.values, error.hint) == (
        "plan",
        {0: "a1", 3: "b2"},
        "are the keys sorted?",
    )
    assert str(error) == (
        "the ranks disagree on 'plan': rank 0: a1; rank 3: b2 (are the keys sorted?)"
    )
    assert str(DisagreementError("plan", {})).endswith("'plan': ")


def test_a_peer_error_names_the_ranks_that_failed() -> None:
    error = PeerError("load", {2: "OSError: no such file"})
    assert isinstance(error, RuntimeError)
    assert (error.label, error.failures) == ("load", {2: "OSError: no such file"})
    assert str(error) == "'load' failed: rank 2: OSError: no such file"


def test_a_channel_error_says_which_peer_and_whether_the_channel_is_usable() -> None:
    error = ChannelError("reset", peer=3)
    assert isinstance(error, OSError)
    assert (str(error), error.peer, error.usable) == ("reset", 3, False)
    assert ChannelError("reset", usable=True).usable


def test_a_channel_timeout_is_caught_as_either() -> None:
    for kind in (ChannelError, TimeoutError, OSError):
        with pytest.raises(kind, match="late"):
            raise ChannelTimeout("late", peer=1, usable=True)


@pytest.mark.parametrize(
    "error",
    [
        PlanError([SHAPE, DTYPE]),
        PlanError("no ranks"),
        DisagreementError("plan", {0: "a", 1: "b"}, "hint"),
        PeerError("load", {1: "lost"}),
        ChannelError("reset", peer=3, usable=True),
        ChannelTimeout("late", peer=3),
    ],
    ids=["problems", "text", "disagreement", "peer", "channel", "timeout"],
)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_says_the_same(error: Exception, copied: object) -> None:
    # What carries an exception out of a process of a test pool copies it in this way.
    error.add_note("on rank 3")
    again = copied(error)  # type: ignore[operator]
    assert (type(again), str(again)) == (type(error), str(error))
    assert vars(again) == vars(error)


def test_the_values_are_a_copy_of_the_mapping_given() -> None:
    values = {0: "a"}
    errors = DisagreementError("x", values), PeerError("x", values)
    values[1] = "b"
    assert (errors[0].values, errors[1].failures) == ({0: "a"}, {0: "a"})
