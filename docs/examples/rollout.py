"""Trained weights go to two ranks that share every layer by tensor parallelism, as versions.

A version travels in the background while the trainer makes its next gradients; until it has
arrived the trainer leaves its weights as they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from bert import Bert
from figures import Act, Moved, highest
from source import Source, same_bits, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard import Handle, Resharder

ROUNDINGS = 16
SHARED = {
    "attention.self.query": ColwiseParallel(),
    "attention.self.key": ColwiseParallel(),
    "attention.self.value": ColwiseParallel(),
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}


def tensor_parallel(source: Source, mesh: DeviceMesh) -> Bert:
    """The model with every layer shared by the ranks of a mesh, without values."""
    with torch.device("meta"):
        model = source.model()
    for layer in model.encoder.layer:
        parallelize_module(layer, mesh, SHARED)
    return model.to_empty(device="cpu")


class Rollout:
    """A second model, on the last two ranks, that gets the weights of one in training."""

    def __init__(self, trained: Bert, source: Source) -> None:
        ranks = list(range(dist.get_world_size()))[-2:]
        mesh = DeviceMesh("cpu", ranks)
        self.model = tensor_parallel(source, mesh) if dist.get_rank() in ranks else None
        self._trained = trained
        self._source = source
        # In a group of its own, as the trainer goes on talking meanwhile.
        self._resharder = Resharder(trained.state_dict(), self._state(), dist.new_group())
        self._handle: Handle | None = None

    def start(self) -> None:
        """Begin to send what the trainer has now. Collective; returns at once."""
        self._handle = self._resharder.start()

    def finish(self) -> Act:
        """Wait for the version on its way, if there is one, and compare it. Collective."""
        if self._handle is None:
            return Act("rollout")
        report, self._handle = self._handle.wait(), None
        name = f"rollout, version {report.version}"
        wrong = self._differing()
        distance, tolerance = self._distance()
        moved = Moved(
            name,
            received=report.nbytes_received,
            least=report.bound_received_nbytes,
            seconds=report.seconds,
        )
        return Act(
            "rollout",
            [moved],
            [
                (f"{name}, bit-equal to the trainer: {wrong} tensors differ", wrong == 0),
                (f"{name}, embeddings: {distance:.1e} apart at most", distance < tolerance),
            ],
        )

    def close(self) -> None:
        self._resharder.close()

    def _state(self) -> dict[str, Tensor]:
        """The weights on this rank: none where it only trains."""
        return self.model.state_dict() if self.model is not None else {}

    def _differing(self) -> int:
        """How many tensors differ from the trainer's."""
        state = {key: whole_of(value) for key, value in self._state().items()}
        wrong = 0
        for key, value in self._trained.state_dict().items():
            expected = whole_of(value)  # collective, so on all ranks
            wrong += key in state and not same_bits(state[key], expected)
        return int(highest(wrong))

    def _distance(self) -> tuple[float, float]:
        """How far embeddings are from the trainer's, and may be.

        Layers in two parts sum in another order; embeddings have length 1.
        """
        expected = self._source.embed(self._trained)
        mine = 0.0
        if self.model is not None:
            mine = (self._source.embed(self.model) - expected).abs().max().item()
        return highest(mine), ROUNDINGS * torch.finfo(self._source.dtype()).eps
