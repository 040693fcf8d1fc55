"""open_checkpoint: which files count, what they hold, and ranged reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptx
from ckptx import FormatError, ReadError, open_checkpoint
from distcore.v1 import Region

A = torch.arange(12.0).reshape(3, 4)
B = torch.arange(5)


def two_files(directory: Path) -> None:
    save_file({"a": A, "stray": B}, directory / "m-1.safetensors")
    save_file({"b": B}, directory / "m-2.safetensors")
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_a_single_file(tmp_path: Path) -> None:
    save_file({"b": B, "a": A}, tmp_path / "x.safetensors")
    found = open_checkpoint(tmp_path / "x.safetensors")
    assert sorted(found.keys()) == ["a", "b"]
    assert (found.meta("a").shape, found.meta("a").dtype, found.meta("a").nbytes) == (
        (3, 4),
        "float32",
        48,
    )
    assert found.nbytes == 48 + 40
    assert found.format == "safetensors"


def test_the_index_decides_over_stray_files(tmp_path: Path) -> None:
    two_files(tmp_path)
    save_file({"a": A + 1, "c": B}, tmp_path / "consolidated.safetensors")
    save_file({"a": A + 2}, tmp_path / "model.safetensors")
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        found = open_checkpoint(source)
        assert list(found.keys()) == ["a", "b"]
        assert torch.equal(found.read("a"), A)


def test_a_mapping_of_files(tmp_path: Path) -> None:
    two_files(tmp_path)
    found = open_checkpoint({"b": tmp_path / "m-2.safetensors", "a": tmp_path / "m-1.safetensors"})
    assert list(found) == ["b", "a"]
    assert torch.equal(found.read("b"), B)


def test_an_index_that_names_a_key_in_the_wrong_file(tmp_path: Path) -> None:
    two_files(tmp_path)
    with pytest.raises(FormatError, match="the file has it not") as caught:
        open_checkpoint({"b": tmp_path / "m-1.safetensors"})
    assert (caught.value.key, caught.value.file) == ("b", str(tmp_path / "m-1.safetensors"))


def test_an_index_that_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    two_files(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(ReadError, match="No such file") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.filename == str(tmp_path / "m-2.safetensors")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ReadError, match="No such file"):
        open_checkpoint(tmp_path / "none")
    with pytest.raises(FormatError, match="no safetensors file"):
        open_checkpoint(tmp_path)


def test_pieces_of_tensors_are_not_taken_for_whole_ones(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "x.safetensors", {"DCP_SHARDING_INFO": "{}"})
    with pytest.raises(FormatError, match="where in the whole tensor it begins") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.key == "a"


def test_read_a_region(tmp_path: Path) -> None:
    big = torch.arange(200 * 300, dtype=torch.int16).reshape(200, 300)
    tensors = {"big": big, "scalar": torch.tensor(3.5), "none": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors")
    found = open_checkpoint(tmp_path)
    for box in [Region((0, 0), (200, 300)), Region((3, 0), (9, 300)), Region((5, 7), (150, 9))]:
        assert torch.equal(found.read("big", box), big[box.slices()])
    assert found.read("big", Region((4, 4), (4, 9))).shape == (0, 5)
    assert found.read("scalar").item() == 3.5
    assert found.read("none").shape == (0, 4)
    with pytest.raises(ckptx.CheckpointPlanError, match="outside"):
        found.read("big", Region((0, 0), (201, 1)))
    with pytest.raises(KeyError, match="no_such"):
        found.read("no_such")


def test_the_digest_knows_contents_tables_but_not_directories(tmp_path: Path) -> None:
    digests = []
    for name, tensor in (("one", A), ("two", A), ("three", A.T.contiguous())):
        (tmp_path / name).mkdir()
        save_file({"a": tensor}, tmp_path / name / "model.safetensors")
        digests.append(open_checkpoint(tmp_path / name).digest)
    assert digests[0] == digests[1] != digests[2]
