"""Matrix views: which matrices a parameter is made of, decided on its global shape.

How the parameter is sharded plays no part: a fused projection has the same three matrices on one
rank as on a thousand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from math import prod
from typing import TypeAlias

from distcore.v1 import PlanError, Problem, Region

View: TypeAlias = str | int | tuple[int, ...] | list[int]
"""`"flatten"`, `"batch"`, a number of heads, or the rows of each block."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One matrix of a parameter: the box of its elements, and the rows and cols they make.

    The elements of the box, in row-major order, are those of the matrix in row-major order.
    """

    region: Region
    rows: int
    cols: int


def matrices_of(shape: Sequence[int], view: View = "flatten") -> tuple[Matrix, ...]:
    """The matrices of a parameter of this global shape; together they are all its elements.

    - `"flatten"`: one matrix, dim 0 by all other dims. A convolution's weight counts as
      (out, in * height * width).
    - `"batch"`: one matrix per index of the leading dims, of the last two: a stack of experts.
    - a number of heads: dim 0 in so many equal blocks of rows, each a matrix.
    - a sequence of ints: blocks of so many rows, as (q, k, v) of a fused projection.

    A parameter without elements has no matrices. PlanError (a ValueError) where it has less than
    two dims, where the heads do not divide its rows, and where blocks do not add up to them.

    >>> [(m.rows, m.cols) for m in matrices_of((6, 4), (4, 1, 1))]
    [(4, 4), (1, 4), (1, 4)]
    >>> matrices_of((2, 3, 5), "batch")[1].region
    Region(start=(1, 0, 0), stop=(2, 3, 5))
    """
    shape = tuple(shape)
    if len(shape) < 2:
        text = f"expected a parameter of two dims or more, got one of shape {shape}"
        raise PlanError(Problem("shape", "shape", text))
    if view == "batch":
        found = _batch(shape)
    elif view == "flatten":
        found = _blocks(shape, (shape[0],))
    else:
        found = _blocks(shape, _rows_of(shape, view))
    return tuple(matrix for matrix in found if matrix.region.numel)


def _rows_of(shape: tuple[int, ...], view: View) -> tuple[int, ...]:
    """How many rows each block has."""
    if isinstance(view, int) and not isinstance(view, bool):
        if view < 1 or shape[0] % view:
            text = f"{shape[0]} rows cannot be divided into {view} equal heads"
            raise PlanError(Problem("matrix_view", "heads", text))
        return (shape[0] // view,) * view
    if not isinstance(view, tuple | list):
        text = f"expected 'flatten', 'batch', a number of heads or rows per block, got {view!r}"
        raise PlanError(Problem("matrix_view", "value", text))
    rows = tuple(view)
    if any(n < 1 for n in rows) or sum(rows) != shape[0]:
        text = f"blocks of {rows} rows do not add up to the {shape[0]} rows of shape {shape}"
        raise PlanError(Problem("matrix_view", "rows", text))
    return rows


def _blocks(shape: tuple[int, ...], rows: tuple[int, ...]) -> list[Matrix]:
    ends, rest = list(accumulate(rows)), shape[1:]
    return [
        Matrix(Region((end - n, *(0 for _ in rest)), (end, *rest)), n, prod(rest))
        for n, end in zip(rows, ends, strict=True)
    ]


def _batch(shape: tuple[int, ...]) -> list[Matrix]:
    leading, (rows, cols) = shape[:-2], shape[-2:]
    return [
        Matrix(Region((*at, 0, 0), (*(i + 1 for i in at), rows, cols)), rows, cols)
        for at in product(*map(range, leading))
    ]
