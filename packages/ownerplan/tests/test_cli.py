"""The command, from a file of shapes to a table, JSON and a picture."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("typer")

from typer.testing import CliRunner

from ownerplan.cli import app

SHAPES = {
    "embed.weight": [100, 8],
    "h.0.attn": [8, 8],
    "h.0.norm": [8],
    "h.0.up": [32, 8],
    "h.1.attn": [8, 8],
    "h.1.norm": [8],
    "h.1.up": [32, 8],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(SHAPES))
    return path


def plan_of(model: Path, *options: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["plan", "--shapes", str(model), "--json", *options])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_the_matrices_of_all_layers_are_planned_together(model: Path) -> None:
    """With s = 8, a step has 6 * 8^3 operations for (8, 8) and 18 * 8^3 for (32, 8)."""
    plan = plan_of(model, "--ranks", "2")
    assert plan["owners"] == [[], [0, 0], [1, 1]]
    assert plan["loads"] == [5 * 24 * 512, 5 * 24 * 512]


def test_the_documents_cost_and_policy_can_be_had(model: Path) -> None:
    plan = plan_of(model, "--ranks", "2", "--cost", "document", "--policy", "greedy")
    assert plan["owners"] == [[], [1, 0], [1, 0]]
    assert plan["costs"] == [[], [64 * 41, 256 * 41], [64 * 41, 256 * 41]]


def test_a_flat_buffer_has_other_holders_than_chunks(model: Path) -> None:
    """Twice 168 elements: the small matrix lies on one rank, the large one on both."""
    chunks = plan_of(model, "--ranks", "2", "--owners", "holders", "--dtype", "float32")
    buffer = plan_of(
        model,
        *("--ranks", "2", "--owners", "holders", "--dtype", "float32", "--layout", "buffer"),
    )
    assert chunks["bytes_lower_bound"] == 2 * 4 * 2 * (32 + 128)
    assert buffer["bytes_lower_bound"] == 2 * 4 * 2 * (0 + 96)


def test_what_takes_part_can_be_said(model: Path) -> None:
    plan = plan_of(model, "--ranks", "1", "--exclude", "attn|up")
    assert [len(group) for group in plan["owners"]] == [1, 0, 0]  # type: ignore[attr-defined]


def test_a_safetensors_file_says_the_same(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(dims) for name, dims in SHAPES.items()}, path)
    plans = [plan_of(file, "--ranks", "2") for file in (model, path)]
    assert sorted(map(len, plans[1]["costs"])) == [0, 2, 2]  # type: ignore[call-overload]
    assert plans[0]["loads"] == plans[1]["loads"]


def test_a_table_is_shown(model: Path) -> None:
    result = CliRunner().invoke(
        app,
        ["plan", "--shapes", str(model), "--ranks", "2", "--tflops", "1e-6", "--bandwidth", "1"],
    )
    assert result.exit_code == 0, result.output
    assert "4 matrices on 2 ranks" in result.output
    assert "makespan 6.144e+04, bound 6.144e+04, ratio 1.0000" in result.output
    assert "compute 61.440 ms, communication 0.001 ms: compute sets the pace" in result.output


def test_of_many_ranks_the_busiest_are_shown(model: Path) -> None:
    result = CliRunner().invoke(app, ["plan", "--shapes", str(model), "--ranks", "100"])
    assert "the 64 ranks with the highest load" in result.output


def test_a_picture_is_drawn(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "load.svg"
    plan_of(model, "--ranks", "2", "--plot", str(path))
    assert "<svg" in path.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", "0"], "equal to 1"),
        (["--ranks", "2", "--dtype", "float7"], "float7"),
        (["--ranks", "2", "--exclude", "("], "missing )"),
        (["--ranks", "2", "--shapes", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_is_wrong_is_said(model: Path, options: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["plan", "--shapes", str(model), *options])
    assert result.exit_code == 2
    assert words in result.output.replace("\n", " ")


def test_without_its_libraries_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "ownerplan.cli")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ownerplan\[cli\]'") as caught:
        import_module("ownerplan.cli")
    assert caught.value.name == "typer"
