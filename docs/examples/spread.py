"""Training moves, alive, from sharded ranks to ranks that are replicas of each other."""

from __future__ import annotations

import torch.distributed as dist
from figures import Act, Moved, highest
from source import Source, same_bits, whole_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from train import Trainer

from reshard import Resharder
from reshard.plot import traffic_of


def act(trainer: Trainer, source: Source, mesh: DeviceMesh) -> tuple[Trainer, Act, list[list[int]]]:
    """A trainer on `mesh` that goes on where the other one is; who sent how much to whom.

    Weights and optimizer state are carried by one plan. Collective.
    """
    found = Trainer(source.sharded(mesh), source)
    before, after = trainer.state(), found.state()
    moving = [key for key, value in before.items() if isinstance(value, DTensor)]
    src = {key: before[key] for key in moving}
    dst = {key: after[key] for key in moving}
    with Resharder(src, dst, dist.new_group()) as resharder:
        report = resharder.run()
        traffic = traffic_of(resharder.plan)
    for key in before.keys() - src.keys():  # plain tensors, the same on all ranks
        after[key].copy_(before[key])
    found.losses = list(trainer.losses)

    wrong = sum(not same_bits(whole_of(before[key]), whole_of(after[key])) for key in before)
    wrong = int(highest(wrong))
    moved = Moved(
        "spread to replicas",
        received=report.nbytes_received,
        least=report.bound_received_nbytes,
        seconds=report.seconds,
    )
    claim = f"weights and optimizer state on every replica, bit-equal: {wrong} tensors differ"
    return found, Act("spread", [moved], [(claim, wrong == 0)]), traffic
