"""OwnerMuon in one process: a drop-in for torch.optim.Muon."""

from __future__ import annotations

import copy
import inspect
import io
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ownerplan import OwnerMuon
from ownerplan.newton_schulz import newton_schulz, schedule_of

SHAPES = ((5, 8), (64, 32), (2, 16))
Params = list[nn.Parameter]


def parameters(shapes: tuple[tuple[int, ...], ...] = SHAPES, dtype: Any = None) -> Params:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def train(optimizer: torch.optim.Optimizer, params: Params, steps: range = range(5)) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def assert_same(found: Params, expected: Params) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "lr": 0.1, "weight_decay": 0.3},
    {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.4},
    {"adjust_lr_fn": "original", "ns_steps": 2, "eps": 1e-2},
    {"lr": torch.tensor(0.05), "ns_coefficients": (2.0, -1.5, 0.5)},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_plain_parameters_step_as_with_torch(options: dict[str, Any]) -> None:
    params, expected = parameters(), parameters()
    train(OwnerMuon(params, **options), params)
    train(torch.optim.Muon(expected, **options), expected)
    assert_same(params, expected)


def test_the_first_nine_arguments_are_those_of_torch() -> None:
    ours = inspect.signature(OwnerMuon).parameters.values()
    theirs = inspect.signature(torch.optim.Muon).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours][:9] == [
        (p.name, p.default, p.kind) for p in theirs
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(ours)[9:])


WRONG: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"lr": torch.tensor([1.0, 2.0])},
    {"momentum": -0.1},
    {"weight_decay": -0.1},
    {"adjust_lr_fn": "both"},
]


@pytest.mark.parametrize("options", WRONG)
def test_what_torch_refuses_is_refused_with_its_words(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r".") as theirs:
        torch.optim.Muon(parameters(), **options)
    with pytest.raises(ValueError, match=re.escape(str(theirs.value))):
        OwnerMuon(parameters(), **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"ns_coefficients": (1.0, 2.0)}, "exactly 3"),
        ({"ns_steps": 100}, "less than 100"),
        ({"missing_grads": "guess"}, "missing_grads"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"slots": 0}, "slots"),
        ({"matrix_view": (4, 4)}, "do not add up"),
        ({"lr": float("nan")}, "Learning rate"),
    ],
)
def test_what_is_no_option_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        OwnerMuon(parameters(), **options)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_a_parameter_that_is_no_matrix_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"two dims and more.*FlatBuffer"):
        OwnerMuon([nn.Parameter(torch.zeros(shape))])


def test_complex_and_sparse_are_refused_as_by_torch() -> None:
    param = nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))
    param.grad = torch.zeros_like(param)
    with pytest.raises(RuntimeError, match="complex"):
        OwnerMuon([param]).step()
    sparse = nn.Parameter(torch.zeros(2, 2))
    sparse.grad = torch.zeros(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="sparse"):
        OwnerMuon([sparse]).step()


def test_without_a_gradient_nothing_moves() -> None:
    params, expected = parameters(), parameters()
    optimizer = OwnerMuon(params, lr=1.0)
    optimizer.step()
    assert_same(params, expected)
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert not torch.equal(params[0], expected[0])
    assert_same(params[1:], expected[1:])
    assert not any(optimizer.state[p]["momentum_buffer"].any() for p in params[1:])


def test_bfloat16_without_nesterov_keeps_its_momentum() -> None:
    """torch.optim.Muon overwrites its momentum there: it normalizes it in place."""
    param = parameters(((8, 4),), torch.bfloat16)[0]
    optimizer = OwnerMuon([param], nesterov=False, momentum=0.5)
    param.grad = torch.full_like(param, 4.0)
    optimizer.step()
    momentum = optimizer.state[param]["momentum_buffer"]
    assert torch.equal(momentum, torch.full_like(param, 2.0))


def test_bfloat16_steps_as_with_torch() -> None:
    """But for one rounding: torch's own depends on where an element lies in memory."""
    params, expected = (parameters(dtype=torch.bfloat16) for _ in range(2))
    train(OwnerMuon(params, lr=0.1), params, range(1))
    train(torch.optim.Muon(expected, lr=0.1), expected, range(1))
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other, atol=1e-3, rtol=2**-7)


def by_matrices(weight: torch.Tensor, parts: list[torch.Tensor]) -> torch.Tensor:
    """One step with lr 1 and no decay, of each part by itself; `parts` are views of a gradient."""
    updates = [newton_schulz(part * 0.0975, schedule_of("quintic", 5), 1e-7) for part in parts]
    rows = [max(1.0, part.shape[0] / part.shape[1]) ** 0.5 for part in parts]
    moved = [update.float() * step for update, step in zip(updates, rows, strict=True)]
    return weight - torch.cat([one.reshape(-1) for one in moved]).view(weight.shape)


@pytest.mark.parametrize(
    ("shape", "view", "cut"),
    [
        ((4, 2, 3), "flatten", lambda g: [g.view(4, 6)]),
        ((3, 4, 5), "batch", list),
        ((12, 5), 3, lambda g: list(g.split(4))),
        ((8, 5), (5, 2, 1), lambda g: list(g.split((5, 2, 1)))),
        ((8, 5), [5, 2, 1], lambda g: list(g.split((5, 2, 1)))),
    ],
)
def test_a_view_says_what_is_one_matrix(shape: tuple[int, ...], view: Any, cut: Any) -> None:
    param = parameters((shape,))[0]
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = by_matrices(param.detach().clone(), cut(gradient))
    param.grad = gradient.clone()
    optimizer = OwnerMuon([param], lr=1.0, weight_decay=0.0, matrix_view=view)
    optimizer.step()
    torch.testing.assert_close(param.detach(), expected, atol=2e-2, rtol=0)
    report = optimizer.last_report
    assert report is not None
    assert report.matrices == len(cut(gradient))


def test_a_convolution_counts_as_its_flattened_weight() -> None:
    conv, flat = parameters(((6, 2, 2),))[0], parameters(((6, 2, 2),))[0].detach().view(6, 4)
    expected = nn.Parameter(flat.clone())
    gradient = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    conv.grad, expected.grad = gradient.view(6, 2, 2), gradient
    OwnerMuon([conv]).step()
    torch.optim.Muon([expected]).step()
    assert torch.equal(conv.view(6, 4), expected)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_a_parameter_without_elements_is_left_alone(shape: tuple[int, int]) -> None:
    param = nn.Parameter(torch.zeros(shape))
    param.grad = torch.zeros(shape)
    optimizer = OwnerMuon([param])
    optimizer.step()
    assert optimizer.last_report is not None
    assert optimizer.last_report.matrices == 0


def test_other_schedules_and_no_adjustment() -> None:
    param = parameters(((16, 4),))[0]
    before, gradient = param.detach().clone(), torch.eye(16)[:, :4]
    param.grad = gradient.clone()
    OwnerMuon(
        [param], 1.0, 0.0, ns_coefficients="polar_express", ns_steps=8, adjust_lr_fn="none"
    ).step()
    # The gradient is orthogonal already; without an adjustment it is the update itself.
    torch.testing.assert_close(before - param.detach(), gradient, atol=2e-2, rtol=0)


def test_the_kernel_may_be_another() -> None:
    seen: list[tuple[int, ...]] = []

    def kernel(matrix: torch.Tensor, schedule: Any, eps: float) -> torch.Tensor:
        seen.append((*matrix.shape, len(schedule)))
        return newton_schulz(matrix, schedule, eps)

    params, expected = parameters(), parameters()
    train(OwnerMuon(params, kernel=kernel), params, range(1))
    train(torch.optim.Muon(expected), expected, range(1))
    assert_same(params, expected)
    assert seen == [(5, 8, 5), (64, 32, 5), (2, 16, 5)]


def test_a_compiled_kernel_steps_alike() -> None:
    compiled = torch.compile(newton_schulz, backend="eager", fullgraph=True)
    params, expected = parameters(), parameters()
    train(OwnerMuon(params, kernel=compiled), params, range(2))
    train(torch.optim.Muon(expected), expected, range(2))
    assert_same(params, expected)


def test_a_closure_runs_with_gradients_and_its_loss_comes_back() -> None:
    param = nn.Parameter(torch.ones(2, 3))
    optimizer = OwnerMuon([param])

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 6.0
    assert param.max() < 1.0


def test_groups_have_their_own_options_and_may_be_added_later() -> None:
    params, expected = parameters(), parameters()
    ours = OwnerMuon([{"params": params[:1], "lr": 0.5}], weight_decay=0.0)
    theirs = torch.optim.Muon([{"params": expected[:1], "lr": 0.5}], weight_decay=0.0)
    for optimizer, group in ((ours, params), (theirs, expected)):
        train(optimizer, group[:1], range(2))
        optimizer.add_param_group({"params": group[1:], "momentum": 0.2})
        train(optimizer, group, range(2, 5))
    assert_same(params, expected)


def test_a_group_that_is_refused_is_not_kept() -> None:
    optimizer = OwnerMuon(parameters())
    with pytest.raises(ValueError, match="Learning rate"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1


def test_a_scheduler_sets_the_learning_rate() -> None:
    params, expected = parameters(), parameters()
    for optimizer, group in (
        (OwnerMuon(params, lr=0.1), params),
        (torch.optim.Muon(expected, lr=0.1), expected),
    ):
        scheduler = StepLR(optimizer, 1, 0.5)
        for step in range(3):
            train(optimizer, group, range(step, step + 1))
            scheduler.step()
    assert_same(params, expected)


def test_state_goes_to_another_optimizer_and_back() -> None:
    params, expected = parameters(), parameters()
    ours, theirs = OwnerMuon(params), torch.optim.Muon(expected)
    train(ours, params, range(2))
    train(theirs, expected, range(2))
    other = OwnerMuon(params, lr=9.0, matrix_view="batch")
    other.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert other.param_groups[0]["lr"] == 1e-3
    assert other.param_groups[0]["matrix_view"] == "batch"
    train(other, params, range(2, 5))
    train(theirs, expected, range(2, 5))
    assert_same(params, expected)


def test_momentum_that_a_state_lacks_starts_at_zero() -> None:
    params = parameters()
    lacking = torch.optim.Muon(params).state_dict()
    optimizer = OwnerMuon(params)
    optimizer.load_state_dict(lacking)
    assert all(not optimizer.state[p]["momentum_buffer"].any() for p in params)


def test_state_is_there_from_the_start_with_a_key_for_each_parameter() -> None:
    assert sorted(OwnerMuon(parameters()).state_dict()["state"]) == [0, 1, 2]


def test_momentum_is_cast_to_the_parameter_when_loaded() -> None:
    """A resumed run of bfloat16 had failed in its first step elsewhere."""
    saved = OwnerMuon(parameters())
    params = parameters(dtype=torch.bfloat16)
    resumed = OwnerMuon(params)
    resumed.load_state_dict(saved.state_dict())
    train(resumed, params, range(1))
    assert resumed.state[params[0]]["momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_copy_goes_on_alone(way: str) -> None:
    model = nn.ParameterList(parameters())
    optimizer = OwnerMuon(model.parameters(), bucket_bytes=99, slots=3)
    train(optimizer, list(model), range(2))
    if way == "deepcopy":
        other, twin = copy.deepcopy((optimizer, model))
    else:
        file = io.BytesIO()
        torch.save((optimizer, model), file)
        file.seek(0)
        other, twin = torch.load(file, weights_only=False)
    train(optimizer, list(model), range(2, 4))
    assert not torch.equal(twin[0], model[0])
    train(other, list(twin), range(2, 4))
    assert_same(list(twin), list(model))
    assert other._options == optimizer._options


def test_accumulated_gradients_step_once() -> None:
    param = nn.Parameter(torch.ones(3, 2))
    optimizer = OwnerMuon([param])
    for _ in range(4):
        (param * 0.25).sum().backward()
    optimizer.step()
    assert optimizer.last_report is not None
    assert optimizer.last_report.matrices == 1
