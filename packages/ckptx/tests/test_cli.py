"""The command line: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx.cli import app

typer_testing = pytest.importorskip("typer.testing")
RUNNER = typer_testing.CliRunner()

WEIGHT = torch.arange(24.0).reshape(6, 4)
STATE = {
    "layer.weight": WEIGHT,
    "layer.bias": torch.arange(6, dtype=torch.int8),
    "epoch": 3,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ckptx.save(STATE, tmp_path / "x", format="dcp")
    return tmp_path / "x"


def test_inspect(path: Path) -> None:
    found = RUNNER.invoke(app, ["inspect", str(path), "--json"])
    assert json.loads(found.stdout) == {
        "format": "dcp",
        "nbytes": 102,
        "digests": True,
        "tensors": {
            "layer.bias": {"dtype": "int8", "shape": [6], "nbytes": 6},
            "layer.weight": {"dtype": "float32", "shape": [6, 4], "nbytes": 96},
        },
        "values": ["epoch"],
    }
    found = RUNNER.invoke(app, ["inspect", str(path), "--match", "*.weight"])
    assert "layer.weight" in found.stdout
    assert "6x4" in found.stdout
    assert "layer.bias" not in found.stdout


def test_inspect_nothing(tmp_path: Path) -> None:
    found = RUNNER.invoke(app, ["inspect", str(tmp_path)])
    assert found.exit_code == 1
    assert "no safetensors file" in found.stderr


def test_plan(path: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    arguments = ["plan", str(path), "--ranks", "4", "--replicas", "2", "--json"]
    found = json.loads(RUNNER.invoke(app, [*arguments, "--plot", str(picture)]).stdout)
    assert sum(found["read"]) == 102 == found["lower_bound"]["read"]
    assert sum(found["received"]) == 102
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = RUNNER.invoke(app, arguments[:-1])
    assert "together 102 bytes" in shown.stdout
    assert RUNNER.invoke(app, ["plan", str(path), "--ranks", "4", "--replicas", "3"]).exit_code == 2


def test_verify(path: Path) -> None:
    found = RUNNER.invoke(app, ["verify", str(path)])
    assert found.exit_code == 0
    assert "3 entries, proven:" in found.stdout
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    offset = ckptx.open_checkpoint(path).meta("layer.weight").chunks[0].offset
    data[offset + 5] ^= 1
    file.write_bytes(bytes(data))
    found = RUNNER.invoke(app, ["verify", str(path)])
    assert found.exit_code == 1
    assert "damaged" in found.stdout
    assert "layer.weight" in found.stdout.replace("\n", "")


def test_convert(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "y"
    found = RUNNER.invoke(app, ["convert", str(path), str(target)])
    assert found.exit_code == 0, found.output
    assert torch.equal(load_file(target / "model.safetensors")["layer.weight"], WEIGHT)
    assert ckptx.open_checkpoint(target).value("epoch") == 3
    found = RUNNER.invoke(app, ["convert", str(path), str(target), "--to", "dcp"])
    assert found.exit_code == 1
    assert "is there already" in found.stderr
    found = RUNNER.invoke(app, ["convert", str(path), str(target), "--to", "dcp", "--overwrite"])
    assert found.exit_code == 0
    assert ckptx.open_checkpoint(target).format == "dcp"
    assert RUNNER.invoke(app, ["convert", str(path), str(target), "--to", "zip"]).exit_code == 2


def test_convert_on_two_ranks(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "y"
    code = "import sys; from ckptx.cli import app; app()"
    base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    base["MASTER_PORT"] = str(29500 + os.getpid() % 3000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code, "convert", str(path), str(target)],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=90) for rank in ranks] == [0, 0]
    found = ckptx.open_checkpoint(target)
    assert len({chunk.file for key in found.tensors for chunk in found.meta(key).chunks}) == 2
    assert torch.equal(found.read("layer.weight"), WEIGHT)
