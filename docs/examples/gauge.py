"""How fast the machine reads, writes and copies when all ranks do so at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from source import Source
from tell import Teller

NBYTES = 32 * 2**20
TIMES = 3


def measure(source: Source, folder: Path, tell: Teller) -> None:
    """Tell how long the same bytes take without anything around them. Collective."""
    file = source.directory / next(iter(source.checkpoint.tensors.values())).chunks[0].file
    size = file.stat().st_size
    rank, buffer = dist.get_rank(), bytearray(min(NBYTES, size))
    start = rank * len(buffer) % (size - len(buffer) + 1)
    scratch = folder / f"gauge-{rank}"
    tensors = [torch.ones(NBYTES, dtype=torch.uint8) for _ in range(2)]

    def read() -> int:
        with file.open("rb", buffering=0) as opened:
            opened.seek(start)
            return opened.readinto(buffer) or 0

    def write() -> int:
        with scratch.open("wb", buffering=0) as opened:
            count = opened.write(buffer)
            os.fsync(opened.fileno())
        return count

    def copy() -> int:
        tensors[0].copy_(tensors[1])
        return NBYTES

    for way, act in (("read", read), ("write", write), ("copy", copy)):
        best = min((timed(act) for _ in range(TIMES)), key=lambda found: found[1] / found[0])
        tell.gauge(way, *best)
    scratch.unlink()


def timed(act: Callable[[], int]) -> tuple[int, float]:
    """The bytes of one try, all ranks at once, and its seconds."""
    dist.barrier()
    begin = time.monotonic()
    nbytes = act()
    return nbytes, time.monotonic() - begin
