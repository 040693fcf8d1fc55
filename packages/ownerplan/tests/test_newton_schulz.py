"""Newton-Schulz: schedules, and the same bits as torch.optim.Muon."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz as torch_newton_schulz

from distcore.v1 import PlanError
from ownerplan.newton_schulz import QUINTIC, newton_schulz, schedule_of


@pytest.mark.parametrize("shape", [(5, 8), (64, 32), (2, 16), (1, 1), (33, 47), (257, 129)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bits_are_those_of_torch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    before = matrix.clone()
    found = newton_schulz(matrix, schedule_of(QUINTIC, 5), 1e-7)
    assert torch.equal(matrix, before)
    assert torch.equal(found, torch_newton_schulz(matrix, QUINTIC, 5, 1e-7))


def test_zeros_stay_zero() -> None:
    zeros = torch.zeros(3, 5)
    assert torch.equal(newton_schulz(zeros, schedule_of(QUINTIC, 5), 1e-7).float(), zeros)


def image(coefficients: Any, steps: int, value: float) -> float:
    """Where a singular value goes, in exact arithmetic."""
    for a, b, c in schedule_of(coefficients, steps):
        value = a * value + b * value**3 + c * value**5
    return value


@pytest.mark.parametrize("value", [1e-3, 0.01, 0.1, 0.5, 1.0])
def test_polar_express_takes_every_singular_value_to_one(value: float) -> None:
    assert image("polar_express", 8, value) == pytest.approx(1.0, abs=1e-5)
    assert image("polar_express", 5, value) == pytest.approx(1.0, abs=0.16)


def test_the_quintic_stays_away_from_one() -> None:
    found = [round(image("quintic", 5, value), 4) for value in (1e-3, 0.01, 0.1, 0.5, 1.0)]
    assert found == [0.4705, 0.6989, 0.7121, 0.7654, 0.6964]


def test_polar_express_is_nearer_to_orthogonal() -> None:
    matrix = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    worst = {
        name: float(
            (torch.linalg.svdvals(newton_schulz(matrix, schedule_of(name, 6), 1e-7).float()) - 1)
            .abs()
            .max()
        )
        for name in ("quintic", "polar_express")
    }
    assert worst["polar_express"] < 0.02 < 0.1 < worst["quintic"]


def test_a_list_of_triples_ends_with_its_last_one_repeated() -> None:
    triples = [(3.0, -3.0, 1.0), (2.0, -1.5, 0.5)]
    assert schedule_of(triples, 4) == (triples[0], triples[1], triples[1], triples[1])
    assert schedule_of(triples, 1) == (triples[0],)
    assert schedule_of(triples, 0) == ()


@pytest.mark.parametrize(
    "coefficients", [(1.0, 2.0), (1.0,) * 4, [], [(1.0, 2.0)], "cubic", [1.0, (2.0, 3.0), 4.0]]
)
def test_what_is_no_schedule_is_refused(coefficients: Any) -> None:
    with pytest.raises(PlanError, match="exactly 3 numbers"):
        schedule_of(coefficients, 5)


@pytest.mark.parametrize("steps", [-1, 100])
def test_the_number_of_steps_is_bounded(steps: int) -> None:
    with pytest.raises(ValueError, match="less than 100"):
        schedule_of(QUINTIC, steps)
