"""Ranks train together with OwnerMuon, with the bits of one process.

A sentence shall be closer to its twin, which says the same, than to all others. Every rank has
the same batch: where the number of ranks is a power of two, gradients averaged over ranks are then
those of one process, to the last bit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from bert import Bert
from figures import Act, Moved
from source import Source, local_of, same_bits
from text import TWINS, encode
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ownerplan import OwnerMuon, flop_cost_fn
from ownerplan.newton_schulz import Schedule, newton_schulz
from ownerplan.split_params import split_params

TEMPERATURE = 0.2
RATE = 1e-4
NS_STEPS = 5


class Trainer:
    """Trains a model on the sentences: matrices with a Muon, everything else with AdamW.

    The Muon is OwnerMuon, which many ranks share, or, `alone`, that of torch.
    `losses` has the loss of every step that is done. `flops` counts those with which this rank
    orthogonalized matrices, `muon_s` the seconds that the Muon took.
    """

    def __init__(
        self,
        model: Bert,
        source: Source,
        *,
        alone: bool = False,
    ) -> None:
        self.model = model
        self.losses: list[float] = []
        self.flops = 0
        self.muon_s = 0.0
        self.matrices, others = split_params(model, exclude=["pooler.*"])
        adjust = "match_rms_adamw"
        self.muon: OwnerMuon | torch.optim.Muon = (
            torch.optim.Muon(self.matrices, lr=RATE, ns_steps=NS_STEPS, adjust_lr_fn=adjust)
            if alone
            else OwnerMuon(
                self.matrices,
                lr=RATE,
                ns_steps=NS_STEPS,
                adjust_lr_fn=adjust,
                kernel=self._counted,
            )
        )
        self._adamw = torch.optim.AdamW(others, lr=RATE)
        self._batch = encode(source.directory)
        self._cost = flop_cost_fn(NS_STEPS)
        for matrix in self.matrices:
            self.muon.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
        for other in others:
            # As AdamW does it at the first step, so that there is something to fill before it.
            moments = {key: torch.zeros_like(other) for key in ("exp_avg", "exp_avg_sq")}
            self._adamw.state[other] = {"step": torch.tensor(0.0), **moments}

    @property
    def steps(self) -> int:
        """How many are done."""
        return len(self.losses)

    def step(self, halfway: Callable[[], None] | None = None) -> Moved:
        """Make one step; `halfway` is called within it, in the middle of making gradients."""
        loss = self.backward(halfway)
        return self.update(loss)

    def backward(self, halfway: Callable[[], None] | None = None) -> float:
        """Make gradients; the weights hold still meanwhile."""
        layers = self.model.encoder.layer
        hook = None
        if halfway is not None:
            hook = layers[len(layers) // 2].register_forward_hook(calling(halfway))
        loss = contrastive(self.model(*self._batch))
        loss.backward()
        if hook is not None:
            hook.remove()
        return float(loss.detach())

    def update(self, loss: float) -> Moved:
        """Step the weights, and forget the gradients."""
        begin = time.monotonic()
        self.muon.step()
        self.muon_s += time.monotonic() - begin
        self._adamw.step()
        report = self.muon.last_report if isinstance(self.muon, OwnerMuon) else None
        least = least_received(self.matrices) if report is not None else 0
        self.muon.zero_grad()
        self._adamw.zero_grad()
        self.losses.append(loss)
        if report is None:
            return Moved("OwnerMuon", turn=self.steps)
        return Moved(
            "OwnerMuon",
            received=report.nbytes_received,
            least=least,
            seconds=report.seconds,
            turn=self.steps,
        )

    def state(self) -> dict[str, Tensor]:
        """All that training goes on from, by name: the weights, and what the optimizers keep."""
        found = {f"weights.{key}": value for key, value in self.model.state_dict().items()}
        for name, param in self.model.named_parameters():
            for optimizer in (self.muon, self._adamw):
                kept: Mapping[str, Tensor] = optimizer.state.get(param, {})
                found |= {f"{key}.{name}": value for key, value in kept.items()}
        return found

    def held(self) -> dict[str, Tensor]:
        """What this rank holds of the state: plain tensors, in the memory of the state's own."""
        return {key: local_of(value).detach() for key, value in self.state().items()}

    def take_over(self, other: Trainer) -> None:
        """Go on from where another one of the same layout is. Local."""
        theirs = other.held()
        for key, value in self.held().items():
            value.copy_(theirs[key])
        self.losses = list(other.losses)

    def close(self) -> None:
        if isinstance(self.muon, OwnerMuon):
            self.muon.close()

    def _counted(self, matrix: Tensor, schedule: Schedule, eps: float) -> Tensor:
        self.flops += self._cost(tuple(matrix.shape))
        return newton_schulz(matrix, schedule, eps)


def calling(act: Callable[[], None]) -> Callable[[nn.Module, object, Tensor], None]:
    """A forward hook: `act` is called when the gradient of what a module returned is there."""

    def watch(module: nn.Module, given: object, returned: Tensor) -> None:
        returned.register_hook(lambda gradient: act())

    return watch


def contrastive(embeddings: Tensor) -> Tensor:
    """InfoNCE: how surely each sentence tells its twin from all others."""
    likeness = embeddings @ embeddings.T / TEMPERATURE
    itself = torch.eye(len(likeness), dtype=torch.bool)
    sentences, twins = torch.tensor(TWINS).T
    return functional.cross_entropy(likeness.masked_fill(itself, -torch.inf)[sentences], twins)


def least_received(matrices: list[torch.nn.Parameter]) -> int:
    """The bytes that all ranks together receive at least in a step, told by rank 0.

    An owner, who has one shard, needs the others of one replica; all other ranks need their own
    shard of the result. Both are bfloat16. Rank 0 has the first shard of each, none is larger.
    """
    if dist.get_rank() != 0:
        return 0
    elements = 0
    for matrix in matrices:
        if matrix.grad is not None and isinstance(matrix, DTensor):
            replicas = matrix.device_mesh.size(0)
            elements += (1 + replicas) * matrix.numel() - 2 * matrix.to_local().numel()
    return elements * torch.bfloat16.itemsize


def is_exact(source: Source, size: int) -> bool:
    """Whether training on so many ranks gives the bits of one process."""
    return source.dtype() == torch.float32 and size & (size - 1) == 0


def alone(source: Source, steps: int) -> Trainer:
    """One process that trains on its own, with torch's own Muon, and is never hurt."""
    found = Trainer(source.alone(), source, alone=True)
    for _ in range(steps):
        found.step()
    return found


def floor(never_hurt: Trainer) -> float:
    """What all steps of the Muon take at least: one process's time, shared by the cores."""
    cores = len(os.sched_getaffinity(0))
    return never_hurt.muon_s / min(dist.get_world_size(), cores)


def compared(trainer: Trainer, never_hurt: Trainer | None) -> Act:
    """Compare replicas with the one process, which rank 0 has. Collective."""
    expected = None if never_hurt is None else never_hurt.held()
    wrong = differing_from(0, expected, trainer.held())
    name = f"OwnerMuon, {trainer.steps} steps"
    first, last = trainer.losses[0], trainer.losses[-1]
    what = "weights and optimizer state bit-equal to one process that was never hurt"
    return Act(
        "train",
        [],
        [
            (f"{name}: the loss falls from {first:.4f} to {last:.4f}", last < first),
            (f"{name}, {what}: {wrong} tensors differ", wrong == 0),
        ],
    )


def differing_from(
    rank: int, expected: Mapping[str, Tensor] | None, mine: Mapping[str, Tensor]
) -> int:
    """How many tensors differ on some rank from what one rank expects. Collective."""
    wrong = torch.zeros(len(mine), dtype=torch.int64)
    for number, (key, value) in enumerate(mine.items()):
        theirs = torch.empty_like(value) if expected is None else expected[key].contiguous()
        dist.broadcast(theirs, rank)
        wrong[number] = not same_bits(value, theirs)
    dist.all_reduce(wrong, dist.ReduceOp.MAX)
    return int(wrong.sum())
