"""Calibration: what a matrix step costs on this very device, in seconds.

Time is modelled as a fixed part per step, a part per floating point operation and a part per
element, fitted to a few measured shapes. Small matrices cost more than their operations say, and
the three numbers tell by how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch

from distcore.v1 import PlanError, Problem
from ownerplan.cost import flop_cost_fn, matrix_of
from ownerplan.newton_schulz import newton_schulz, schedule_of

MatrixStep = Callable[[torch.Tensor], object]

SHAPES = ((64, 64), (64, 512), (256, 256), (256, 1024), (512, 512), (512, 2048))
_EPS = 1e-7


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """A cost function: seconds of the matrix step of a full shape.

    Its numbers were measured, so they differ from run to run and from rank to rank. A plan needs
    the same ones everywhere: measure on one rank and send them to the others.
    """

    fixed_s: float
    s_per_flop: float
    s_per_element: float
    num_ns_steps: int = 5

    def __call__(self, shape: Sequence[int]) -> float:
        """The seconds that the matrix step of a tensor of this shape takes."""
        rows, cols = matrix_of(shape)
        flops = flop_cost_fn(self.num_ns_steps)(shape)
        return self.fixed_s + self.s_per_flop * flops + self.s_per_element * rows * cols


def calibrate_cost(
    device: torch.device | str,
    *,
    num_ns_steps: int = 5,
    step: MatrixStep | None = None,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    repeats: int = 3,
) -> MeasuredCost:
    """Measure the matrix step on `device` and return its cost function.

    `step` takes a matrix; without it, it is `num_ns_steps` Newton-Schulz iterations in bfloat16.
    Of `repeats` measurements of each of the `shapes` (three or more) the shortest counts. This is
    local: nothing is sent, and on a device that is busy otherwise the result is of little use.
    """
    if len(set(shapes)) < 3 or repeats < 1:
        text = f"three shapes and one repeat are needed, not {len(set(shapes))} and {repeats}"
        raise PlanError(Problem("shapes", "length", text))
    if step is None:
        schedule = schedule_of("quintic", num_ns_steps)

        def step(matrix: torch.Tensor) -> torch.Tensor:
            return newton_schulz(matrix, schedule, _EPS)

    device = torch.device(device)
    seconds = [_measure(step, torch.randn(shape, device=device), repeats) for shape in shapes]
    return fit_cost(shapes, seconds, num_ns_steps=num_ns_steps)


def fit_cost(
    shapes: Sequence[tuple[int, int]], seconds: Sequence[float], *, num_ns_steps: int = 5
) -> MeasuredCost:
    """The cost function whose relative errors at the measured shapes are least, in squares.

    None of its three numbers is negative.
    """
    flops = flop_cost_fn(num_ns_steps)
    rows = [(1.0, float(flops(shape)), float(shape[0] * shape[1])) for shape in shapes]
    terms = torch.tensor(rows, dtype=torch.float64)
    terms /= torch.tensor(seconds, dtype=torch.float64).unsqueeze(1)
    scales = terms.norm(dim=0)
    best, error = (0.0, 0.0, 0.0), float("inf")
    # The least squares without negative numbers are those of one of the subsets of terms.
    for count in (1, 2, 3):
        for subset in combinations(range(3), count):
            chosen = (terms / scales)[:, subset]
            target = torch.ones(len(rows), 1, dtype=torch.float64)
            found = torch.linalg.lstsq(chosen, target).solution
            missed = float((chosen @ found - target).norm())
            if bool((found >= 0).all()) and missed < error:
                parts = torch.zeros(3, dtype=torch.float64)
                parts[list(subset)] = found[:, 0]
                fixed, per_flop, per_element = (parts / scales).tolist()
                best, error = (fixed, per_flop, per_element), missed
    return MeasuredCost(*best, num_ns_steps=num_ns_steps)


def _measure(step: MatrixStep, matrix: torch.Tensor, repeats: int) -> float:
    """The seconds of the fastest of some runs, after one that does not count."""
    times = []
    for _ in range(repeats + 1):
        _wait_for(matrix.device)
        start = time.perf_counter()
        step(matrix)
        _wait_for(matrix.device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
