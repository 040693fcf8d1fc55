"""OwnerMuon: Muon for sharded parameters, each matrix orthogonalized once, by its owner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, overload

import torch
from torch.optim.optimizer import Optimizer, ParamsT

from distcore.v1 import PlanError, Problem
from ownerplan.active_set import MISSING_GRADS, MissingGrads
from ownerplan.crew import Crew, Entry
from ownerplan.exchange import ExchangeOptions
from ownerplan.flat_buffer import FlatBuffer
from ownerplan.lr_adjustment import ADJUSTMENTS
from ownerplan.matrix_view import View, matrices_of
from ownerplan.newton_schulz import QUINTIC, Coefficients, Kernel, newton_schulz, schedule_of
from ownerplan.step_report import StepReport
from ownerplan.team import TeamOptions

DEFAULT_BUCKET_BYTES = 64 << 20


class OwnerMuon(Optimizer):
    """Muon (Jordan et al., 2024) of which every matrix has one owner among the ranks.

    Drop-in for `torch.optim.Muon`: the first nine arguments, their defaults and their ValueErrors
    are its own, and a step gives the same parameters, to the last bit, as that optimizer does in
    one process (those of half precision differ from it by a rounding, and are still the same on
    any number of ranks). Parameters may be plain tensors, which step locally, DTensors of any mesh
    and placement (FSDP2, HSDP, tensor parallelism; uneven, empty and strided shards), or segments
    of flat buffers (`flat` in their group, a `FlatBuffer`; only then may they have one dim). They
    and their state are written in place. The momentum is sharded as its parameter is, and there
    from the start, so that all ranks have the same keys to save.

    Further options:

    - `ns_coefficients` may also be a list of triples, one per step, `"quintic"`, or
      `"polar_express"`; `adjust_lr_fn` may also be `"none"`.
    - `matrix_view` (per group): what counts as one matrix; see `matrices_of`. It is decided on
      the global shape.
    - `missing_grads`: what to do with a parameter that has a gradient on some ranks only; see
      `choose_active`. Without a gradient on any rank it is left alone: no update and no decay.
    - `bucket_bytes`, `slots`: matrices move in buckets of at most so many bytes on any rank (a
      larger matrix alone), and so many buckets are under way at once. The result does not depend
      on them.
    - `kernel`: computes the orthogonal matrix, `newton_schulz` by default. To compile it, give
      `torch.compile(newton_schulz)`; its results are then the compiler's.
    - `timeout_s`: how long any exchange may take; by default, what the process group allows.

    Making an OwnerMuon, `step`, and `add_param_group` are collective: all ranks of the meshes
    call them, with parameters in one order. Nothing is asked of the user but the parameters: the
    channels follow from their meshes. Where one rank fails, all raise (PeerError, or
    DisagreementError where hyperparameters differ), and the step is then incomplete. One thread
    beside the caller drives exchanges of CPU tensors while the caller computes; `close` ends it.
    """

    last_report: StepReport | None
    """What the last step did on this rank; None before the first."""

    def __init__(  # noqa: PLR0913, PLR0917 - the arguments of torch.optim.Muon, in its order
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: Coefficients = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        matrix_view: View = "flatten",
        missing_grads: MissingGrads = "skip",
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        slots: int = 2,
        kernel: Kernel = newton_schulz,
        timeout_s: float | None = None,
    ) -> None:
        exchange = ExchangeOptions(bucket_bytes, slots, timeout_s)
        self._options = TeamOptions(missing_grads, kernel, exchange)
        self._crew: Crew | None = None
        self._flats: dict[torch.Tensor, FlatBuffer] = {}
        self._assembled = False
        self.last_report = None
        _check_options(self._options)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "matrix_view": matrix_view,
        }
        _check_group(defaults)
        super().__init__(params, defaults)
        self._assemble()

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step every parameter that has a gradient; return what `closure` returned. Collective."""
        loss: float | None = None
        failure: BaseException | None = None
        if closure is not None:
            try:
                with torch.enable_grad():
                    loss = closure()
            except BaseException as error:  # noqa: BLE001 - told to the peers and raised again
                failure = error
        crew = self._crew or self._assemble()
        self.last_report = crew.step(self.param_groups, self.state, failure)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Collective, as owners are planned anew."""
        flat = param_group.pop("flat", None)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
            for param in group["params"]:
                if flat is not None:
                    self._flats[param] = flat
                _check_param(param, group["matrix_view"], flat)
        except ValueError:
            self.param_groups.pop()
            raise
        self._fill_state(group)
        if self._assembled:
            self._assemble()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, here or from `torch.optim.Muon`. Local.

        Momentum that it lacks starts at zero. What counts as a matrix stays as it is here.
        """
        views = [group["matrix_view"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, view in zip(self.param_groups, views, strict=True):
            group["matrix_view"] = view
            _check_group(group)
            self._fill_state(group)

    def close(self) -> None:
        """Free the memory and the thread of exchanges. Local; the next step makes them anew."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but groups, memory and threads, which are made anew."""
        return {
            **super().__getstate__(),
            "_options": self._options,
            "_flats": self._flats,
            "last_report": self.last_report,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a copy's state, or the part of it that `load_state_dict` gives."""
        super().__setstate__(state)
        if "_options" in state:
            self._crew = None
            self._assembled = True
        for group in self.param_groups:
            group.setdefault("matrix_view", self.defaults["matrix_view"])

    def _assemble(self) -> Crew:
        """Plan owners and prepare exchanges. Collective."""
        self.close()
        entries = [
            Entry(
                _name_of(group, number, place),
                param,
                number,
                group["matrix_view"],
                group["ns_steps"],
                flat=self._flats.get(param),
            )
            for number, group in enumerate(self.param_groups)
            for place, param in enumerate(group["params"])
        ]
        self._crew = Crew(entries, self._options)
        self._assembled = True
        return self._crew

    def _fill_state(self, group: dict[str, Any]) -> None:
        """Give every parameter its momentum, so that all ranks have the same keys."""
        for param in group["params"]:
            state = self.state[param]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(param.detach())


def _check_options(options: TeamOptions) -> None:
    problems = []
    if options.missing_grads not in MISSING_GRADS:
        text = f"expected one of {MISSING_GRADS}, got {options.missing_grads!r}"
        problems.append(Problem("missing_grads", "value", text))
    for name in ("bucket_bytes", "slots"):
        value = getattr(options.exchange, name)
        if value < 1:
            problems.append(Problem(name, "range", f"expected at least 1, got {value}"))
    if problems:
        raise PlanError(problems)


def _check_group(group: dict[str, Any]) -> None:
    """Raise the ValueErrors of torch.optim.Muon, and those for what is ours."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    named = (
        ("Learning rate", lr),
        ("momentum", group["momentum"]),
        ("weight decay", group["weight_decay"]),
    )
    for name, value in named:
        if not value >= 0.0:
            raise ValueError(f"{name} should be >= 0 but is: {value}")
    adjustment = group["adjust_lr_fn"]
    if adjustment not in ADJUSTMENTS:
        raise ValueError(f"Adjust learning rate function {adjustment} is not supported")
    schedule_of(group["ns_coefficients"], group["ns_steps"])


def _check_param(param: torch.Tensor, view: View, flat: FlatBuffer | None) -> None:
    """Raise ValueError where a parameter cannot be seen as matrices."""
    if flat is not None:
        if param.ndim != 1:
            text = f"expected a segment of one dim, got one of shape {tuple(param.shape)}"
            raise PlanError(Problem("flat", "shape", text))
        flat.matrices(view)
    elif param.ndim < 2:
        raise ValueError(
            f"OwnerMuon only supports parameters of two dims and more, got one of size: "
            f"{tuple(param.size())}. Other parameters belong to another optimizer; a segment of a "
            f"flat buffer needs to be described by a FlatBuffer"
        )
    else:
        matrices_of(tuple(param.shape), view)


def _name_of(group: dict[str, Any], number: int, place: int) -> str:
    names = group.get("param_names")
    return str(names[place]) if names else f"parameter {place} of group {number}"
