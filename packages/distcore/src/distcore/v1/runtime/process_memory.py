"""Reading the memory of another process of this host, straight into our own.

The kernel copies once, from their pages into ours, and takes up to 1024 spans on each side in
one call. It is Linux' process_vm_readv; where the host forbids or lacks it, `may_read` says so.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distcore.v1.errors import PlanError

Spans = NDArray[np.uint64]
"""Memory as rows of (address, bytes): in memory this is the kernel's array of iovecs."""

_MAX_SPANS = 1024
# Reads are cut to this size before they are dealt to several threads.
_SHARE_NBYTES = 8 * 1024 * 1024
_MAX_THREADS = 4

_readv = (
    getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if sys.platform == "linux"
    else None
)
if _readv is not None:
    _readv.restype = ctypes.c_ssize_t
    _readv.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )


class Memory(NamedTuple):
    """Where the buffers of a message lie, in their order; `nbytes` is the sum."""

    spans: Spans
    nbytes: int


def memory_of(buffers: Sequence[torch.Tensor]) -> Memory:
    """Return where `buffers` lie, without the empty ones.

    Raises PlanError for a buffer that is not contiguous memory of the CPU.
    """
    rows: list[int] = []
    total = 0
    for buffer in buffers:
        nbytes = buffer.nbytes
        if nbytes:
            total += nbytes
            if not (buffer.is_cpu and buffer.is_contiguous()):
                raise PlanError(
                    f"buffer: expected contiguous CPU memory, got {tuple(buffer.shape)} with "
                    f"strides {buffer.stride()} on {buffer.device}"
                )
            rows += (buffer.data_ptr(), nbytes)
    return Memory(np.array(rows, dtype=np.uint64).reshape(-1, 2), total)


def may_read(pid: int, address: int, expected: bytes) -> bool:
    """Return whether process `pid` can be read, and holds `expected` at `address`.

    The content is the proof: the same number can name another process in another namespace.
    """
    if _readv is None:
        return False
    found = np.zeros(len(expected), dtype=np.uint8)
    theirs = np.array([[address, len(expected)]], dtype=np.uint64)
    ours = np.array([[found.ctypes.data, len(expected)]], dtype=np.uint64)
    try:
        _read(pid, ours, theirs)
    except OSError:
        return False
    return found.tobytes() == expected


class ProcessReader:
    """Reads processes with a few threads; it owns them.

    One core does not fill the memory bus, so large reads are shared by `num_threads`: at most 4,
    and no more than torch may use for one operation (`torch.get_num_threads`, which follows
    OMP_NUM_THREADS), unless given.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        if num_threads is None:
            num_threads = min(torch.get_num_threads(), _MAX_THREADS)
        self._num_threads = num_threads
        self._helpers: ThreadPoolExecutor | None = None

    def read(self, pid: int, ours: Memory, theirs: Spans) -> None:
        """Fill `ours` with the bytes of process `pid` at the spans `theirs`.

        Row `k` of both has one length. No thread touches `ours` once this returns or raises.
        Raises OSError (ESRCH: no such process, EPERM: not allowed, EFAULT: no such memory).
        """
        num_shares = min(self._num_threads, ours.nbytes // _SHARE_NBYTES)
        if num_shares < 2:
            _read(pid, ours.spans, theirs)
        else:
            self._read_shared(pid, ours, theirs, num_shares)

    def _read_shared(self, pid: int, memory: Memory, theirs: Spans, num_shares: int) -> None:
        if self._helpers is None:
            self._helpers = ThreadPoolExecutor(self._num_threads - 1, "distcore-reader")
        ours, theirs = _cut(memory.spans, theirs)
        marks = np.arange(1, num_shares) * (memory.nbytes / num_shares)
        bounds = [0, *np.searchsorted(np.cumsum(ours[:, 1]), marks).tolist(), len(ours)]
        shares = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        futures = [
            self._helpers.submit(_read, pid, ours[share], theirs[share]) for share in shares[1:]
        ]
        try:
            _read(pid, ours[shares[0]], theirs[shares[0]])
        finally:
            wait(futures)
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        if self._helpers is not None:
            self._helpers.shutdown()
            self._helpers = None


def _cut(ours: Spans, theirs: Spans) -> tuple[Spans, Spans]:
    """Cut spans into rows of at most `_SHARE_NBYTES`."""
    pieces = ((ours[:, 1] + np.uint64(_SHARE_NBYTES - 1)) // np.uint64(_SHARE_NBYTES)).astype(int)
    row = np.repeat(np.arange(len(ours)), pieces)
    first = np.cumsum(pieces) - pieces
    offset = ((np.arange(len(row)) - first[row]) * _SHARE_NBYTES).astype(np.uint64)
    nbytes = np.minimum(ours[row, 1] - offset, np.uint64(_SHARE_NBYTES))
    return (
        np.stack([ours[row, 0] + offset, nbytes], axis=1),
        np.stack([theirs[row, 0] + offset, nbytes], axis=1),
    )


def _read(pid: int, ours: Spans, theirs: Spans) -> None:
    if _readv is None:
        raise OSError(errno.ENOSYS, "this system cannot read the memory of other processes")
    at = 0
    while at < len(ours):
        count = min(_MAX_SPANS, len(ours) - at)
        wanted = int(ours[at : at + count, 1].sum())
        got = _readv(
            pid,
            ours.ctypes.data + 16 * at,
            count,
            theirs.ctypes.data + 16 * at,
            count,
            0,
        )
        if got == wanted:
            at += count
        elif got > 0:
            ours, theirs = _rest(ours[at:], theirs[at:], got)
            at = 0
        else:
            number = ctypes.get_errno() if got < 0 else errno.EFAULT
            raise OSError(number, os.strerror(number))


def _rest(ours: Spans, theirs: Spans, got: int) -> tuple[Spans, Spans]:
    """Return what is left of the spans after `got` bytes: the kernel may stop anywhere."""
    ends = np.cumsum(ours[:, 1])
    row = int(np.searchsorted(ends, np.uint64(got), side="right"))
    ours, theirs = ours[row:].copy(), theirs[row:].copy()
    done = np.uint64(got - (int(ends[row - 1]) if row else 0))
    for spans in (ours, theirs):
        spans[0, 0] += done
        spans[0, 1] -= done
    return ours, theirs
