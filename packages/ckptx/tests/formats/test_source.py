"""source: which files count, and what a directory that is no checkpoint says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptx import FormatError, open_checkpoint
from ckptx.formats.source import INCOMPLETE

A = torch.arange(6.0).reshape(2, 3)


def test_a_directory_that_is_being_written_is_refused(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / INCOMPLETE).touch()
    with pytest.raises(FormatError, match="incomplete: its writer did not come to the end"):
        open_checkpoint(tmp_path)


def test_values_in_the_free_text(tmp_path: Path) -> None:
    text = '{"epoch":3,"betas":{"__ckptx__":"tuple","of":[0.5,1]}}'
    save_file({"a": A}, tmp_path / "model.safetensors", {"ckptx.values": text})
    found = open_checkpoint(tmp_path)
    assert {key: found.value(key) for key in found.objects} == {"epoch": 3, "betas": (0.5, 1)}
    assert list(found) == ["a", "epoch", "betas"]


@pytest.mark.parametrize("text", ["[]", "{"])
def test_damaged_values(tmp_path: Path, text: str) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors", {"ckptx.values": text})
    with pytest.raises(FormatError, match=r"ckptx\.values is"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_or_parts(tmp_path: Path) -> None:
    for name in "xy":
        save_file({name: A}, tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match="more than one"):
        open_checkpoint(tmp_path)


def test_a_model_file_decides_over_parts(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"b": A}, tmp_path / "other.safetensors", {"DCP_SHARDING_INFO": "{}"})
    assert list(open_checkpoint(tmp_path)) == ["a"]
