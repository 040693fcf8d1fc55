"""Boxes reach their places: in order, strided, cut small, and many files' ranges in few calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ckptx import Chunk, Read, StoredTensor, plan_load
from ckptx.files import FileReader
from ckptx.reader import memory_of, read_into_places, read_into_staging, read_region
from distcore.v1 import Layout, Piece, Region
from distcore.v1.runtime import Shard


def stored_at(file: Path, tensor: Tensor, offset: int = 5) -> StoredTensor:
    """Write a tensor behind some other bytes."""
    raw = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
    file.write_bytes(bytes(offset) + raw)
    shape = tuple(tensor.shape)
    chunk = Chunk(Region.of_shape(shape), str(file), offset)
    return StoredTensor(shape, str(tensor.dtype).removeprefix("torch."), (chunk,))


def test_memory_is_the_tensors_own() -> None:
    tensor = torch.zeros(4, dtype=torch.uint8)
    memory_of(tensor)[1:3] = b"ab"
    assert tensor.tolist() == [0, 97, 98, 0]


@pytest.fixture(scope="module")
def cube(tmp_path_factory: pytest.TempPathFactory) -> tuple[StoredTensor, Tensor]:
    tensor = torch.arange(7 * 5 * 6, dtype=torch.int32).reshape(7, 5, 6)
    return stored_at(tmp_path_factory.mktemp("cube") / "f", tensor), tensor


@st.composite
def boxes(draw: st.DrawFn) -> Region:
    edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in (7, 5, 6)]
    return Region(tuple(low for low, _ in edges), tuple(high for _, high in edges))


@given(boxes())
def test_any_box_of_a_tensor(cube: tuple[StoredTensor, Tensor], box: Region) -> None:
    stored, tensor = cube
    with FileReader() as files:
        assert torch.equal(read_region("cube", stored, box, files), tensor[box.slices()])


@given(boxes(), st.permutations([0, 1, 2]), st.integers(4, 200))
def test_any_box_into_a_strided_place_in_small_steps(
    cube: tuple[StoredTensor, Tensor], box: Region, order: list[int], copy_nbytes: int
) -> None:
    stored, tensor = cube
    layout = Layout(shape=(7, 5, 6), dtype="int32", pieces={0: (Piece(box, (1, 0, 2)),)})
    shape = [n + extra for n, extra in zip(box.shape, (1, 0, 2), strict=True)]
    memory = torch.full([shape[d] for d in order], -1, dtype=torch.int32)
    place = memory.permute([order.index(d) for d in range(3)])
    plan = plan_load({"cube": layout}, {"cube": stored}, (0,), min_run=1)
    with FileReader() as files:
        reads = plan.reads.get(0, ())
        shards = {"cube": Shard(place, layout.pieces(0))}
        read_into_places(reads, shards, files, copy_nbytes=copy_nbytes)
        assert files.nbytes == box.numel * 4
    expected = torch.full(shape, -1, dtype=torch.int32)
    expected[layout.pieces(0)[0].local.slices()] = tensor[box.slices()]
    assert torch.equal(place, expected)


def test_tensors_that_follow_each_other_are_read_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    whole = os.preadv

    def counted(fd: int, buffers: list[memoryview], offset: int) -> int:
        calls.append((offset, len(buffers)))
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    file = tmp_path / "f"
    file.write_bytes(bytes(range(200)))
    places = {f"t{i}": torch.zeros(8, dtype=torch.uint8) for i in range(20)}
    # A gap before t10.
    reads = [
        Read(key, Region((0,), (8,)), Chunk(Region((0,), (8,)), str(file), 8 * i + (i >= 10)), 8)
        for i, key in enumerate(places)
    ]
    shards = {key: Shard.of(place, 0) for key, place in places.items()}
    with FileReader() as files:
        read_into_places(reads, shards, files)
    assert calls == [(0, 10), (81, 10)]
    assert places["t11"].tolist() == list(range(89, 97))


def test_boxes_in_staging_are_dense_and_know_where_they_are(
    cube: tuple[StoredTensor, Tensor],
) -> None:
    stored, tensor = cube
    box = Region((2, 1, 0), (5, 4, 6))
    reads = [Read("x#0", box, stored.chunks[0], box.numel * 4)]
    with FileReader() as files:
        found = read_into_staging(reads, {"x#0": torch.int32}, files)
    assert list(found) == ["x#0"]
    assert torch.equal(found["x#0"].data, tensor[box.slices()])
    assert found["x#0"].pieces == (Piece(box, (0, 0, 0)),)
