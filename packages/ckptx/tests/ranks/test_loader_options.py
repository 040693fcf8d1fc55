"""load's options on thread ranks: digests, values, casts, and who reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ckptx
from ckptx import CheckpointingException, CheckpointPlanError, LoadReport
from ckptx.savejob import Format
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout

BIG = (torch.arange(6 << 20) % 251).to(torch.uint8)
STATE: dict[str, Any] = {
    "big": BIG,
    "w": torch.arange(1200.0).reshape(30, 40),
    "opt": {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.99)}]},
    "epoch": 3,
}
NBYTES = BIG.nbytes + 4800


def empty() -> dict[str, Any]:
    return {
        "big": torch.zeros_like(BIG),
        "w": torch.zeros(30, 40),
        "opt": {"param_groups": [{"lr": 0.0, "betas": None}]},
        "epoch": 0,
    }


@pytest.fixture(params=["dcp", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    kind: Format = request.param
    ckptx.save(STATE, tmp_path / "x", format=kind)
    return tmp_path / "x"


def flip(path: Path, key: str, at: int) -> str:
    """Change one bit of a tensor; returns the file."""
    chunk = ckptx.open_checkpoint(path).meta(key).chunks[0]
    data = bytearray(Path(chunk.file).read_bytes())
    data[chunk.offset + at] ^= 8
    Path(chunk.file).write_bytes(bytes(data))
    return chunk.file


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_was_saved_is_loaded_and_proven(path: Path, size: int) -> None:
    def job(channel: Channel) -> LoadReport:
        state = empty()
        report = ckptx.load(state, path, group=channel)
        assert torch.equal(state["big"], BIG)
        assert torch.equal(state["w"], STATE["w"])
        assert (state["opt"], state["epoch"]) == (STATE["opt"], 3)
        return report

    reports = rank_threads(size, job).values()
    assert sum(report.bytes_read for report in reports) == NBYTES


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("at", [0, 3 << 20, (5 << 20) + 17])
def test_megatron_5281_a_bit_that_flipped_is_found_by_all_ranks(
    path: Path, size: int, at: int
) -> None:
    """Blocks that two ranks have read a part of each are judged, too."""
    file = flip(path, "big", at)

    def job(channel: Channel) -> None:
        ckptx.load(empty(), path, group=channel)

    for error in rank_threads(size, job).raised(CheckpointingException, within_s=5):
        assert file in str(error)
        assert "tensor 'big'" in str(error)
        assert "damaged" in str(error)

    def trusting(channel: Channel) -> None:
        state = empty()
        ckptx.load(state, path, group=channel, verify=False)
        assert int((state["big"] != BIG).sum()) == 1

    rank_threads(size, trusting).values()


def test_columns_are_proven_although_rows_are_read(tmp_path: Path) -> None:
    whole = torch.arange(1 << 16, dtype=torch.int32).reshape(256, 256)
    ckptx.save({"w": whole}, tmp_path / "x")
    layout = Layout.from_mesh(shape=(256, 256), dtype="int32", mesh=[0, 1], placements=["S(1)"])

    def job(channel: Channel) -> None:
        state = {"w": torch.zeros(256, 128, dtype=torch.int32)}
        ckptx.load(state, tmp_path / "x", group=channel, layouts={"w": layout})
        low = 128 * channel.rank
        assert torch.equal(state["w"], whole[:, low : low + 128])

    rank_threads(2, job).values()
    flip(tmp_path / "x", "w", 1000)
    for error in rank_threads(2, job).raised(CheckpointingException, within_s=5):
        assert "damaged" in str(error)


def test_pytorch_187138_a_cast_must_be_allowed(path: Path) -> None:
    def job(channel: Channel) -> None:
        state = empty() | {"w": torch.zeros(30, 40, dtype=torch.bfloat16)}
        ckptx.load(state, path, group=channel, cast="allow", max_staging_bytes=128 << 10)
        assert torch.equal(state["w"], STATE["w"].bfloat16())
        assert torch.equal(state["big"], BIG)

    rank_threads(2, job).values()
    state = {"w": torch.zeros(30, 40, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointPlanError, match="dtype is bfloat16 in the state dict and float"):
        ckptx.load(state, path, strict=False)
    assert not state["w"].any()


def test_shards_are_cast(path: Path) -> None:
    layout = Layout.from_mesh(shape=(30, 40), dtype="float16", mesh=[0, 1], placements=["S(0)"])

    def job(channel: Channel) -> None:
        state = {"w": torch.zeros(15, 40, dtype=torch.float16)}
        ckptx.load(state, path, group=channel, cast="allow", strict=False, layouts={"w": layout})
        low = 15 * channel.rank
        assert torch.equal(state["w"], STATE["w"][low : low + 15].half())

    rank_threads(2, job).values()


@pytest.mark.parametrize(("mode", "times"), [("exchange", 1), ("direct", 3), ("auto", 1)])
def test_who_reads(path: Path, mode: Any, times: int) -> None:
    def job(channel: Channel) -> LoadReport:
        state = empty()
        report = ckptx.load(state, path, group=channel, mode=mode)
        assert torch.equal(state["big"], BIG)
        return report

    reports = rank_threads(3, job).values()
    assert sum(report.bytes_read for report in reports) == times * NBYTES
    sent = sum(report.bytes_sent for report in reports)
    assert sent == (0 if mode == "direct" else 2 * NBYTES)


def test_what_nobody_needs_twice_is_read_directly(path: Path) -> None:
    layout = Layout.from_mesh(shape=BIG.shape, dtype="uint8", mesh=[0, 1], placements=["S(0)"])

    def job(channel: Channel) -> LoadReport:
        state = {"big": torch.zeros(3 << 20, dtype=torch.uint8)}
        return ckptx.load(state, path, group=channel, strict=False, layouts={"big": layout})

    reports = rank_threads(2, job).values()
    assert [report.bytes_read for report in reports] == [3 << 20, 3 << 20]
    assert [report.bytes_sent for report in reports] == [0, 0]


def test_values_that_do_not_fit(path: Path) -> None:
    state: dict[str, Any] = {"epoch": torch.zeros(1), "w": 3, "more": 1}
    with pytest.raises(CheckpointPlanError) as caught:
        ckptx.load(state, path)
    found = [(problem.where, problem.kind) for problem in caught.value.problems]
    assert ("epoch", "type") in found
    assert ("w", "type") in found
    assert ("more", "missing") in found
    assert ("opt.param_groups.0.lr", "unexpected") in found


def test_values_that_one_rank_wants_alone(path: Path) -> None:
    def job(channel: Channel) -> None:
        state: dict[str, Any] = {"w": torch.zeros(30, 40)}
        if channel.rank:
            state["epoch"] = 0
        ckptx.load(state, path, group=channel, strict=False)

    for error in rank_threads(2, job).raised(ckptx.CheckpointDisagreement, within_s=5):
        assert "value epoch" in str(error)


def test_an_optimizer_goes_on_where_it_was(tmp_path: Path) -> None:
    def made() -> tuple[Tensor, torch.optim.AdamW]:
        weight = torch.nn.Parameter(torch.ones(3))
        return weight, torch.optim.AdamW([weight], lr=0.1)

    def step(weight: Tensor, optimizer: torch.optim.AdamW) -> None:
        weight.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()

    weight, optimizer = made()
    step(weight, optimizer)
    optimizer.param_groups[0]["lr"] = 0.05
    ckptx.save({"w": weight, "optimizer": optimizer.state_dict()}, tmp_path / "x")
    other, fresh = made()
    step(other, fresh)
    state = fresh.state_dict()
    ckptx.load({"w": other, "optimizer": state}, tmp_path / "x")
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["lr"] == 0.05
    for pair in ((weight, optimizer), (other, fresh)):
        step(*pair)
    assert torch.equal(weight, other)
