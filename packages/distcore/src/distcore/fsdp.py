"""Shard a model with FSDP2: layer by layer, whatever the dtypes of its parameters."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import nn

from distcore.probes import is_initialized, is_master
from distcore.v1.errors import PlanError, Problem
from distcore.v1.runtime.agree import agree
from distcore.v1.runtime.group_channel import GroupChannel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

LAYER_PATHS: Final = (
    "model.language_model.layers",
    "model.layers",
    "language_model.layers",
    "layers",
)
"""Where the models of Hugging Face transformers keep their decoder layers."""

SHOWN_PARAMETERS: Final = 3

Layers = nn.Module | Iterable[nn.Module] | Callable[[nn.Module], Iterable[nn.Module]]
"""Layers, or the module that holds them (a ModuleList), or a function that finds them."""


def is_fsdp2_model(model: nn.Module) -> bool:
    """Return whether `model` or a submodule of it has been sharded with FSDP2's `fully_shard`."""
    return any(_is_sharded(module) for module in model.modules())


def fsdp2_wrap(
    model: nn.Module,
    shard_root: bool = True,
    mp_policy: MixedPrecisionPolicy | None = None,
    cpu_offload: bool = False,
    *,
    layers: Layers | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[nn.Module, ...]:
    """Shard `model` in place with FSDP2, each layer by itself, and return the layers.

    The layers are `layers`, or else the decoder layers of a causal language model as Hugging Face
    transformers lays it out. What lies outside of them is sharded with the root; with
    `shard_root=False` each rank keeps a whole copy of it. The layers and the root free their
    whole parameters after forward. `mesh` is the mesh to shard over, by default one of all ranks
    of the default group. With `cpu_offload` the shards rest in host memory.

    FSDP2 needs one dtype in each group of parameters. So parameters whose dtype is not the one
    that most elements of the model have stay plain, with a UserWarning on rank 0: each rank keeps
    a whole copy, on the mesh's device (meta tensors are left as they are), and averages no
    gradients for it. `config.architectures` is as before, also after an error.

    Collective over the mesh. Raises RuntimeError if no layers are found, if a module is sharded
    already, or if there is neither a mesh nor a default group; PlanError (a ValueError) if a layer
    is not a submodule of the model. Where only some ranks raise, all raise PeerError instead; where
    the ranks would shard different things, all raise DisagreementError. Nothing is changed then.
    """
    choices = {
        "shard_root": shard_root,
        "cpu_offload": cpu_offload,
        "mp_policy": repr(mp_policy),
    }
    if mesh is None and is_initialized():
        mesh = _default_mesh()
    found, plain, mesh = _agreed(model, layers, mesh, choices)
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
    if mp_policy is not None:
        options["mp_policy"] = mp_policy
    if cpu_offload:
        # Pinned memory is for copies to an accelerator, and cannot be had without one.
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
    if plain:
        options["ignored_params"] = plain
    with _architectures_kept(model):
        for layer in _inner_first(model, found):
            fully_shard(layer, **options)
        if shard_root:
            fully_shard(model, **options)
    device = _device_of(mesh)
    for parameter in plain:
        if not parameter.is_meta and parameter.device != device:
            # The parameter stays the same object: optimizers and ties may hold it already.
            parameter.data = parameter.data.to(device)
    return found


def off_dtype_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters whose dtype is not the one that most elements of `model` have.

    Of two dtypes with equally many elements the first one counts. If there are such parameters,
    rank 0 warns with a UserWarning that names some of them.
    """
    elements: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    if len(elements) < 2:
        return set()
    dominant = max(elements, key=lambda dtype: elements[dtype])
    plain = {name: item for name, item in model.named_parameters() if item.dtype != dominant}
    if is_master():
        share = 1 - elements[dominant] / sum(elements.values())
        names = ", ".join(list(plain)[:SHOWN_PARAMETERS])
        warnings.warn(
            f"{type(model).__name__} has mixed parameter dtypes: {len(plain)} parameters "
            f"({share:.2%} of the elements) are not {dominant}. They stay whole on every rank, "
            f"and their gradients are not averaged over the ranks: {names}"
            + (", ..." if len(plain) > SHOWN_PARAMETERS else ""),
            UserWarning,
            stacklevel=4,
        )
    return set(plain.values())


def _agreed(
    model: nn.Module, layers: Layers | None, mesh: DeviceMesh | None, choices: dict[str, object]
) -> tuple[tuple[nn.Module, ...], set[nn.Parameter], DeviceMesh]:
    """The layers and the parameters that stay plain, once all ranks of the mesh have the same."""
    found: tuple[nn.Module, ...] = ()
    plain: set[nn.Parameter] = set()
    value: object
    try:
        found = _found_layers(model, layers)
        _check_unsharded([*found, model])
        if mesh is None:
            raise RuntimeError(
                "FSDP2 shards over a process group, and none is initialized: make one, of one rank "
                "if this is a single process, or give mesh="
            )
        plain = off_dtype_parameters(model)
        value = _described(model, found, plain) | choices
    except Exception as error:
        if mesh is None:
            raise
        value = error
    _agree_over(mesh, value)
    return found, plain, mesh


def _found_layers(model: nn.Module, layers: Layers | None) -> tuple[nn.Module, ...]:
    """The layers that were given, or else detected; each checked to be a part of `model`."""
    if layers is None:
        found = next(filter(None, (_children_at(model, path) for path in LAYER_PATHS)), ())
    elif isinstance(layers, nn.Module):
        # A ModuleList is callable too, but never meant to be called.
        found = tuple(layers.children())
    else:
        found = tuple(layers(model) if callable(layers) else layers)
    if not found:
        sought = ", ".join(LAYER_PATHS) if layers is None else "what layers= names"
        raise RuntimeError(
            f"no layers in {type(model).__name__} at {sought}; give the modules to shard as layers="
        )
    parts = {id(module) for module in model.modules()} - {id(model)}
    problems = [
        Problem(f"layers[{number}]", "kind", f"{type(layer).__name__} is no submodule of the model")
        for number, layer in enumerate(found)
        if id(layer) not in parts
    ]
    if len({id(layer) for layer in found}) < len(found):
        problems.append(Problem("layers", "repeated", "a layer is named more than once"))
    if problems:
        raise PlanError(problems)
    return found


def _children_at(model: nn.Module, path: str) -> tuple[nn.Module, ...]:
    holder: Any = model
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return tuple(holder) if isinstance(holder, nn.ModuleList) else ()


def _is_sharded(module: nn.Module) -> bool:
    # Importing torch.distributed.fsdp takes seconds, and where nobody has, nothing is sharded.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def _check_unsharded(modules: Iterable[nn.Module]) -> None:
    sharded = [type(module).__name__ for module in modules if _is_sharded(module)]
    if sharded:
        raise RuntimeError(f"sharded with FSDP2 already: {', '.join(sharded[:3])}")


def _described(
    model: nn.Module, layers: tuple[nn.Module, ...], plain: set[nn.Parameter]
) -> dict[str, object]:
    """What must be alike on all ranks, for each would wait for the others' collectives."""
    names = {id(module): name for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    return {
        "layers": [names[id(layer)] for layer in layers],
        "parameters": {name: f"{p.dtype} {list(p.shape)}" for name, p in parameters.items()},
        "plain": [name for name, parameter in parameters.items() if parameter in plain],
    }


def _agree_over(mesh: DeviceMesh, value: object) -> None:
    """Agree along each axis of the mesh in turn; an error travels on along the next axes."""
    for group in mesh.get_all_groups():
        try:
            agree("fsdp2_wrap", value, GroupChannel(group))
        except Exception as error:  # noqa: BLE001 - raised below, once all ranks know of it
            value = error
    if isinstance(value, Exception):
        raise value


def _inner_first(model: nn.Module, layers: tuple[nn.Module, ...]) -> list[nn.Module]:
    """The layers, those inside other layers first: an outer one takes what is not taken yet."""
    depths = {id(module): name.count(".") for name, module in model.named_modules()}
    return sorted(layers, key=lambda layer: -depths[id(layer)])


def _default_mesh() -> DeviceMesh:
    """A mesh of all ranks, on the accelerator if the default group has a backend made for it."""
    from torch.distributed.device_mesh import init_device_mesh

    accelerator = torch.accelerator.current_accelerator()
    kind = "cpu"
    if accelerator is not None:
        backends = dict(entry.split(":") for entry in dist.get_backend_config().split(","))
        # gloo takes tensors of an accelerator too, but runs on the host.
        if backends.get(accelerator.type, "gloo") != "gloo":
            kind = accelerator.type
    return init_device_mesh(kind, (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@contextmanager
def _architectures_kept(model: nn.Module) -> Iterator[None]:
    """Restore `config.architectures`: some model code rewrites it when a class is swapped."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "architectures", None)
    names = list(before) if before else None
    try:
        yield
    finally:
        if names is not None:
            config.architectures = names
