"""save on thread ranks: every layout, both formats, read back by ckptx and by torch; and twins."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import ckptx
from ckptx import (
    CheckpointDisagreement,
    CheckpointingException,
    CheckpointPeerError,
    CheckpointPlanError,
    FormatError,
    SaveReport,
)
from ckptx.integrity import Integrity
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout

MESH = [[0, 1], [2, 3]]
FORMATS = ["safetensors", "dcp"]


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    raw = (torch.arange(torch.Size(shape).numel() * dtype.itemsize) * 37 % 251).to(torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


WEIGHTS = {
    "embed": numbered((50, 8)),
    "bias": numbered((7,), torch.bfloat16),
    "scalar": numbered((), torch.float64),
    "none": numbered((0, 3)),
    "transposed": numbered((6, 4)).t(),
    "f8": numbered((3, 3), torch.float8_e4m3fn),
}
VALUES = {"epoch": 3, "betas": (0.9, 0.99), "names": ["a", "b"], "lr": 0.1, "nothing": None}
LAYOUTS = {
    "rows": Layout.from_mesh(shape=(10, 6), dtype="float32", mesh=MESH, placements=["R", "S(0)"]),
    "columns": Layout.from_mesh(
        shape=(10, 6), dtype="float32", mesh=MESH, placements=["R", "S(1)"]
    ),
    "both": Layout.from_mesh(shape=(10, 6), dtype="int16", mesh=MESH, placements=["S(0)", "S(1)"]),
    "uneven": Layout.from_mesh(shape=(5,), dtype="int8", mesh=[0, 1, 2, 3], placements=["S(0)"]),
    "strided": Layout.from_mesh(
        shape=(7, 3), dtype="float32", mesh=MESH, placements=["_S(0,2)", "S(0)"]
    ),
}


def parts_of(rank: int) -> dict[str, Tensor]:
    """The local tensors of a rank in all layouts."""
    found: dict[str, Tensor] = {}
    for key, layout in LAYOUTS.items():
        whole = numbered(layout.shape, getattr(torch, layout.dtype))
        local = torch.empty(layout.local_shape(rank), dtype=whole.dtype)
        for piece in layout.pieces(rank):
            local[piece.local.slices()] = whole[piece.region.slices()]
        found[key] = local
    return found


def opened(path: Path) -> dict[str, Tensor]:
    found = ckptx.open_checkpoint(path)
    return {key: found.read(key) for key in found.tensors}


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [1, 3])
def test_what_is_saved_is_read_back(tmp_path: Path, kind: Any, size: int) -> None:
    path = tmp_path / "x"

    def job(channel: Channel) -> SaveReport:
        state = {"model": dict(WEIGHTS), "extra": VALUES}
        return ckptx.save(state, path, group=channel, format=kind)

    reports = rank_threads(size, job).values()
    found = opened(path)
    assert {key: bits(value) for key, value in found.items()} == {
        f"model.{key}": bits(value) for key, value in WEIGHTS.items()
    }
    total = sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert sum(report.bytes_written for report in reports) == total == reports[0].total_bytes
    assert not (tmp_path / "x.partial").exists()
    state: dict[str, Any] = {
        "model": {key: torch.zeros_like(value) for key, value in WEIGHTS.items()},
        "extra": dict.fromkeys(VALUES, "old"),
    }
    ckptx.load(state, path)
    assert state["extra"] == VALUES
    assert all(bits(state["model"][key]) == bits(value) for key, value in WEIGHTS.items())


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("split", [True, False])
def test_every_layout_is_written_once(tmp_path: Path, kind: Any, split: bool) -> None:
    def job(channel: Channel) -> SaveReport:
        state = parts_of(channel.rank)
        return ckptx.save(
            state, tmp_path / "x", group=channel, format=kind, layouts=LAYOUTS, split=split
        )

    reports = rank_threads(4, job).values()
    for key, value in opened(tmp_path / "x").items():
        layout = LAYOUTS[key]
        assert bits(value) == bits(numbered(layout.shape, getattr(torch, layout.dtype))), key
    total = sum(numbered(v.shape, getattr(torch, v.dtype)).nbytes for v in LAYOUTS.values())
    assert sum(report.bytes_written for report in reports) == total


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", [True, False])
def test_torch_reads_both_formats(tmp_path: Path, split: bool) -> None:
    def job(channel: Channel) -> None:
        for kind in FORMATS:
            state = parts_of(channel.rank) | {"plain": numbered((1 << 20,), torch.int32)}
            ckptx.save(
                state,
                tmp_path / kind,
                group=channel,
                format=kind,  # type: ignore[arg-type]
                layouts=LAYOUTS,
                split=split,
            )

    rank_threads(4, job).values()
    expected = {k: numbered(v.shape, getattr(torch, v.dtype)) for k, v in LAYOUTS.items()}
    expected["plain"] = numbered((1 << 20,), torch.int32)
    for kind, reader in (
        ("dcp", None),
        ("safetensors", HuggingFaceStorageReader(str(tmp_path / "safetensors"))),
    ):
        state = {key: torch.zeros_like(value) for key, value in expected.items()}
        state_dict_loader.load(
            state, checkpoint_id=tmp_path / kind, storage_reader=reader, no_dist=True
        )
        for key, value in expected.items():
            assert torch.equal(state[key], value), (kind, key)


def test_whole_tensors_make_a_model_with_an_index(tmp_path: Path) -> None:
    state = {f"w{i}": numbered((100 + i,)) for i in range(6)}

    def job(channel: Channel) -> SaveReport:
        return ckptx.save(state, tmp_path / "x", group=channel, split=False)

    rank_threads(2, job).values()
    assert sorted(os.listdir(tmp_path / "x")) == [
        "ckptx.integrity.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(state)
    found: dict[str, Tensor] = {}
    for name in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "x" / name)
    assert all(torch.equal(found[key], value) for key, value in state.items())


def test_torchtitan_709_copies_are_shared_out_by_bytes(tmp_path: Path) -> None:
    """What two ranks hold goes to the one that has nothing else to write."""
    shape = (1 << 18,)
    alone = Layout.from_mesh(shape=(1 << 19,), dtype="float32", mesh=[0, 1], placements=["S(0)"])

    def job(channel: Channel) -> int:
        state = {"big": numbered((1 << 20,)), "own": torch.zeros(shape)}
        report = ckptx.save(state, tmp_path / "x", group=channel, layouts={"own": alone})
        assert report.lower_bound_slowest_write == 3 << 20
        return report.bytes_written

    assert rank_threads(2, job).values() == (3 << 20, 3 << 20)


@pytest.mark.parametrize("kind", FORMATS)
def test_the_digests_cover_every_byte(tmp_path: Path, kind: Any) -> None:
    ckptx.save(WEIGHTS | {"epoch": 1}, tmp_path / "x", format=kind)
    text = (tmp_path / "x" / "ckptx.integrity.json").read_text()
    found = Integrity.from_json(text, "x")
    for name, blocks in found.blocks.items():
        end = 0
        for block in blocks:
            assert block.begin == end
            end += block.nbytes
        assert end == (tmp_path / "x" / name).stat().st_size


# Twins: one rank fails, all raise.


def failing(
    tmp_path: Path, job: Callable[[Channel], object], error: type[Exception], text: str
) -> None:
    """Every rank raises in time, and nothing is published."""
    for found in rank_threads(3, job).raised(error, within_s=5):
        assert isinstance(found, CheckpointingException)
        assert text in str(found)
    assert not (tmp_path / "x").exists()


def test_nvrx_349_copies_that_differ_are_named(tmp_path: Path) -> None:
    def job(channel: Channel) -> None:
        state = {"a": torch.zeros(5), "w": torch.full((3,), float(channel.rank == 2))}
        ckptx.save(state, tmp_path / "x", group=channel)

    failing(tmp_path, job, CheckpointDisagreement, "the copies of 'w'")


def test_values_that_differ_are_named(tmp_path: Path) -> None:
    def job(channel: Channel) -> None:
        ckptx.save({"epoch": channel.rank}, tmp_path / "x", group=channel)

    failing(tmp_path, job, CheckpointDisagreement, "value epoch")


def test_a_key_that_one_rank_lacks(tmp_path: Path) -> None:
    def job(channel: Channel) -> None:
        state: Mapping[str, object] = {"a": torch.zeros(5)} if channel.rank else {}
        ckptx.save(state, tmp_path / "x", group=channel)

    failing(tmp_path, job, CheckpointDisagreement, "a")


def test_a_value_that_one_rank_cannot_write(tmp_path: Path) -> None:
    def job(channel: Channel) -> None:
        value: object = object() if channel.rank == 1 else 1
        ckptx.save({"v": value}, tmp_path / "x", group=channel)

    failing(tmp_path, job, CheckpointPeerError, "a object is no plain data")


def test_pytorch_191391_a_write_that_fails_on_one_rank_fails_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker's error is not lost, and what was there before stays."""
    ckptx.save({"w": torch.ones(3)}, tmp_path / "old")
    write = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if "shard-00002" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full)

    def job(channel: Channel) -> None:
        ckptx.save({"w": numbered((3 << 20,))}, tmp_path / "old", group=channel, overwrite=True)

    for error in rank_threads(3, job).raised(CheckpointPeerError, within_s=5):
        assert "No space left on device" in str(error)
        assert "shard-00002" in str(error)
    assert torch.equal(opened(tmp_path / "old")["w"], torch.ones(3))
    with pytest.raises(FormatError, match="incomplete"):
        ckptx.open_checkpoint(tmp_path / "old.partial")


def test_a_hole_is_refused(tmp_path: Path) -> None:
    layout = Layout.from_mesh(shape=(8,), dtype="float32", mesh=[0, 1, 2, 3], placements=["S(0)"])

    def job(channel: Channel) -> None:
        state = {"w": torch.zeros(layout.local_shape(channel.rank))}
        ckptx.save(state, tmp_path / "x", group=channel, layouts={"w": layout})

    failing(tmp_path, job, CheckpointPlanError, "the ranks of the group hold 6 of 8")


def test_a_dtype_that_the_format_has_not(tmp_path: Path) -> None:
    state = {"c": torch.zeros(2, dtype=torch.complex128)}
    with pytest.raises(CheckpointPlanError, match="use format='dcp'"):
        ckptx.save(state, tmp_path / "x")
    ckptx.save(state, tmp_path / "x", format="dcp")
    assert opened(tmp_path / "x")["c"].dtype == torch.complex128


def test_an_unknown_format(tmp_path: Path) -> None:
    with pytest.raises(CheckpointPlanError, match="expected 'safetensors' or 'dcp'"):
        ckptx.save({}, tmp_path / "x", format="zip")  # type: ignore[arg-type]


# Asynchronous saves


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("budget", [1 << 30, 256 << 10])
def test_tensors_may_change_once_an_async_save_returns(
    tmp_path: Path, kind: Any, budget: int
) -> None:
    big = numbered((400, 300))

    def job(channel: Channel) -> SaveReport:
        state = {"w": big.clone(), "bias": WEIGHTS["bias"].clone(), "epoch": 1}
        handle = ckptx.save_async(
            state, tmp_path / "x", group=channel, format=kind, max_staging_bytes=budget
        )
        for value in state.values():
            if isinstance(value, Tensor):
                value.zero_()
        report = handle.wait()
        assert handle.done()
        with pytest.raises(CheckpointingException, match="waited for already"):
            handle.wait()
        return report

    rank_threads(2, job).values()
    found = opened(tmp_path / "x")
    assert bits(found["w"]) == bits(big)
    assert bits(found["bias"]) == bits(WEIGHTS["bias"])


def test_an_async_save_reports_its_failure_when_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    def job(channel: Channel) -> None:
        handle = ckptx.save_async({"w": numbered((9, 9))}, tmp_path / "x", group=channel)
        handle.wait()

    monkeypatch.setattr(os, "fsync", lambda fd: refused(fd) if _is_data(fd) else None)
    failing(tmp_path, job, CheckpointPeerError, "Input/output error")


def _is_data(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors")
