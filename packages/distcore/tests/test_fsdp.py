"""fsdp2_wrap on one rank: which layers, which parameters stay plain, what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

from distcore import fsdp
from distcore.fsdp import fsdp2_wrap, is_fsdp2_model, off_dtype_parameters
from distcore.model import DistributionPlan, distribution_plan, set_distribution_plan
from distcore.v1.errors import PlanError


class Decoder(nn.Module):
    """A stack of layers, found as `.layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Causal(nn.Module):
    """A decoder at some path below the model, and a head beside it."""

    def __init__(self, path: str = "model") -> None:
        super().__init__()
        self.decoder = [Decoder()]
        holder: nn.Module = self
        *outer, last = path.split(".")
        for name in outer:
            inner = nn.Module()
            holder.add_module(name, inner)
            holder = inner
        holder.add_module(last, self.decoder[0])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decoder[0](x))  # type: ignore[no-any-return]


class Sized(nn.Module):
    """Parameters of given sizes and dtypes, named p0, p1, ..."""

    def __init__(self, *parameters: tuple[int, torch.dtype]) -> None:
        super().__init__()
        for number, (elements, dtype) in enumerate(parameters):
            self.register_parameter(
                f"p{number}", nn.Parameter(torch.zeros(elements, dtype=dtype), requires_grad=False)
            )


class Gated(nn.Module):
    """A bf16 projection with an fp32 gate."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        self.gate = nn.Linear(4, 1, bias=False, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.gate(x.float()).sigmoid()
        return self.proj(x) * weight.to(x.dtype)  # type: ignore[no-any-return]


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A default group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded(model: nn.Module) -> list[str]:
    """The names of the parameters that are sharded."""
    from torch.distributed.tensor import DTensor

    return [name for name, item in model.named_parameters() if isinstance(item, DTensor)]


# --- Which parameters stay plain -----------------------------------------------------------------


def test_one_dtype_leaves_no_parameter_out() -> None:
    assert off_dtype_parameters(Sized((8, torch.bfloat16), (4, torch.bfloat16))) == set()
    assert off_dtype_parameters(nn.Module()) == set()


@pytest.mark.parametrize(
    ("parameters", "plain"),
    [
        ([(100, torch.bfloat16), (5, torch.float32)], ["p1"]),
        # By elements, not by parameters.
        ([(100, torch.bfloat16), *[(5, torch.float32)] * 3], ["p1", "p2", "p3"]),
        ([(5, torch.bfloat16), (5, torch.bfloat16), (100, torch.float32)], ["p0", "p1"]),
        # The first of two that are equal.
        ([(4, torch.float32), (4, torch.bfloat16)], ["p1"]),
        ([(9, torch.uint8), (4, torch.bfloat16), (4, torch.float32)], ["p1", "p2"]),
    ],
)
def test_parameters_of_another_dtype_than_most_elements_are_left_out(
    parameters: list[tuple[int, torch.dtype]], plain: list[str]
) -> None:
    model = Sized(*parameters)
    with pytest.warns(UserWarning, match="mixed parameter dtypes"):
        found = off_dtype_parameters(model)
    assert found == {model.get_parameter(name) for name in plain}


def test_the_warning_says_how_much_and_which() -> None:
    with pytest.warns(UserWarning, match=r"Sized .* 4 parameters \(16.67% .*: p1, p2, p3, \.\.\."):
        off_dtype_parameters(Sized((100, torch.bfloat16), *[(5, torch.float32)] * 4))


# --- Which layers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["model", "model.language_model", "language_model"], ids=lambda path: path
)
def test_the_layers_of_a_causal_language_model_are_found(one_rank: None, path: str) -> None:
    model = Causal(path)
    layers = fsdp2_wrap(model)
    assert layers == tuple(model.decoder[0].layers)
    assert [is_fsdp2_model(module) for module in (*layers, model)] == [True] * 3
    assert len(sharded(model)) == len(list(model.parameters()))


def test_layers_at_the_top_are_found_and_the_root_may_stay_plain(one_rank: None) -> None:
    model = Causal("model")
    fsdp2_wrap(model, shard_root=False)
    assert sharded(model) == [
        "model.layers.0.weight",
        "model.layers.0.bias",
        "model.layers.1.weight",
        "model.layers.1.bias",
    ]
    bare = Decoder()
    assert fsdp2_wrap(bare) == tuple(bare.layers)


def test_layers_may_be_given_for_any_model(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]))
    assert fsdp2_wrap(model, shard_root=False, layers=[model[1]]) == (model[1],)
    assert sharded(model) == ["1.weight", "1.bias"]


def test_layers_may_be_a_module_list_or_a_function(one_rank: None) -> None:
    first = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(4, 4)]))
    holder = first[1]
    assert fsdp2_wrap(first, layers=holder) == tuple(holder.children())
    second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    linear = (module for module in second if isinstance(module, nn.Linear))
    assert fsdp2_wrap(second, layers=lambda model: linear) == (second[0],)


def test_a_layer_inside_a_layer_is_a_group_of_its_own(one_rank: None) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    outer, inner = model[0], model[0][0]  # type: ignore[index]
    assert fsdp2_wrap(model, layers=[outer, inner]) == (outer, inner)
    assert is_fsdp2_model(inner)
    assert model(torch.zeros(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Sized(), nn.Sequential(nn.Linear(2, 2))])
def test_a_model_without_layers_is_an_error(one_rank: None, model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match=r"no layers in .* give the modules to shard as layers="):
        fsdp2_wrap(model)
    assert not is_fsdp2_model(model)


def test_an_empty_list_of_layers_is_an_error(one_rank: None) -> None:
    with pytest.raises(RuntimeError, match="no layers in Causal at what layers= names"):
        fsdp2_wrap(Causal(), layers=[])


def test_a_layer_must_be_a_part_of_the_model(one_rank: None) -> None:
    model = Causal()
    layer = model.head
    wrong: list[Any] = [nn.Linear(2, 2), model, layer, layer]
    with pytest.raises(PlanError) as caught:
        fsdp2_wrap(model, layers=wrong)
    assert [problem.where for problem in caught.value.problems] == [
        "layers[0]",
        "layers[1]",
        "layers",
    ]
    assert not is_fsdp2_model(model)


def test_a_model_is_sharded_once(one_rank: None) -> None:
    model = Causal()
    fsdp2_wrap(model, shard_root=False)
    with pytest.raises(RuntimeError, match="sharded with FSDP2 already: FSDPLinear, FSDPLinear"):
        fsdp2_wrap(model)
    assert sharded(model)[-1] == "model.layers.1.bias"


def test_a_group_is_needed() -> None:
    with pytest.raises(RuntimeError, match="none is initialized"):
        fsdp2_wrap(Causal())
    with pytest.raises(RuntimeError, match="no layers"):
        fsdp2_wrap(nn.Linear(2, 2))


# --- How -----------------------------------------------------------------------------------------


def test_nvbug_6567139_one_fp32_gate_in_a_bf16_layer(one_rank: None) -> None:
    """FSDP2 by itself refuses the layer at the first forward."""
    model = Decoder()
    model.layers = nn.ModuleList([Gated(), Gated()])
    with pytest.warns(UserWarning, match="mixed parameter dtypes"):
        fsdp2_wrap(model)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert sharded(model) == ["layers.0.proj.weight", "layers.1.proj.weight"]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype is parameter.dtype


@pytest.mark.gpu
def test_nvbug_6567139_the_gate_is_moved_to_where_the_shards_are() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    try:
        model: Any = Decoder()
        model.layers = nn.ModuleList([Gated(), Gated()])
        gate = model.layers[0].gate.weight
        with pytest.warns(UserWarning, match="mixed parameter dtypes"):
            fsdp2_wrap(model)
        assert model.layers[0].gate.weight is gate
        device = torch.device("cuda", torch.cuda.current_device())
        assert {parameter.device for parameter in model.parameters()} == {device}
        out = model(torch.ones(1, 4, dtype=torch.bfloat16, device=device))
        out.sum().backward()
        assert out.isfinite().all()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("accelerator", "backends", "kind"),
    [
        (None, "cpu:gloo,cuda:gloo", "cpu"),
        ("cuda", "cpu:gloo,cuda:nccl", "cuda"),
        ("cuda", "cpu:gloo,cuda:gloo", "cpu"),
        ("xpu", "cpu:gloo,cuda:gloo", "cpu"),
    ],
)
def test_the_default_mesh_lies_where_the_default_group_has_a_backend_made_for_it(
    one_rank: None,
    monkeypatch: pytest.MonkeyPatch,
    accelerator: str | None,
    backends: str,
    kind: str,
) -> None:
    made: list[tuple[str, tuple[int, ...]]] = []
    here = None if accelerator is None else torch.device(accelerator)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(
        "torch.distributed.device_mesh.init_device_mesh", lambda *args: made.append(args)
    )
    fsdp._default_mesh()
    assert made == [(kind, (1,))]


def test_parameters_that_stay_plain_go_to_the_current_device_of_the_mesh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    mesh: Any = SimpleNamespace(device_type="cuda")
    assert fsdp._device_of(mesh) == torch.device("cuda", 3)


def test_meta_parameters_that_stay_plain_stay_on_meta(one_rank: None) -> None:
    with torch.device("meta"):
        model = Decoder()
        model.layers[0].scale = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with pytest.warns(UserWarning, match="mixed"):
        fsdp2_wrap(model)
    assert model.layers[0].scale.is_meta


def test_the_policies_and_the_mesh_are_handed_on(one_rank: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = Causal()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shards",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
    layers = fsdp2_wrap(model, True, policy, True, mesh=mesh)
    assert model(torch.zeros(1, 4)).dtype is torch.bfloat16
    weight: Any = layers[0].weight
    assert weight.device_mesh == mesh
    for module in (*layers, model):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        (group,) = state._fsdp_param_groups
        assert type(group.offload_policy).__name__ == "CPUOffloadPolicy"
        assert group.mp_policy == policy
        assert group._reshard_after_forward


@pytest.mark.parametrize("architectures", [["Causal"], None])
def test_the_architectures_of_the_configuration_are_as_before(
    one_rank: None, monkeypatch: pytest.MonkeyPatch, architectures: list[str] | None
) -> None:
    import torch.distributed.fsdp as origin

    model: Any = Causal()
    model.config = SimpleNamespace(architectures=architectures)
    plain = origin.fully_shard

    def rewriting(module: nn.Module, **options: Any) -> object:
        if architectures:
            architectures[:] = ["FSDPCausal"]
        return plain(module, **options)

    monkeypatch.setattr(origin, "fully_shard", rewriting)
    expected = architectures and list(architectures)
    fsdp2_wrap(model)
    assert model.config.architectures == expected


# --- What is told of a model ---------------------------------------------------------------------


def test_fsdp_is_not_imported_where_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.fsdp", raising=False)
    assert not is_fsdp2_model(nn.Linear(2, 2))
    assert "torch.distributed.fsdp" not in sys.modules


def test_a_sharded_model_without_a_record_has_no_plan(one_rank: None) -> None:
    model = Causal()
    assert not is_fsdp2_model(model)
    assert distribution_plan(model) == DistributionPlan()
    fsdp2_wrap(model, shard_root=False)
    with pytest.raises(RuntimeError, match="Causal is sharded with FSDP2 and records no plan"):
        distribution_plan(model)
    assert distribution_plan(model.head) == DistributionPlan()


def test_a_record_outlives_the_sharding(one_rank: None) -> None:
    model = Causal()
    plan = DistributionPlan(dense="fsdp")
    set_distribution_plan(model, plan)
    fsdp2_wrap(model)
    assert all(distribution_plan(module) is plan for module in model.modules())
