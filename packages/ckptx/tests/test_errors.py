"""Each error is a CheckpointingException and what distcore calls it."""

from __future__ import annotations

import pytest

from ckptx import (
    CheckpointChannelError,
    CheckpointDisagreement,
    CheckpointingException,
    CheckpointPeerError,
    CheckpointPlanError,
    CheckpointTimeout,
    FormatError,
    ReadError,
)
from ckptx.errors import as_checkpoint_errors
from distcore.v1 import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PeerError,
    PlanError,
    Problem,
)


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (PlanError(Problem("a", "shape", "wrong")), CheckpointPlanError),
        (DisagreementError("load", {0: "x", 1: "y"}), CheckpointDisagreement),
        (PeerError("load", {1: "broke"}), CheckpointPeerError),
        (ChannelError("gone", peer=2, usable=True), CheckpointChannelError),
        (ChannelTimeout("late", peer=2), CheckpointTimeout),
    ],
)
def test_an_error_of_distcore_becomes_both(raised: Exception, found: type[Exception]) -> None:
    with pytest.raises(found) as caught, as_checkpoint_errors():
        raise raised
    assert isinstance(caught.value, CheckpointingException)
    assert isinstance(caught.value, type(raised))
    assert caught.value.__cause__ is raised
    assert str(caught.value) == str(raised)
    assert {**vars(raised)} == {**vars(caught.value)}


def test_the_failing_rank_keeps_its_own_exception_as_the_cause() -> None:
    own = KeyError("mine")
    with pytest.raises(CheckpointPeerError) as caught, as_checkpoint_errors():
        raise PeerError("load", {0: "KeyError"}) from own
    assert caught.value.__cause__ is own


def test_errors_of_ckptx_pass_as_they_are() -> None:
    mine = FormatError("bad", file="f", key="k", offset=3)
    with pytest.raises(FormatError) as caught, as_checkpoint_errors():
        raise mine
    assert caught.value is mine
    assert str(mine) == "f, tensor 'k', byte 3: bad"


def test_a_read_error_is_an_os_error_with_its_fields() -> None:
    error = ReadError(5, "Input/output error", "f")
    assert isinstance(error, OSError)
    assert (error.errno, error.filename) == (5, "f")
    assert str(error) == "[Errno 5] Input/output error: 'f'"
