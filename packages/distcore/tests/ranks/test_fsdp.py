"""fsdp2_wrap on several ranks: the gradients of one process, and one error on all ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from distcore.fsdp import fsdp2_wrap
from distcore.model import DistributionPlan, distribution_plan, set_distribution_plan
from distcore.testing import RankPool
from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError, PeerError

Gradients = dict[str, torch.Tensor]


class Layer(nn.Module):
    """A projection with a gate of another dtype."""

    def __init__(self, gate: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(6, 6)
        self.gate = nn.Linear(6, 1, dtype=gate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x.to(self.gate.weight.dtype)).sigmoid()
        return self.proj(x) * weight.to(x.dtype)  # type: ignore[no-any-return]


class Causal(nn.Module):
    """An embedding, layers and a head: 5 rows do not divide evenly among the ranks."""

    def __init__(self, gate: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(5, 6)
        self.layers = nn.ModuleList([Layer(gate), Layer(gate)])
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def step(model: nn.Module, rank: int) -> None:
    """One forward and backward on the rank's own tokens."""
    tokens = torch.tensor([[rank, 4 - rank, 2]])
    model(tokens).square().mean().backward()


def expected_gradients(gate: torch.dtype, world_size: int) -> tuple[Gradients, Gradients]:
    """The mean over the ranks of what one process computes, and what rank 0 alone does."""
    alone = []
    for rank in range(world_size):
        model = Causal(gate)
        step(model, rank)
        alone.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
    mean = {name: sum(g[name] for g in alone) / world_size for name in alone[0]}
    return mean, alone[0]  # type: ignore[return-value]


def trained(channel: Channel, gate: torch.dtype, shard_root: bool, offload: bool) -> Any:
    """Each parameter's whole gradient, which are sharded, and the warnings."""
    from torch.distributed.tensor import DTensor

    model = Causal(gate)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers = fsdp2_wrap(model, shard_root, cpu_offload=offload)
    if layers != tuple(model.layers):
        raise AssertionError("the layers were not returned")
    step(model, channel.rank)
    gradients: Gradients = {}
    sharded = []
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            sharded.append(name)
            gradient = gradient.full_tensor()
        if gradient is not None:
            gradients[name] = gradient
    return gradients, sharded, [str(w.message) for w in caught if w.category is UserWarning]


@pytest.mark.parametrize("offload", [False, True])
def test_the_gradients_are_those_of_one_process(pool: RankPool, offload: bool) -> None:
    outcomes = pool.run(trained, torch.float32, True, offload)
    mean, _ = expected_gradients(torch.float32, pool.size)
    for gradients, sharded, warned in outcomes.values():
        assert sharded == list(mean)
        assert warned == []
        torch.testing.assert_close(gradients, mean)


def test_what_lies_outside_the_layers_may_stay_whole(pool: RankPool) -> None:
    mean, alone = expected_gradients(torch.float32, pool.size)
    gradients, sharded, _ = pool.run(trained, torch.float32, False, False).values()[0]
    outside = ["embed.weight", "head.weight"]
    assert [name for name in mean if name not in sharded] == outside
    for name in sharded:
        torch.testing.assert_close(gradients[name], mean[name])
    for name in outside:
        torch.testing.assert_close(gradients[name], alone[name])


def test_nvbug_6567139_a_gate_of_another_dtype_stays_plain(pool: RankPool) -> None:
    outcomes = pool.run(trained, torch.float64, True, False).values()
    mean, alone = expected_gradients(torch.float64, pool.size)
    gates = [name for name in mean if "gate" in name]
    assert len(gates) == 4
    for gradients, sharded, _ in outcomes:
        assert [name for name in mean if name not in sharded] == gates
        torch.testing.assert_close(
            {n: gradients[n] for n in sharded}, {n: mean[n] for n in sharded}
        )
    for name in gates:
        torch.testing.assert_close(outcomes[0][0][name], alone[name])
    warned = [texts for _, _, texts in outcomes]
    assert "mixed parameter dtypes" in warned[0][0]
    assert warned[1:] == [[]] * 3


def hybrid(channel: Channel) -> Gradients:
    """Gradients of a model that is sharded over two ranks and replicated over two."""
    from torch.distributed.device_mesh import init_device_mesh

    model = Causal(torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    fsdp2_wrap(model, mesh=mesh)
    step(model, channel.rank)
    return {n: p.grad.full_tensor() for n, p in model.named_parameters()}  # type: ignore[union-attr]


def test_a_mesh_of_two_axes_shards_over_the_second(pool: RankPool) -> None:
    mean, _ = expected_gradients(torch.float32, 4)
    for gradients in pool.run(hybrid).values():
        torch.testing.assert_close(gradients, mean)


def without_layers_on_rank_2(channel: Channel, mesh_shape: tuple[int, ...] | None) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = None if mesh_shape is None else init_device_mesh("cpu", mesh_shape)
    model = nn.Linear(2, 2) if channel.rank == 2 else Causal(torch.float32)
    try:
        fsdp2_wrap(model, mesh=mesh)
    finally:
        if any("FSDP" in type(module).__name__ for module in model.modules()):
            raise AssertionError("the model was changed")


@pytest.mark.parametrize("mesh_shape", [None, (2, 2)])
def test_a_model_without_layers_on_one_rank_is_an_error_on_all(
    pool: RankPool, mesh_shape: tuple[int, ...] | None
) -> None:
    errors = pool.run(without_layers_on_rank_2, mesh_shape).raised(RuntimeError, within_s=5)
    assert all("no layers in Linear" in str(error) for error in errors)
    assert all(isinstance(error, PeerError) for error in errors)


def unlike(channel: Channel, what: str) -> None:
    model = Causal(torch.float32)
    if what == "shapes" and channel.rank == 1:
        model.head = nn.Linear(6, 4, bias=False)
    fsdp2_wrap(model, shard_root=what != "roots" or channel.rank != 1)


@pytest.mark.parametrize(("what", "named"), [("shapes", "head.weight"), ("roots", "shard_root")])
def test_ranks_that_would_shard_different_things_are_told(
    pool: RankPool, what: str, named: str
) -> None:
    errors = pool.run(unlike, what).raised(DisagreementError, within_s=5)
    assert all(named in str(error) for error in errors)


def part_of_the_ranks(channel: Channel) -> list[int]:
    """Shard over ranks 2 and 3 only, which are no whole world and do not start at 0."""
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", [2, 3])
    if channel.rank < 2:
        return []
    model = Causal(torch.float32)
    fsdp2_wrap(model, mesh=mesh)
    step(model, channel.rank)
    weight: Any = model.embed.weight
    return list(weight.to_local().shape)


def test_a_mesh_may_hold_a_part_of_the_ranks(pool: RankPool) -> None:
    assert pool.run(part_of_the_ranks).values() == ([], [], [3, 6], [2, 6])


def plans(channel: Channel) -> list[str]:
    """What is known of models in a run of several ranks."""
    plain, recorded = nn.Linear(2, 2), nn.Linear(2, 2)
    plan = DistributionPlan(channel.size)
    set_distribution_plan(recorded, plan)
    wrapped = nn.parallel.DistributedDataParallel(recorded)
    said = [
        str(distribution_plan(recorded) is plan),
        str(distribution_plan(wrapped.module) is plan),
    ]
    for model in (plain, wrapped):
        try:
            said.append(str(distribution_plan(model)))
        except RuntimeError as error:
            said.append(str(error).split(";")[0])
    return said


def test_a_model_of_a_run_of_several_ranks_needs_a_record(pool: RankPool) -> None:
    assert (
        pool.run(plans).values()
        == (
            [
                "True",
                "True",
                "Linear records no plan in a run of several ranks",
                "DistributedDataParallel records no plan in a run of several ranks",
            ],
        )
        * 4
    )
