"""Scratch memory is writable, and goes back to the system at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from distcore.v1.runtime import scratch
from distcore.v1.runtime.scratch_memory import MAPPED_NBYTES

MIB = 1 << 20


def held() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("nbytes", [0, 1, MAPPED_NBYTES - 1, MAPPED_NBYTES, 5 * MIB + 3])
def test_as_many_bytes_as_asked_for(nbytes: int) -> None:
    memory = scratch(nbytes)
    assert (memory.dtype, tuple(memory.shape), memory.device.type) == (
        torch.uint8,
        (nbytes,),
        "cpu",
    )
    memory.fill_(7)
    assert int(memory.sum()) == 7 * nbytes


def test_a_view_keeps_the_memory() -> None:
    view = scratch(4 * MIB)[MIB : 2 * MIB].view(torch.int64)
    others = [scratch(4 * MIB).fill_(255) for _ in range(4)]
    view.fill_(3)
    assert all(bool((other == 255).all()) for other in others)
    assert bool((view == 3).all())


def test_nothing_is_kept_however_often() -> None:
    scratch(32 * MIB).fill_(1)
    before = held()
    for _ in range(8):
        for size in (3, 5, 9, 17, 31):
            scratch(size * MIB).fill_(1)
    assert held() - before < 2 * MIB


def test_other_devices_have_their_own() -> None:
    assert scratch(2 * MIB, "meta").device.type == "meta"
