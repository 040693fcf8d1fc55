"""Parts of a stream, wherever they lie, and the digests of its chunks."""

from __future__ import annotations

import pytest
import torch

from fttransport import stream as stream_module
from fttransport.codec import Codec
from fttransport.digests import Digester
from fttransport.snapshot import take_snapshot
from fttransport.stream import Stream

XXH3 = Digester("xxh3")


def test_a_part_is_the_buffers_that_make_it_up() -> None:
    blocks = [torch.arange(start, start + 4, dtype=torch.uint8) for start in (0, 4, 8)]
    stream = Stream(blocks)
    assert stream.nbytes == 12
    parts = {(start, stop): stream.part(start, stop) for start, stop in [(0, 12), (2, 9), (5, 6)]}
    assert [[bytes(one) for one in part] for part in parts.values()] == [
        [b"\x00\x01\x02\x03", b"\x04\x05\x06\x07", b"\x08\x09\x0a\x0b"],
        [b"\x02\x03", b"\x04\x05\x06\x07", b"\x08"],
        [b"\x05"],
    ]
    assert stream.part(4, 4) == []
    blocks[1].zero_()
    assert bytes(parts[(5, 6)][0]) == b"\x00"


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_digests_by_several_threads_are_those_by_one(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(count * 1024, dtype=torch.int32).to(torch.uint8)}
    manifest = take_snapshot(state, 1, codec=Codec(), digester=XXH3, chunk_nbytes=1024).manifest
    monkeypatch.setattr(stream_module, "_THREADED_NBYTES", 0)
    monkeypatch.setattr(stream_module, "_THREADS", 4)
    digests = Stream([state["w"]]).digests(manifest, XXH3)
    assert digests == manifest.digests
    assert len(digests) == count
    assert digests[0] == XXH3.digest([bytes(range(256)) * 4])


def test_only_new_memory_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[int, int, int]] = []

    def touch(block: torch.Tensor, start: int, stop: int) -> None:
        touched.append((len(block), start, stop))

    monkeypatch.setattr(stream_module, "touch", touch)
    blocks = [torch.zeros(size, dtype=torch.uint8) for size in (4, 5, 6, 7)]
    Stream(blocks, new={0, 2, 3}).touch(2, 16)
    assert touched == [(4, 2, 4), (6, 0, 6), (7, 0, 1)]
    touched.clear()
    Stream(blocks).touch(0, 22)
    assert touched == []


def test_touched_memory_keeps_its_bytes() -> None:
    block = torch.arange(100_000, dtype=torch.int32).to(torch.uint8)
    before = block.clone()
    Stream([block], new={0}).touch(1, 99_999)
    Stream([block], new={0}).touch(7, 9)
    assert torch.equal(block, before)
