"""The command line, called as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reshard import ReshardPlan

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from reshard.cli import app


def called(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def shapes(tmp_path: Path) -> str:
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"w": {"shape": [4, 2], "dtype": "float32"}, "norm": [3]}))
    return str(path)


def test_plan_shows_bytes_beside_bounds(shapes: str) -> None:
    text = called("plan", "--shapes", shapes, "--src", "fsdp=2", "--dst", "dp=2@2")
    assert "bytes between ranks" in text
    assert "1.0000" in text
    assert "2 tensors of 38 bytes" in text


def test_plan_as_json(shapes: str) -> None:
    table = json.loads(
        called("plan", "--shapes", shapes, "--src", "fsdp=2", "--dst", "dp=2@2", "--json")
    )
    assert table["stats"]["wire_bytes"] == table["bounds"]["wire_bytes"] == 76


def test_plan_writes_the_plan_and_the_picture(shapes: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan, picture = tmp_path / "plan.json", tmp_path / "traffic.png"
    called(
        *("plan", "--shapes", shapes, "--src", "fsdp=2", "--dst", "tp=2@1"),
        *("--output", str(plan), "--plot", str(picture), "--ranks-per-node", "2"),
    )
    assert ReshardPlan.from_json(plan.read_text()).nodes == {0: 0, 1: 0, 2: 1}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plan_explains_a_tensor(shapes: str) -> None:
    text = called("plan", "--shapes", shapes, "--src", "dp=1", "--dst", "dp=1@1", "--explain", "w")
    assert "stage 1: 0 -> 1  (0, 0) to (4, 2)" in text


def test_simulate_checks_every_element(shapes: str) -> None:
    text = called("simulate", "--shapes", shapes, "--src", "fsdp=2,tp=2", "--dst", "tp=3@2")
    assert "2 tensors played on 3 ranks: 17 elements checked, 0 tensors wrong" in text


def test_mistakes_are_told_in_a_line(shapes: str) -> None:
    text = called("plan", "--shapes", shapes, "--src", "cp=2", "--dst", "dp=1", code=1)
    assert "every axis is one of pp, ep, dp, fsdp, tp" in text
    assert "neither a file nor one of" in called(
        "simulate", "--shapes", "nothing", "--src", "dp=1", "--dst", "dp=1", code=1
    )
