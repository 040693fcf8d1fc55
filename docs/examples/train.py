"""Ranks train together with OwnerMuon: twenty steps, with the bits of one process.

A sentence shall be closer to its twin, which says the same, than to all others. Every rank has
the same batch: where the number of ranks is a power of two, gradients averaged over ranks are then
those of one process, to the last bit.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from bert import Bert
from figures import Act, Moved, total
from source import Source, same_bits, whole_of
from text import TWINS, encode
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from ownerplan import OwnerMuon
from ownerplan.split_params import split_params
from ownerplan.step_report import StepReport

TEMPERATURE = 0.2
RATE = 1e-4


class Trainer:
    """Trains a model on the sentences: matrices with a Muon, everything else with AdamW."""

    def __init__(
        self,
        model: Bert,
        source: Source,
        muon: type[OwnerMuon | torch.optim.Muon],
    ) -> None:
        self.model = model
        self.matrices, others = split_params(model, exclude=["pooler.*"])
        self.muon = muon(self.matrices, lr=RATE, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW(others, lr=RATE)
        self._batch = encode(source.directory)
        self.losses: list[float] = []
        self.report = StepReport()
        self.least = 0

    def backward(self) -> None:
        """Make gradients; the weights hold still meanwhile."""
        loss = contrastive(self.model(*self._batch))
        loss.backward()
        self.losses.append(float(loss.detach()))

    def update(self) -> None:
        """Step the weights, and forget the gradients."""
        self.muon.step()
        self._adamw.step()
        if isinstance(self.muon, OwnerMuon) and self.muon.last_report is not None:
            self.report += self.muon.last_report
            self.least += least_received(self.matrices)
        self.muon.zero_grad()
        self._adamw.zero_grad()

    def close(self) -> None:
        if isinstance(self.muon, OwnerMuon):
            self.muon.close()


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
    if not is_first():
        return 0
    elements = 0
    for matrix in matrices:
        if matrix.grad is not None and isinstance(matrix, DTensor):
            replicas = matrix.device_mesh.size(0)
            elements += (1 + replicas) * matrix.numel() - 2 * matrix.to_local().numel()
    return elements * torch.bfloat16.itemsize


def is_exact(source: Source) -> bool:
    """Whether training on these ranks gives the bits of one process."""
    size = dist.get_world_size()
    return source.dtype() == torch.float32 and size & (size - 1) == 0


def compared(trainer: Trainer, source: Source) -> Act:
    """Compare a model that was trained with one process that does the same, on rank 0."""
    if not trainer.losses:
        return Act()
    state = {key: whole_of(value) for key, value in trainer.model.state_dict().items()}
    wrong = total(differing_alone(state, source, len(trainer.losses)) if is_first() else 0)
    name = f"OwnerMuon, {len(trainer.losses)} steps"
    first, last = trainer.losses[0], trainer.losses[-1]
    report, least = trainer.report, trainer.least
    moved = Moved(name, received=report.nbytes_received, least=least, seconds=report.seconds)
    return Act(
        [moved],
        [
            (f"{name}: the loss falls from {first:.4f} to {last:.4f}", last < first),
            (f"{name}, bit-equal to one process: {wrong} tensors differ", wrong == 0),
        ],
    )


def differing_alone(state: dict[str, Tensor], source: Source, steps: int) -> int:
    """How many tensors differ from those that one process trains, with torch's own Muon."""
    alone = Trainer(source.alone(), source, torch.optim.Muon)
    for _ in range(steps):
        alone.backward()
        alone.update()
    expected = alone.model.state_dict()
    return sum(not same_bits(value, expected[key]) for key, value in state.items())


def is_first() -> bool:
    return dist.get_rank() == 0
