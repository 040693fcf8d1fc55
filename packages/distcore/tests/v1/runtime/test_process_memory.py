"""Reading another process: here the own one, and a child that is gone."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from distcore.v1.errors import PlanError
from distcore.v1.runtime import process_memory
from distcore.v1.runtime.process_memory import Memory, ProcessReader, may_read, memory_of

ME = os.getpid()


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def read(ours: list[torch.Tensor], theirs: list[torch.Tensor], pid: int = ME) -> None:
    reader = ProcessReader()
    try:
        reader.read(pid, memory_of(ours), memory_of(theirs).spans)
    finally:
        reader.close()


def test_memory_of_buffers_leaves_out_the_empty_ones() -> None:
    one, none, three = bytes_of(1), bytes_of(), bytes_of(1, 2, 3)
    memory = memory_of([one, none, three])
    assert memory.nbytes == 4
    assert memory.spans.tolist() == [[one.data_ptr(), 1], [three.data_ptr(), 3]]
    assert memory_of([]).spans.shape == (0, 2)


def test_a_buffer_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(PlanError, match="contiguous"):
        memory_of([torch.zeros((4, 4), dtype=torch.uint8)[:, 1]])


def test_buffers_are_read_one_by_one() -> None:
    ours = [torch.zeros(1, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)]
    read(ours, [bytes_of(7), bytes_of(1, 2, 3)])
    assert [buffer.tolist() for buffer in ours] == [[7], [1, 2, 3]]


def test_more_buffers_than_one_call_takes() -> None:
    source = torch.arange(3000, dtype=torch.int64).to(torch.uint8)
    target = torch.zeros(3000, dtype=torch.uint8)
    read(list(target.split(1)), list(source.split(1)))
    assert torch.equal(source, target)


def test_a_large_read_is_shared_by_threads() -> None:
    source = torch.randint(0, 256, (40_000_003,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    cuts = [1, 17_000_000, 5, 22_999_997]
    reader = ProcessReader(3)
    reader.read(ME, memory_of(target.split(cuts)), memory_of(source.split(cuts)).spans)
    reader.close()
    assert torch.equal(source, target)


def test_the_kernel_may_stop_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns how many bytes it read; the rest is read by further calls."""
    whole = process_memory._readv
    assert whole is not None
    calls = []

    def at_most_five(pid: int, ours: int, count: int, theirs: int, *rest: int) -> int:
        iovecs = (ctypes.c_uint64 * (2 * count)).from_address(ours)
        kept, left = 0, 5
        while kept < count and left:
            left -= min(left, iovecs[2 * kept + 1])
            kept += 1
        shown = [(ctypes.c_uint64 * (2 * kept)).from_address(at) for at in (ours, theirs)]
        copies = [(ctypes.c_uint64 * (2 * kept))(*array) for array in shown]
        total = sum(copies[0][1::2])
        for copy in copies:
            copy[2 * kept - 1] -= max(0, total - 5)
        calls.append(count)
        return int(whole(pid, copies[0], kept, copies[1], kept, 0))

    monkeypatch.setattr(process_memory, "_readv", at_most_five)
    source = torch.arange(23, dtype=torch.int64).to(torch.uint8)
    target = torch.zeros(23, dtype=torch.uint8)
    cuts = [2, 9, 1, 1, 10]
    read(list(target.split(cuts)), list(source.split(cuts)))
    assert target.tolist() == list(range(23))
    assert len(calls) == 5


def test_memory_that_does_not_exist_is_an_error() -> None:
    target = torch.zeros(8, dtype=torch.uint8)
    nowhere = np.array([[4096, 8]], dtype=np.uint64)
    with pytest.raises(OSError, match="Bad address") as caught:
        ProcessReader().read(ME, memory_of([target]), nowhere)
    assert caught.value.errno == errno.EFAULT


def test_an_error_in_one_share_is_raised_when_all_have_ended() -> None:
    target = torch.zeros(40_000_000, dtype=torch.uint8)
    ours = Memory(memory_of([target]).spans, target.numel())
    nowhere = np.array([[4096, target.numel()]], dtype=np.uint64)
    reader = ProcessReader(2)
    with pytest.raises(OSError, match="Bad address"):
        reader.read(ME, ours, nowhere)
    reader.close()


def test_a_process_that_is_gone_is_an_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(ProcessLookupError):
        read([bytes_of(0)], [bytes_of(1)], pid=child.pid)


def test_may_read_wants_the_very_bytes() -> None:
    word = np.frombuffer(b"sixteen bytes ok", dtype=np.uint8)
    assert may_read(ME, word.ctypes.data, b"sixteen bytes ok")
    assert not may_read(ME, word.ctypes.data, b"sixteen bytes no")
    assert not may_read(ME, 4096, b"sixteen bytes ok")


def test_a_system_without_the_call_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_readv", None)
    assert not may_read(ME, 4096, b"word")
    with pytest.raises(OSError, match="cannot read") as caught:
        read([bytes_of(0)], [bytes_of(1)])
    assert caught.value.errno == errno.ENOSYS
