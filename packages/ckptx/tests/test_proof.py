"""proof: everything that is damaged is told, by digests, by the archives' own, and by SHA-256."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

import ckptx
from ckptx.proof import prove

STATE = {"a": torch.arange(100.0), "b": torch.arange(50), "epoch": 3}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(bytes(data))


def test_every_byte_that_was_written_is_proven(tmp_path: Path) -> None:
    for kind in ("dcp", "safetensors"):
        path = tmp_path / kind
        report = ckptx.save(STATE, path, format=kind)
        found = prove(ckptx.open_checkpoint(path))
        assert (found.damage, found.proven) == ([], {"ckptx digests": report.file_bytes_written})


def test_each_damaged_place_is_told(tmp_path: Path) -> None:
    ckptx.save(STATE, tmp_path / "x")
    checkpoint = ckptx.open_checkpoint(tmp_path / "x")
    for key in ("a", "b"):
        flip(tmp_path / "x" / "model.safetensors", checkpoint.meta(key).chunks[0].offset + 8)
    found = prove(checkpoint)
    assert len(found.damage) == 2
    assert "tensor 'a'" in found.damage[1] or "tensor 'a'" in found.damage[0]
    with (tmp_path / "x" / "model.safetensors").open("ab") as file:
        file.write(b"more")
    assert any("it was written with" in text for text in prove(checkpoint).damage)


@pytest.mark.filterwarnings("ignore")
def test_archives_of_torch_prove_themselves(tmp_path: Path) -> None:
    state_dict_saver.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    checkpoint = ckptx.open_checkpoint(tmp_path)
    assert prove(checkpoint).proven == {"archive CRC-32": 800}
    flip(tmp_path / "__0_0.distcp", checkpoint.meta("b").chunks[0].offset)
    (text,) = prove(checkpoint).damage
    assert "tensor 'b'" in text
    assert "CRC-32" in text


@pytest.mark.filterwarnings("ignore")
def test_hashes_of_whole_files(tmp_path: Path) -> None:
    state_dict_saver.save(STATE, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    file = tmp_path / "__0_0.distcp"
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    (tmp_path / "integrity.json").write_text(json.dumps(hashes))
    found = prove(ckptx.open_checkpoint(tmp_path))
    assert (found.damage, found.proven["SHA-256"]) == ([], file.stat().st_size)
    flip(file, 100)
    assert any("SHA-256" in text for text in prove(ckptx.open_checkpoint(tmp_path)).damage)


def test_a_hole_is_told(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    info = {"DCP_SHARDING_INFO": json.dumps({"w": {"saved_offsets": [4]}})}
    save_file({"w": torch.ones(4)}, tmp_path / "x.safetensors", info)
    (text,) = prove(ckptx.open_checkpoint(tmp_path)).damage
    assert "is not stored once" in text
