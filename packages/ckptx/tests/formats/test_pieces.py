"""pieces: parts in several files become one tensor, and contradictions are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptx
from ckptx import CheckpointPlanError, FormatError, open_checkpoint

W = torch.arange(24, dtype=torch.float32).reshape(6, 4)


def part(path: Path, number: int, tensors: dict[str, torch.Tensor], **offsets: list[int]) -> None:
    info = {key: {"saved_offsets": offset} for key, offset in offsets.items()}
    file = path / f"shard-{number:05}-model-00001-of-00001.safetensors"
    save_file(tensors, file, {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"})


def test_parts_of_several_files(tmp_path: Path) -> None:
    scalar = torch.tensor(2.5)
    part(tmp_path, 1, {"w": W[:4].clone(), "s": scalar}, w=[0, 0], s=[])
    part(tmp_path, 2, {"w": W[4:].clone()}, w=[4, 0])
    found = open_checkpoint(tmp_path)
    assert found.meta("w").shape == (6, 4)
    assert torch.equal(found.read("w"), W)
    assert torch.equal(found.read("s"), scalar)
    state = {"w": torch.zeros(6, 4), "s": torch.zeros(())}
    ckptx.load(state, tmp_path)
    assert torch.equal(state["w"], W)


def test_a_stray_file_of_whole_tensors_does_not_count(tmp_path: Path) -> None:
    part(tmp_path, 1, {"w": W[:4].clone()}, w=[0, 0])
    part(tmp_path, 2, {"w": W[4:].clone()}, w=[4, 0])
    save_file({"w": torch.full((6, 4), 9.0)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(open_checkpoint(tmp_path).read("w"), W)


def test_a_part_stored_twice_is_taken_once(tmp_path: Path) -> None:
    for number in (1, 2):
        part(tmp_path, number, {"w": W}, w=[0, 0])
    assert len(open_checkpoint(tmp_path).meta("w").chunks) == 1


def test_sglang_36438_a_missing_part_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    part(tmp_path, 1, {"w": W[:2].clone()}, w=[0, 0])
    part(tmp_path, 2, {"w": W[4:].clone()}, w=[4, 0])
    state = {"w": torch.full((6, 4), 7.0)}
    with pytest.raises(CheckpointPlanError, match="is not stored once"):
        ckptx.load(state, tmp_path)
    assert torch.equal(state["w"], torch.full((6, 4), 7.0))


@pytest.mark.parametrize("offset", [[0], [0, -1], ["a", 0], None, [0, True]])
def test_damaged_offsets(tmp_path: Path, offset: object) -> None:
    info = json.dumps({"w": {"saved_offsets": offset}})
    save_file({"w": W}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": info})
    with pytest.raises(FormatError, match="does not say where") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.key == "w"


@pytest.mark.parametrize("text", ["nothing", "[]"])
def test_damaged_information(tmp_path: Path, text: str) -> None:
    save_file({"w": W}, tmp_path / "a.safetensors", {"DCP_SHARDING_INFO": text})
    with pytest.raises(FormatError, match="DCP_SHARDING_INFO is"):
        open_checkpoint(tmp_path)


def test_files_that_contradict(tmp_path: Path) -> None:
    part(tmp_path, 1, {"w": W}, w=[0, 0])
    part(tmp_path, 2, {"w": W.half()}, w=[6, 0])
    with pytest.raises(FormatError, match="float16 here, float32 in another"):
        open_checkpoint(tmp_path)
    part(tmp_path, 2, {"w": W[0].clone()}, w=[6])
    with pytest.raises(FormatError, match="number of dims"):
        open_checkpoint(tmp_path)
