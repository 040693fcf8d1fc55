"""Checkpoints that other releases wrote themselves (see data/write_checkpoints.py) are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptx
from distcore.testing import rank_threads
from distcore.v1 import Channel

DATA = Path(__file__).parents[1] / "data"
MODEL = {
    "weight": torch.arange(12.0).view(3, 4),
    "turned": torch.tensor([[0, 3], [1, 4], [2, 5]]),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "eight": torch.arange(4.0).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
}


def blank() -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in MODEL.items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype == torch.float8_e4m3fn:
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(one, other)


@pytest.mark.parametrize("mode", ["exchange", "direct"])
def test_a_directory_of_torch_2_9(mode: Any) -> None:
    def rank(channel: Channel) -> dict[str, Any]:
        state: dict[str, Any] = {
            "model": blank(),
            "optimizer": {"step": torch.tensor(0), "lr": 0.0, "betas": (0.0, 0.0)},
            "epoch": 0,
            "name": "",
        }
        report = ckptx.load(state, DATA / "torch-2.9.1", group=channel, mode=mode)
        assert report.bytes_read <= 122
        return state

    for state in rank_threads(2, rank).values():
        assert all(same(state["model"][key], value) for key, value in MODEL.items())
        assert state["optimizer"] == {"step": torch.tensor(7), "lr": 0.125, "betas": (0.9, 0.95)}
        assert (state["epoch"], state["name"]) == (3, "run")


def test_sharded_safetensors_of_torch_2_9() -> None:
    state = {"model": blank()}
    ckptx.load(state, DATA / "torch-2.9.1-hf")
    assert all(same(state["model"][key], value) for key, value in MODEL.items())


def test_a_directory_of_megatron_core_0_16() -> None:
    found = ckptx.open_checkpoint(DATA / "megatron-core-0.16.1")
    assert found.format == "megatron"
    assert sorted(found) == [
        "common_state/shard_0_1",
        "decoder.bias",
        "decoder.weight",
        "rng_state/shard_0_2",
        "rng_state/shard_1_2",
    ]
    assert torch.equal(found.read("decoder.weight"), torch.arange(24.0).view(4, 6))
    assert torch.equal(found.read("decoder.bias"), torch.arange(5, dtype=torch.bfloat16))
    # A list, as Megatron-Core stores all objects that a rank has under one key together.
    assert found.value("rng_state/shard_1_2") == [{"seed": 1}]
    assert found.value("common_state/shard_0_1") == {"iteration": 11, "args": {"lr": 0.5}}


def test_a_directory_of_megatron_core_is_loaded_by_another_number_of_ranks() -> None:
    def rank(channel: Channel) -> dict[str, torch.Tensor]:
        state = {"decoder.weight": torch.zeros(4, 6)}
        ckptx.load(state, DATA / "megatron-core-0.16.1", group=channel, strict=False)
        return state

    for state in rank_threads(3, rank).values():
        assert torch.equal(state["decoder.weight"], torch.arange(24.0).view(4, 6))
