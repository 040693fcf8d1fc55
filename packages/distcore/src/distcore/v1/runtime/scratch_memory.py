"""Scratch: memory for staging that the system has back as soon as nothing refers to it.

An allocator keeps what it got: after a few buffers of some mebibytes were freed, glibc raises the
size from which on it returns memory at once, and a process then holds several times what it
uses. A bound on staging holds only for memory that is mapped for the purpose.
"""

from __future__ import annotations

import mmap
from typing import Final

import torch

MAPPED_NBYTES: Final = 1 << 20
"""Less than this comes from torch's allocator, which is quicker and cannot keep much."""

_HUGE_PAGE_NBYTES: Final = 2 << 20


def scratch(nbytes: int, device: str = "cpu") -> torch.Tensor:
    """Return a flat uint8 tensor of `nbytes` bytes of any content.

    On the CPU, what is large is mapped for this tensor alone, and unmapped when the tensor and
    its views are gone. Local.
    """
    if device != "cpu" or nbytes < MAPPED_NBYTES or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    # Private, as the kernel gives no huge pages to what could be shared.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= _HUGE_PAGE_NBYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        # Fresh small pages cost several times what it costs to fill them.
        memory.madvise(mmap.MADV_HUGEPAGE, 0, nbytes - nbytes % _HUGE_PAGE_NBYTES)
    return torch.frombuffer(memory, dtype=torch.uint8)
