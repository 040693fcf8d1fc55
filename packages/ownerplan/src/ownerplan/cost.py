"""Cost: how much work the matrix step of a tensor is, from its full shape alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

from distcore.v1 import PlanError, Problem

CostFn = Callable[[Sequence[int]], float]
"""The cost of a full shape; the same function on all ranks."""


def matrix_of(shape: Sequence[int]) -> tuple[int, int]:
    """The rows and columns that a tensor counts as: dim 0, and all other dims flattened.

    >>> matrix_of((4, 2, 3))
    (4, 6)
    """
    if not shape:
        raise PlanError(Problem("shape", "shape", "a tensor without dims is no matrix"))
    return shape[0], prod(shape[1:])


def ns_cost_fn(num_ns_steps: int) -> Callable[[Sequence[int]], int]:
    """The work estimate of Megatron-Core's owner planning for so many Newton-Schulz steps.

    It is `numel * (min(rows, cols) * num_ns_steps + 1)`: the products up to a constant factor,
    and a linear term for everything that is done element by element. It puts a square matrix
    and one four times as long at 1 : 4, where the operations are 1 : 3; `flop_cost_fn` is true
    to them.

    >>> ns_cost_fn(5)((6, 4)), ns_cost_fn(5)((4, 2, 3))
    (504, 504)
    """
    _check_steps(num_ns_steps)

    def cost(shape: Sequence[int]) -> int:
        rows, cols = matrix_of(shape)
        return rows * cols * (min(rows, cols) * num_ns_steps + 1)

    return cost


def flop_cost_fn(
    num_ns_steps: int = 5, *, kernel: Literal["standard", "symmetric"] = "standard"
) -> Callable[[Sequence[int]], int]:
    """The floating point operations of so many Newton-Schulz steps.

    With s the shorter side and l the longer one, a step has three products: X X^T (2 s^2 l),
    A A (2 s^3) and B X (2 s^2 l). With the kernel `symmetric` the first two are computed in one
    half, for their results are symmetric.

    >>> flop_cost_fn(5)((4, 4)), flop_cost_fn(5)((4, 16)), flop_cost_fn(1)((2, 3))
    (1920, 5760, 64)
    """
    _check_steps(num_ns_steps)
    if kernel not in ("standard", "symmetric"):
        text = f"{kernel!r} is neither 'standard' nor 'symmetric'"
        raise PlanError(Problem("kernel", "unknown", text))
    long, cube = (4, 2) if kernel == "standard" else (3, 1)

    def cost(shape: Sequence[int]) -> int:
        low, high = sorted(matrix_of(shape))
        return num_ns_steps * low * low * (long * high + cube * low)

    return cost


def _check_steps(num_ns_steps: int) -> None:
    if num_ns_steps < 0:
        raise PlanError(Problem("num_ns_steps", "range", f"{num_ns_steps} is negative"))
