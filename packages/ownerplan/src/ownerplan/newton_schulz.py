"""Newton-Schulz: the nearest orthogonal matrix, by products of matrices alone.

An iteration takes X to a X + b (X X^T) X + c (X X^T)^2 X, which leaves the singular vectors alone
and moves every singular value s to a s + b s^3 + c s^5. A schedule says with which (a, b, c), one
triple per iteration. All arithmetic is in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import torch

from distcore.v1 import PlanError, Problem

Triple: TypeAlias = tuple[float, float, float]
Schedule: TypeAlias = tuple[Triple, ...]
Kernel: TypeAlias = Callable[[torch.Tensor, Schedule, float], torch.Tensor]
"""What `newton_schulz` is: of a matrix, a schedule and eps the orthogonal matrix, a new one."""

QUINTIC: Final[Triple] = (3.4445, -4.7750, 2.0315)
"""The triple of torch.optim.Muon: steep at zero, and never quite at one."""

_POLAR_EXPRESS: Final[Schedule] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_FIXED_POINT: Final[Triple] = (1.875, -1.25, 0.375)
_SAFETY: Final = 1.01
MAX_STEPS: Final = 99

Coefficients: TypeAlias = str | Sequence[float | Sequence[float]]


def schedule_of(coefficients: Coefficients, steps: int) -> Schedule:
    """The triple of each of `steps` iterations.

    `coefficients` is one triple for all of them, a sequence of triples of which the last one is
    repeated, or a name: `"quintic"` is the triple of torch.optim.Muon, `"polar_express"` the
    schedule of Amsel, Persson, Musco and Gower (2025, arXiv 2505.16932), with their margin of
    1.01 against the rounding of bfloat16.

    PlanError (a ValueError) where it is none of these, or where `steps` is not in 0 to 99.

    >>> schedule_of((2.0, -1.5, 0.5), 2)
    ((2.0, -1.5, 0.5), (2.0, -1.5, 0.5))
    >>> [round(a, 3) for a, _, _ in schedule_of("polar_express", 3)]
    [8.205, 4.066, 3.91]
    """
    if not 0 <= steps <= MAX_STEPS:
        text = f"expected less than 100 Newton-Schulz steps and no negative number, got {steps}"
        raise PlanError(Problem("ns_steps", "range", text))
    triples = _triples(coefficients)
    return triples[:steps] + triples[-1:] * (steps - len(triples))


def newton_schulz(matrix: torch.Tensor, schedule: Schedule, eps: float) -> torch.Tensor:
    """The orthogonal matrix near `matrix` (rows, cols), in bfloat16; `matrix` is only read.

    The matrix is first divided by its Frobenius norm, or by `eps` where that is larger, so that
    no singular value lies above one. Equal to the last bit to what torch.optim.Muon computes of
    the same matrix. Of an all-zero matrix it is zero.
    """
    rows, cols = matrix.shape
    x = matrix.to(torch.bfloat16, copy=True)
    x = x.T if rows > cols else x  # the products are smaller on the short side
    x.div_(x.norm().clamp(min=eps))
    for a, b, c in schedule:
        gram = x @ x.T  # (short, short)
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x.T if rows > cols else x


def _triples(coefficients: Coefficients) -> Schedule:
    """The triples that were given, at least one."""
    if coefficients == "quintic":
        return (QUINTIC,)
    if coefficients == "polar_express":
        damped = [(a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS]
        return (*damped, _FIXED_POINT)
    if isinstance(coefficients, str):
        raise _unknown(coefficients)
    numbers = [n for n in coefficients if isinstance(n, int | float)]
    rows = [numbers] if numbers else [n for n in coefficients if isinstance(n, Sequence)]
    if len(numbers or rows) != len(coefficients) or not rows or any(len(row) != 3 for row in rows):
        raise _unknown(coefficients)
    return tuple((float(a), float(b), float(c)) for a, b, c in rows)


def _unknown(coefficients: object) -> PlanError:
    text = (
        f"expected exactly 3 numbers, a list of such triples, 'quintic' or 'polar_express', "
        f"got {coefficients!r}"
    )
    return PlanError(Problem("ns_coefficients", "value", text))
