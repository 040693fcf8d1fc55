"""Measured costs."""

from __future__ import annotations

import pytest
import torch

from ownerplan.calibration import SHAPES, MeasuredCost, calibrate_cost, fit_cost
from ownerplan.plan import plan_owners


def test_the_cost_has_three_parts() -> None:
    """5 steps on (2, 3) have 5 * 64 operations."""
    cost = MeasuredCost(fixed_s=1.0, s_per_flop=0.5, s_per_element=0.25)
    assert cost((2, 3)) == 1.0 + 0.5 * 320 + 0.25 * 6
    assert cost((2, 3, 1)) == cost((2, 3))


@pytest.mark.parametrize(
    "true",
    [
        MeasuredCost(1e-5, 1e-12, 1e-10),
        MeasuredCost(0.0, 1e-12, 0.0),
        MeasuredCost(1e-4, 0.0, 1e-9),
        MeasuredCost(1e-5, 1e-12, 0.0, num_ns_steps=3),
    ],
)
def test_a_fit_finds_the_numbers_that_made_the_times(true: MeasuredCost) -> None:
    seconds = [true(shape) for shape in SHAPES]
    found = fit_cost(SHAPES, seconds, num_ns_steps=true.num_ns_steps)
    for shape, wanted in zip(SHAPES, seconds, strict=True):
        assert found(shape) == pytest.approx(wanted, rel=1e-6)
    assert found.fixed_s == pytest.approx(true.fixed_s, abs=1e-10)
    assert found.s_per_flop == pytest.approx(true.s_per_flop, abs=1e-17)


def test_no_number_of_a_fit_is_negative() -> None:
    found = fit_cost([(64, 64), (128, 128), (256, 256)], [3.0, 2.0, 1.0])
    assert min(found.fixed_s, found.s_per_flop, found.s_per_element) >= 0


def test_a_device_is_measured_and_its_cost_plans() -> None:
    cost = calibrate_cost("cpu", shapes=[(8, 8), (8, 64), (64, 64)], repeats=1)
    assert cost((512, 512)) > 0
    plan = plan_owners([[(8, 8), (64, 64), (64, 64)]], 2, cost_fn=cost)
    assert plan.makespan <= sum(plan.loads)


def test_each_shape_is_run_once_more_than_it_counts() -> None:
    seen: list[tuple[int, ...]] = []

    def step(matrix: torch.Tensor) -> None:
        seen.append(tuple(matrix.shape))

    calibrate_cost("cpu", step=step, shapes=[(2, 2), (2, 4), (4, 4)], repeats=2)
    assert seen == [(2, 2)] * 3 + [(2, 4)] * 3 + [(4, 4)] * 3


@pytest.mark.parametrize(
    ("shapes", "repeats"), [([(2, 2), (2, 4), (2, 2)], 1), ([(2, 2), (2, 4), (4, 4)], 0)]
)
def test_too_little_to_measure_is_refused(shapes: list[tuple[int, int]], repeats: int) -> None:
    with pytest.raises(ValueError, match="three shapes and one repeat are needed"):
        calibrate_cost("cpu", shapes=shapes, repeats=repeats)
