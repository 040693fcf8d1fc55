"""A loop of forward passes over a distributed model, for callers that hand in a module of theirs.

Calibration code calls a `forward_loop` with some inner module. In a distributed model only the
forward of the whole model runs all collectives, so the loop runs that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch import nn

from distcore.model import distribution_plan
from distcore.v1.errors import PlanError, Problem

ABSENT: Final = object()


class ExpertMesh(Protocol):
    """The part of a DeviceMesh that is looked at here."""

    def size(self) -> int:
        """Return the number of ranks."""


def distributed_forward_loop(
    model: nn.Module,
    dataloader: Iterable[Any],
    device: torch.device | str | None = None,
    ep_mesh: ExpertMesh | None = None,
) -> Callable[[object], None]:
    """Return a function that runs `model` on each batch of `dataloader` and ignores its argument.

    It calls the module itself, hooks included, without gradients: with keywords for a mapping,
    with positional arguments for a tuple or list, with one argument for anything else. Tensors
    are moved to `device` first, if one is given, however deep they lie in the batch. While it
    runs, `use_cache` is False in `model.config` and its `text_config`, where there are such; after
    it, also after an exception, the configuration is as before.

    `ep_mesh` is the mesh over which the experts are sharded: PlanError (a ValueError) unless it is
    given exactly for a model whose `distribution_plan` is expert-parallel, and has `ep_size`
    ranks. Forwards that the experts carry as attributes of their own when this is called, and that
    code which rebuilds modules has dropped by the time the loop runs, are put back before the
    first batch; a forward that was replaced is left alone.

    Every rank runs the loop together, over equally many batches.
    """
    _check_mesh(model, ep_mesh)
    forwards = _own_forwards(model) if ep_mesh is not None else []

    def loop(_inner: object = None) -> None:
        for module, forward in forwards:
            vars(module).setdefault("forward", forward)
        with caching_disabled(model), torch.no_grad():
            for batch in dataloader:
                _call(model, batch if device is None else moved(batch, device))

    return loop


@contextmanager
def caching_disabled(model: nn.Module) -> Iterator[None]:
    """Set `use_cache` to False in the configurations of `model`; on leaving, as it was before."""
    before = [(config, getattr(config, "use_cache", ABSENT)) for config in _configs(model)]
    try:
        for config, _ in before:
            config.use_cache = False
        yield
    finally:
        for config, value in before:
            if value is not ABSENT:
                config.use_cache = value
            elif hasattr(config, "use_cache"):
                del config.use_cache


def moved(value: Any, device: torch.device | str) -> Any:
    """Return `value` with every tensor in it on `device`; containers are new, `value` is kept."""
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if callable(getattr(value, "to", None)):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(moved(item, device) for item in value)
    return value


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list) and not hasattr(batch, "to"):
        model(*batch)
    else:
        model(batch)


def _configs(model: nn.Module) -> list[Any]:
    """The configurations that say whether `model` caches, each object once."""
    config = getattr(model, "config", None)
    found = [config, getattr(config, "text_config", None)]
    return list({id(item): item for item in found if item is not None}.values())


def _own_forwards(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The submodules whose forward is an attribute of their own, and that forward."""
    modules = [module for module in model.modules() if "forward" in vars(module)]
    return [(module, vars(module)["forward"]) for module in modules]


def _check_mesh(model: nn.Module, ep_mesh: ExpertMesh | None) -> None:
    plan = distribution_plan(model)
    size = getattr(ep_mesh, "size", None)
    ranks = size() if callable(size) else plan.ep_size
    text = ""
    if plan.is_expert_parallel and ep_mesh is None:
        text = f"the experts are sharded over {plan.ep_size} ranks: give the mesh of these ranks"
    elif ep_mesh is not None and not plan.is_expert_parallel:
        text = f"a mesh was given, but {plan} shards no experts"
    elif ranks != plan.ep_size:
        text = f"the mesh has {ranks} ranks, but the experts are sharded over {plan.ep_size}"
    if text:
        raise PlanError(Problem("ep_mesh", "choice", text))
