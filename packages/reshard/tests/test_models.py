"""Ready models, and models read from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distcore.v1 import PlanError
from reshard.models import MODELS, Weight, model_of


@pytest.mark.parametrize(
    ("name", "tensors", "billions"),
    [
        ("llama-3-8b", 291, 8.03),
        ("llama-3-70b", 723, 70.55),
        ("qwen3-30b-a3b", 18867, 30.53),
        ("deepseek-v3", 45337, 671.03),
        ("moe-1t", 100489, 1028.45),
    ],
)
def test_ready_models_have_their_parameters(name: str, tensors: int, billions: float) -> None:
    model = MODELS[name]()
    assert len(model.weights) == tensors
    assert round(model.nbytes / 2e9, 2) == billions


def test_shapes_in_json(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    table = {
        "model.layers.3.mlp.experts.7.down_proj.weight": {"shape": [4, 8], "dtype": "float32"},
        "norm": [4],
    }
    path.write_text(json.dumps(table))
    model = model_of(str(path))
    assert list(model.weights.values()) == [Weight((4, 8), 1, 3, 7, "float32"), Weight((4,))]
    assert (model.num_layers, model.num_experts) == (4, 8)


def test_the_header_of_a_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    entry = {"dtype": "BF16", "shape": [4, 2], "data_offsets": [0, 16]}
    header = json.dumps({"__metadata__": {"a": "b"}, "w": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    assert dict(model_of(str(path)).weights) == {"w": Weight((4, 2), 0)}


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="neither a file nor one of llama-3-8b"):
        model_of("gpt-5")
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps({"w": "large"}))
    with pytest.raises(PlanError, match="w: expected a list of lengths"):
        model_of(str(path))
    path = tmp_path / "huge.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little"))
    with pytest.raises(PlanError, match="a header of 1099511627776 bytes"):
        model_of(str(path))
