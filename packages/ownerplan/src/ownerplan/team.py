"""Team: the parameters that live on one set of ranks, and how these ranks step them together.

A step has these phases, in this order:

1. *Agree* which parameters have gradients, in one small exchange.
2. For each bucket of matrices: *blend* the gradients into the momentum, on shards; *gather* what
   results at the owners; *orthogonalize* it there; *scatter* the results; *descend*, on shards.

While one bucket computes, the next ones are gathered, as many as there are slots. Every rank asks
for the same exchanges in the same order, whatever fails on it: a failure travels with the next
exchange of its bucket and is raised by all.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from distcore.v1 import Channel, Layout
from distcore.v1.runtime import ExecuteReport, OpenChannel, agree
from ownerplan.active_set import Holding, MissingGrads, choose_active, exchange_presence
from ownerplan.buckets import Load, form_buckets
from ownerplan.cost import flop_cost_fn
from ownerplan.exchange import Bucket, Exchange, ExchangeOptions, Task, slot_nbytes
from ownerplan.matrix_view import Matrix
from ownerplan.newton_schulz import Kernel
from ownerplan.plan import plan_owners
from ownerplan.routes import Holders, Route, holders_of, local_box
from ownerplan.rule import Rule
from ownerplan.step_report import StepReport
from ownerplan.work import Work


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of a team: its layout, its matrices, and how often they are iterated."""

    name: str
    layout: Layout
    matrices: tuple[Matrix, ...]
    ns_steps: int


@dataclass(frozen=True, slots=True)
class LocalState:
    """What this rank holds of a parameter at one step: local tensors that share its memory.

    `gradient` is None where there is none.
    """

    rule: Rule
    param: torch.Tensor
    momentum: torch.Tensor
    gradient: torch.Tensor | None


Way: TypeAlias = Callable[[BaseException | None, float | None], ExecuteReport]

States: TypeAlias = Callable[[Sequence[bool]], Sequence[LocalState]]
"""From the active set to the state of each member; those of inactive ones are not looked at."""


@dataclass(frozen=True, slots=True)
class TeamOptions:
    """How a team steps; the same on all its ranks."""

    missing_grads: MissingGrads
    kernel: Kernel
    exchange: ExchangeOptions


class Team:
    """Steps its members. Making a team is collective over its channel, and so is every step."""

    def __init__(
        self,
        members: Sequence[Member],
        opened: OpenChannel,
        device: torch.device,
        options: TeamOptions,
    ) -> None:
        self._opened = opened  # kept, as what it opened is freed with it
        self._channel = _fast(opened.channel, options.exchange.timeout_s)
        self._options = options
        self._timeout_s = options.exchange.timeout_s
        buckets = plan_buckets(members, self._channel, options.exchange.bucket_bytes)
        self._holdings = _holdings(members, buckets, self._channel)
        self._agree_on(buckets)
        self.exchange = Exchange(buckets, self._channel, device, options.exchange)
        # On other devices the order of streams would be lost between threads.
        overlaps = device.type == "cpu" and options.exchange.slots > 1 and self._channel.size > 1
        self._threads = ThreadPoolExecutor(1, "owner-exchange") if overlaps else None

    def step(
        self,
        present: Sequence[bool],
        states: States,
        terms: str,
        failure: BaseException | None = None,
    ) -> StepReport:
        """Step every member that all ranks find active. Collective.

        `present` says of each member whether this rank has a gradient; `terms` must be equal on
        all ranks. `failure` tells the peers that this rank cannot step. Raises on every rank
        where it does on one; then some parameters may have stepped and others not.
        """
        presence = exchange_presence(
            present, terms, failure, self._channel, timeout_s=self._timeout_s
        )
        active = choose_active(presence, self._holdings, self._options.missing_grads)
        report = StepReport(collectives=1, held_nbytes=self.exchange.slots_nbytes)
        buckets = [
            bucket
            for bucket in self.exchange.buckets
            if any(active[task.member] for task in bucket.tasks)
        ]
        if not buckets:
            return report
        passage = _Passage(self._options.kernel, active, self._run, self._timeout_s)
        passage.read(states)
        passage.play(buckets)
        return report + passage.report

    def close(self) -> None:
        """Free the memory and the thread that exchanges take. Local."""
        if self._threads is not None:
            self._threads.shutdown()
        self.exchange.close()
        self._opened.close()

    def _run(self, act: Callable[[], ExecuteReport]) -> Future[ExecuteReport]:
        """Run exchanges one after the other, beside the caller where there is a thread for it."""
        if self._threads is not None:
            return self._threads.submit(act)
        done: Future[ExecuteReport] = Future()
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done

    def _agree_on(self, buckets: Sequence[Sequence[Task]]) -> None:
        """Prove that all ranks have the same owners, buckets and options."""
        text = repr(
            [[(t.key, t.matrix, t.route.holders, t.route.owner) for t in one] for one in buckets]
        )
        options = self._options
        value = {
            "buckets": hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            "bucket_bytes": options.exchange.bucket_bytes,
            "slots": options.exchange.slots,
            "missing_grads": options.missing_grads,
            "parameters": [f"{held.name} {sorted(held.indices)}" for held in self._holdings],
        }
        agree("the plan of OwnerMuon", value, self._channel, timeout_s=self._timeout_s)


def plan_buckets(
    members: Sequence[Member], channel: Channel, max_nbytes: int
) -> list[tuple[Task, ...]]:
    """The matrices of all members with their owners, in buckets. The same on every rank."""
    found = [
        (at, number, matrix, holders_of(member.name, member.layout, matrix.region))
        for at, member in enumerate(members)
        for number, matrix in enumerate(member.matrices)
    ]
    works = [_work(members[at], matrix, held, channel) for at, _, matrix, held in found]
    owners = plan_owners([works], channel.size).owners[0] if works else ()
    loads = []
    for (at, number, matrix, held), work, owner in zip(found, works, owners, strict=True):
        route = Route(f"{at}.{number}", matrix.region, held, channel.ranks[owner])
        local = local_box(members[at].layout, matrix.region, channel.rank)
        task = Task(at, matrix, route, local)
        concerned = {route.owner, *(channel.ranks[index] for index in work.holders)}
        nbytes = {rank: slot_nbytes(task, rank) for rank in sorted(concerned)}
        loads.append(Load(task, route.owner, work.cost or 0.0, nbytes))
    return [tuple(load.key for load in bucket) for bucket in form_buckets(loads, max_nbytes)]


def _work(member: Member, matrix: Matrix, holders: Holders, channel: Channel) -> Work:
    """The matrix as planning sees it, ranks by position."""
    position = {rank: index for index, rank in enumerate(channel.ranks)}
    held: dict[int, int] = {}
    for region, ranks in holders.items():
        for rank in ranks:
            held[position[rank]] = held.get(position[rank], 0) + region.numel
    shape = (matrix.rows, matrix.cols)
    cost = flop_cost_fn(max(1, member.ns_steps))(shape)
    return Work(shape, tuple(sorted(held.items())), cost=cost)


def _holdings(
    members: Sequence[Member], buckets: Sequence[Sequence[Task]], channel: Channel
) -> list[Holding]:
    """Who holds elements of each parameter that take part."""
    position = {rank: index for index, rank in enumerate(channel.ranks)}
    indices: list[set[int]] = [set() for _ in members]
    for bucket in buckets:
        for task in bucket:
            for ranks in task.route.holders.values():
                indices[task.member].update(position[rank] for rank in ranks)
    return [
        Holding(member.name, frozenset(held)) for member, held in zip(members, indices, strict=True)
    ]


def _fast(channel: Channel, timeout_s: float | None) -> Channel:
    """The channel with short ways between ranks of one host, where it has them."""
    same_host: Callable[..., Channel] | None = getattr(channel, "same_host", None)
    return channel if same_host is None else same_host(timeout_s=timeout_s)


@dataclass(slots=True)
class _Passage:
    """One step through the buckets."""

    kernel: Kernel
    active: Sequence[bool]
    run: Callable[[Callable[[], ExecuteReport]], Future[ExecuteReport]]
    timeout_s: float | None
    states: Sequence[LocalState] = ()
    report: StepReport = field(default_factory=StepReport)
    failure: BaseException | None = None

    def read(self, states: States) -> None:
        """Look at the local tensors; a failure goes with the first exchange."""
        try:
            self.states = states(self.active)
        except BaseException as error:  # noqa: BLE001 - raised by the exchange that tells of it
            self.failure = error

    def play(self, buckets: Sequence[Bucket]) -> None:
        """Gather ahead as far as slots are free; finish bucket after bucket."""
        waiting = deque(buckets)
        moving: deque[tuple[Bucket, Future[ExecuteReport]]] = deque()
        try:
            while waiting or moving:
                while waiting and all(waiting[0].slot != bucket.slot for bucket, _ in moving):
                    bucket = waiting.popleft()
                    self._try(self._blend, bucket)
                    moving.append((bucket, self._exchange(bucket.gather)))
                bucket, gathered = moving[0]
                self._note(gathered.result())
                self._try(self._orthogonalize, bucket)
                self._note(self._exchange(bucket.scatter).result())
                self._try(self._descend, bucket)
                moving.popleft()
        finally:
            # No exchange may be left under way: it writes into memory that is used again.
            for _, gathered in moving:
                gathered.exception()
        if self.failure is not None:
            raise self.failure  # after the last exchange there is nobody left to tell

    def _exchange(self, way: Way) -> Future[ExecuteReport]:
        failure, timeout_s = self.failure, self.timeout_s
        return self.run(lambda: way(failure, timeout_s))

    def _try(self, act: Callable[[Bucket], None], bucket: Bucket) -> None:
        """Do it, unless something has failed before; what it raises goes with the next exchange."""
        if self.failure is None:
            try:
                act(bucket)
            except BaseException as error:  # noqa: BLE001 - raised by the exchange that tells of it
                self.failure = error

    def _blend(self, bucket: Bucket) -> None:
        for task in self._tasks(bucket, bucket.wires):
            blend(self.states[task.member], task, bucket.wires[task.key])

    def _orthogonalize(self, bucket: Bucket) -> None:
        owned = self._tasks(bucket, bucket.wholes)
        for task in owned:
            whole = bucket.wholes[task.key].view(task.matrix.rows, task.matrix.cols)
            rule = self.states[task.member].rule
            whole.copy_(self.kernel(whole, rule.schedule, rule.eps))
        self.report += StepReport(matrices=len(owned))

    def _descend(self, bucket: Bucket) -> None:
        for task in self._tasks(bucket, bucket.wires):
            descend(self.states[task.member], task, bucket.wires[task.key])

    def _tasks(self, bucket: Bucket, held: Mapping[str, torch.Tensor]) -> list[Task]:
        """The tasks that step now and have memory in `held`."""
        return [task for task in bucket.tasks if self.active[task.member] and task.key in held]

    def _note(self, report: ExecuteReport) -> None:
        self.report += StepReport.of_exchange(report)


def blend(state: LocalState, task: Task, wire: torch.Tensor) -> None:
    """Take the local part of the gradient into the momentum, and put what results on the wire."""
    if task.local is not None:
        box = task.local.box.slices()
        momentum = state.momentum[box]
        gradient = torch.zeros_like(momentum) if state.gradient is None else state.gradient[box]
        wire.copy_(state.rule.blend(momentum, gradient))


def descend(state: LocalState, task: Task, wire: torch.Tensor) -> None:
    """Move the local part of the parameter against what came back on the wire."""
    if task.local is not None:
        state.rule.descend(state.param[task.local.box.slices()], wire, task.matrix)
