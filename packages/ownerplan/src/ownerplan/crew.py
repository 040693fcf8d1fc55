"""Crew: all parameters of an optimizer, those that step in teams and those that step alone."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any, TypeAlias

import torch

from distcore.v1 import PlanError, Problem
from distcore.v1.runtime import OpenChannel, channel_over, dtype_name, is_dtensor, layouts_of
from ownerplan.flat_buffer import FlatBuffer
from ownerplan.matrix_view import Matrix, View, matrices_of
from ownerplan.mesh_channel import mesh_ranks, open_mesh_channel
from ownerplan.rule import Rule
from ownerplan.step_report import StepReport
from ownerplan.team import LocalState, Member, Team, TeamOptions

Groups: TypeAlias = Sequence[Mapping[str, Any]]
State: TypeAlias = Mapping[torch.Tensor, Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """A parameter, and where it stands among those of the optimizer."""

    name: str
    param: torch.Tensor
    group: int
    view: View
    ns_steps: int
    flat: FlatBuffer | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Its matrices, in the coordinates of its layout; PlanError where the view does not fit."""
        if self.flat is not None:
            return self.flat.matrices(self.view)
        return matrices_of(tuple(self.param.shape), self.view)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that it lives on together, ascending; none where it steps alone."""
        if is_dtensor(self.param):
            return mesh_ranks(self.param.device_mesh)
        if self.flat is None:
            return ()
        return tuple(sorted(self.flat.segments(dtype_name(self.param.dtype)).ranks))

    def open_channel(self) -> OpenChannel:
        """Open the channel over its ranks."""
        if is_dtensor(self.param):
            return open_mesh_channel(self.param.device_mesh)
        return channel_over(None if self.flat is None else self.flat.group)


class Crew:
    """Steps all entries. Making a crew is collective over the ranks of each entry.

    Teams are made, and step, in the order in which their first parameters stand, which must be
    the same on all ranks.
    """

    def __init__(self, entries: Sequence[Entry], options: TeamOptions) -> None:
        by_ranks: dict[tuple[int, ...], list[Entry]] = {}
        for entry in entries:
            by_ranks.setdefault(entry.ranks, []).append(entry)
        self._alone = by_ranks.pop((), [])
        self._options = options
        self._teams = [(held, _team(held, options)) for held in by_ranks.values()]

    def step(self, groups: Groups, state: State, failure: BaseException | None) -> StepReport:
        """Step every parameter that has a gradient; `failure` tells peers that this rank cannot.

        A rank that fails in one team tells its next ones too, so that nobody waits for it.
        """
        started, report = monotonic(), StepReport()
        rules: list[Rule] = []
        try:
            if failure is None:
                self._check_gradients()
                rules = [Rule.of(group) for group in groups]
        except (RuntimeError, ValueError) as error:
            failure = error
        terms = hashlib.blake2b(repr(rules).encode(), digest_size=16).hexdigest()
        for entries, team in self._teams:
            present = [entry.param.grad is not None for entry in entries]
            states = _States(entries, rules, state)
            try:
                report += team.step(present, states.of, terms, failure)
            except Exception as error:  # noqa: BLE001 - told to the other teams and raised below
                failure = error
        if failure is not None:
            raise failure
        report += StepReport(
            matrices=sum(self._step_alone(entry, rules, state) for entry in self._alone)
        )
        return replace(report, seconds=monotonic() - started)

    def close(self) -> None:
        """Free what exchanges take. Local."""
        for _, team in self._teams:
            team.close()

    def _check_gradients(self) -> None:
        entries = [*self._alone, *(entry for held, _ in self._teams for entry in held)]
        for entry in entries:
            gradient = entry.param.grad
            if gradient is None:
                continue
            if torch.is_complex(entry.param):
                raise RuntimeError(f"OwnerMuon does not support complex parameters ({entry.name})")
            if gradient.is_sparse:
                raise RuntimeError(f"OwnerMuon does not support sparse gradients ({entry.name})")
            if self._options.missing_grads == "zero" and _is_misplaced(gradient, entry.param):
                # Only ranks that have it would meet to place it.
                text = "its gradient must be placed like it where missing ones count as zeros"
                raise PlanError(Problem(entry.name, "placements", text))

    def _step_alone(self, entry: Entry, rules: Sequence[Rule], state: State) -> int:
        """Step a parameter that this rank has whole; return how many matrices that were."""
        if entry.param.grad is None:
            return 0
        rule, param, gradient = rules[entry.group], entry.param.detach(), entry.param.grad.detach()
        momentum = state[entry.param]["momentum_buffer"]
        for matrix in entry.matrices:
            box = matrix.region.slices()
            update = rule.blend(momentum[box], gradient[box].to(momentum.dtype))
            whole = update.reshape(matrix.rows, matrix.cols)
            result = self._options.kernel(whole, rule.schedule, rule.eps)
            rule.descend(param[box], result.reshape(matrix.region.shape), matrix)
        return len(entry.matrices)


@dataclass(frozen=True, slots=True)
class _States:
    """The local tensors of a team's entries, made once it is known which of them step."""

    entries: Sequence[Entry]
    rules: Sequence[Rule]
    state: State

    def of(self, active: Sequence[bool]) -> list[LocalState]:
        """The state of each entry, in order; of one that does not step, without a gradient."""
        return [self._state(entry, on) for entry, on in zip(self.entries, active, strict=True)]

    def _state(self, entry: Entry, on: bool) -> LocalState:
        param, gradient = entry.param, entry.param.grad if on else None
        momentum = _local(self.state[param]["momentum_buffer"])
        if is_dtensor(gradient) and is_dtensor(param) and _is_misplaced(gradient, param):
            # Tensor parallelism leaves gradients of what it replicates yet to be summed.
            gradient = gradient.redistribute(param.device_mesh, param.placements)
        own = None if gradient is None else _local(gradient).to(momentum.dtype)
        if momentum.shape != _local(param).shape:
            text = f"the momentum has {tuple(momentum.shape)} where the parameter has "
            text += f"{tuple(_local(param).shape)}: load it sharded like the parameter"
            raise PlanError(Problem(entry.name, "shape", text))
        return LocalState(self.rules[entry.group], _local(param), momentum, own)


def _team(entries: Sequence[Entry], options: TeamOptions) -> Team:
    """The team of parameters that live on the same ranks. Collective over these."""
    opened = entries[0].open_channel()
    channel = opened.channel
    sharded = {str(at): e.param for at, e in enumerate(entries) if is_dtensor(e.param)}
    layouts = layouts_of(sharded, channel, timeout_s=options.exchange.timeout_s)
    members = []
    for at, entry in enumerate(entries):
        layout = layouts.get(str(at))
        if layout is None and entry.flat is not None:
            layout = entry.flat.segments(dtype_name(entry.param.dtype))
        if layout is not None:
            members.append(Member(entry.name, layout, entry.matrices, entry.ns_steps))
    return Team(members, opened, entries[0].param.device, options)


def _is_misplaced(gradient: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether a gradient lies on the ranks in another way than its parameter."""
    if not (is_dtensor(gradient) and is_dtensor(param)):
        return False
    return bool(gradient.placements != param.placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a tensor, sharing its memory."""
    return (tensor.to_local() if is_dtensor(tensor) else tensor).detach()
