"""Integers: the one check that a number given from outside is a whole number.

Everything in this package counts: ranks, indices, lengths, bytes. What has `__index__` (numpy's
ints, an int tensor with one element) is taken and becomes a plain int, so that values compare,
hash and print alike. A bool is refused: where a count is meant, it is a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index

from distcore.v1.errors import PlanError, Problem


def as_int(value: object, where: str) -> int:
    """Return `value` as a plain int; PlanError at `where` if it is none."""
    if type(value) is int:
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        text = f"{value!r} is a {type(value).__name__}, not an int"
        raise PlanError(Problem(where, "type", text)) from None


def as_ints(values: Iterable[object], where: str) -> tuple[int, ...]:
    """Return `values` as a tuple of plain ints; PlanError at `where` if one of them is none."""
    try:
        found = tuple(values)
    except TypeError:
        text = f"{values!r} is a {type(values).__name__}, not a sequence of ints"
        raise PlanError(Problem(where, "type", text)) from None
    return tuple(as_int(value, where) for value in found)
