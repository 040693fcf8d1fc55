"""integers: what counts as a whole number, and what does not."""

from __future__ import annotations

import numpy as np
import pytest

from distcore.v1 import PlanError
from distcore.v1.integers import as_int, as_ints


@pytest.mark.parametrize("number", [3, np.int8(3), np.uint64(3), np.array(3)])
def test_a_whole_number_becomes_a_plain_int(number: object) -> None:
    assert as_int(number, "here") == 3
    assert type(as_int(number, "here")) is int


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, [3]])
def test_anything_else_is_refused_by_its_type(value: object) -> None:
    with pytest.raises(PlanError, match="not an int") as caught:
        as_int(value, "here")
    assert [(p.where, p.kind) for p in caught.value.problems] == [("here", "type")]
    assert type(value).__name__ in str(caught.value)


def test_a_sequence_becomes_a_tuple() -> None:
    assert as_ints([1, np.int64(2)], "here") == (1, 2)
    assert as_ints((n for n in (4, 5)), "here") == (4, 5)


@pytest.mark.parametrize("values", [7, None, "12", [1, 2.0]])
def test_what_is_no_sequence_of_ints_is_refused(values: object) -> None:
    with pytest.raises(PlanError, match="not a"):
        as_ints(values, "here")  # type: ignore[arg-type]
