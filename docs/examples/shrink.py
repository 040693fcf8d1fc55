"""The ranks save what they trained, and fewer ranks, otherwise sharded, load it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import load
import save
import torch.distributed as dist
from figures import Act
from source import same_bits, whole_of
from torch import Tensor
from world import World

import ckptx


def save_all(state: dict[str, Tensor], folder: Path) -> Act:
    """Save a whole state, each byte once. Collective."""
    report = ckptx.save(state, folder / "trained")
    who = counted(dist.get_world_size())
    claim = save.written_once(report.bytes_written, state, f"a whole state by {who}")
    return Act("shrink", [save.moved(f"save by {who}", report, state)], [claim])


def load_all(
    state: dict[str, Tensor], world: World, folder: Path, expected: Mapping[str, Tensor] | None
) -> Act:
    """Fill a state from what was saved; compare it with what rank 0 expects. Collective."""
    report = ckptx.load(state, folder / "trained")
    wrong = 0
    for key, value in state.items():
        whole = whole_of(value)
        wrong += expected is not None and not same_bits(whole, expected[key])
    who = counted(world.size)
    claim = save.verdict(f"loaded again by {who}, bit-equal to one process", wrong)
    return Act("shrink", [load.moved(f"load by {who}", report)], [claim])


def counted(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"
