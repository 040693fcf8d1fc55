"""OwnerMuon where gradients are missing, and where a rank fails: no hang, nothing in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distcore.testing import RankPool
from distcore.v1 import Channel, DisagreementError, PeerError, PlanError
from ownerplan import OwnerMuon
from ownerplan.newton_schulz import newton_schulz

SHAPES = ((8, 5), (12, 9), (16, 4), (3, 6))
HAVING = ((0, 1, 2, 3), (0, 2), (), (0, 1, 3), (2,))
WITHIN_S = 45.0  # the first optimizer of a process makes torch import its compiler


def weight(at: int) -> torch.Tensor:
    return torch.randn(SHAPES[at], generator=torch.Generator().manual_seed(at))


def gradient(at: int, step: int) -> torch.Tensor:
    return torch.randn(SHAPES[at], generator=torch.Generator().manual_seed(100 * step + at))


def in_one_process(having: tuple[tuple[int, ...], ...]) -> list[torch.Tensor]:
    """What torch.optim.Muon makes of it; at each step the parameters `having` have gradients."""
    params = [torch.nn.Parameter(weight(at)) for at in range(len(SHAPES))]
    optimizer = torch.optim.Muon(params, lr=0.1)
    for step, present in enumerate(having):
        for at, param in enumerate(params):
            param.grad = gradient(at, step) if at in present else None
        optimizer.step()
    return [param.detach() for param in params]


def sharded(full: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", list(range(4)))
    return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)


def make(**options: Any) -> tuple[list[torch.nn.Parameter], OwnerMuon]:
    params = [torch.nn.Parameter(sharded(weight(at))) for at in range(len(SHAPES))]
    return params, OwnerMuon(params, lr=0.1, timeout_s=10.0, **options)


def set_grads(params: list[torch.nn.Parameter], step: int, present: tuple[int, ...]) -> None:
    for at, param in enumerate(params):
        param.grad = sharded(gradient(at, step)) if at in present else None


def full(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [param.detach().full_tensor() for param in params]  # type: ignore[attr-defined]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def freeze_in_between(channel: Channel, options: dict[str, Any]) -> list[int]:
    params, optimizer = make(**options)
    exchanges = []
    for step, present in enumerate(HAVING):
        set_grads(params, step, present)
        optimizer.step()
        assert optimizer.last_report is not None
        exchanges.append(optimizer.last_report.exchanges)
    assert same(full(params), in_one_process(HAVING))
    return exchanges


@pytest.mark.parametrize("missing", ["skip", "zero", "error"])
def test_parameters_frozen_in_between_are_as_in_one_process(pool: RankPool, missing: str) -> None:
    exchanges = pool.run(freeze_in_between, {"missing_grads": missing}).values()
    assert exchanges == ([2, 2, 0, 2, 2],) * 4


def test_buckets_without_a_gradient_do_not_move(pool: RankPool) -> None:
    exchanges = pool.run(freeze_in_between, {"bucket_bytes": 1, "slots": 3}).values()
    assert exchanges == ([8, 4, 0, 6, 2],) * 4


def one_rank_without(channel: Channel, missing: str) -> None:
    params, optimizer = make(missing_grads=missing)
    set_grads(params, 0, (0, 1, 2, 3))
    if channel.rank == 1:
        params[1].grad = None
    if channel.rank == 3:
        params[3].grad = None  # this rank holds nothing of its three rows
    before = full(params)
    optimizer.step()
    found = full(params)
    if missing == "skip":
        expected = in_one_process(((0, 2, 3),))
        assert torch.equal(found[1], before[1])
    else:
        expected = with_zero_rows(1, slice(3, 6))
    assert same(found, expected)


def with_zero_rows(at: int, rows: slice) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(weight(at)) for at in range(len(SHAPES))]
    for i, param in enumerate(params):
        param.grad = gradient(i, 0)
    params[at].grad[rows] = 0  # type: ignore[index]
    torch.optim.Muon(params, lr=0.1).step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("missing", ["skip", "zero"])
def test_one_rank_without_a_gradient(pool: RankPool, missing: str) -> None:
    pool.run(one_rank_without, missing).values()


def test_one_rank_without_a_gradient_may_be_an_error(pool: RankPool) -> None:
    for error in pool.run(one_rank_without, "error").raised(PlanError, within_s=WITHIN_S):
        assert "parameter 1 of group 0" in str(error)


def fail(channel: Channel, how: str) -> None:
    """One rank fails in some phase; all raise, and the next step is whole again."""
    state = {"broken": channel.rank == 2 and how == "kernel"}

    def kernel(matrix: torch.Tensor, schedule: Any, eps: float) -> torch.Tensor:
        if state["broken"]:
            raise ArithmeticError("no matrix today")
        return newton_schulz(matrix, schedule, eps)

    def closure() -> float:
        if how == "closure" and channel.rank == 2:
            raise ArithmeticError("no loss today")
        return 1.0

    params, optimizer = make(kernel=kernel, bucket_bytes=1)
    set_grads(params, 0, (0, 1, 2, 3))
    if channel.rank == 2:
        if how == "sparse":
            params[0].grad = torch.zeros(8, 5).to_sparse()
        if how == "blend":
            optimizer.state[params[1]]["momentum_buffer"] = torch.zeros(1, 1)
        if how == "rule":
            optimizer.param_groups[0]["lr"] = 0.2
    try:
        optimizer.step(closure)
    finally:
        state["broken"] = False
        optimizer.param_groups[0]["lr"] = 0.1
        for param in params:
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
            param.grad = None
        optimizer.step()
        assert optimizer.last_report is not None
        assert optimizer.last_report.collectives == 1


@pytest.mark.parametrize("how", ["closure", "sparse", "kernel", "blend"])
def test_where_one_rank_fails_all_raise_and_can_go_on(pool: RankPool, how: str) -> None:
    for error in pool.run(fail, how).raised(PeerError, within_s=WITHIN_S):
        assert list(error.failures) == [2]


def test_other_hyperparameters_on_one_rank_are_found(pool: RankPool) -> None:
    for error in pool.run(fail, "rule").raised(DisagreementError, within_s=WITHIN_S):
        assert sorted(error.values) == [0, 1, 2, 3]


def other_parameters(channel: Channel) -> None:
    param = torch.nn.Parameter(sharded(weight(0)))
    OwnerMuon([param], matrix_view=2 if channel.rank else 1, timeout_s=10.0)


def test_other_matrices_on_one_rank_are_found_when_it_is_made(pool: RankPool) -> None:
    for error in pool.run(other_parameters).raised(DisagreementError, within_s=WITHIN_S):
        assert "the plan of OwnerMuon" in str(error)
