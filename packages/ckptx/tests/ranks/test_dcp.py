"""dcp plug-ins on processes: what torch reads and writes with them, and how many bytes it takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, zeros

import ckptx
from ckptx.dcp import BalancedSavePlanner, ReadOnceReader
from ckptx.report import LoadReport
from ckptx.savejob import Format
from distcore.testing import RankPool, rank_pool
from distcore.v1 import Channel
from distcore.v1.runtime import SoloChannel

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(4) as pool:
        yield pool


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


PLACEMENTS: dict[str, tuple[Placement, Placement]] = {
    "copies of rows": (Replicate(), Shard(0)),
    "copies of columns": (Replicate(), Shard(1)),
    "rows and columns": (Shard(0), Shard(1)),
    "rows twice": (Shard(0), Shard(0)),
    "copies": (Replicate(), Replicate()),
}
SHAPES = ((7, 6), (1, 6), (600, 500))


def distributed() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Any] = {"plain": numbered(9), "epoch": 7, "opt": {"lr": 0.5}}
    for name, placements in PLACEMENTS.items():
        for shape in SHAPES:
            state[f"{name} {shape}"] = distribute_tensor(numbered(*shape), mesh, placements)
    return state


def emptied() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Any] = {"plain": torch.zeros(9), "epoch": 0, "opt": {"lr": 0.0}}
    # Every tensor goes to another layout than it was saved from.
    others = [*list(PLACEMENTS.values())[1:], next(iter(PLACEMENTS.values()))]
    for name, placements in zip(PLACEMENTS, others, strict=True):
        for shape in SHAPES:
            state[f"{name} {shape}"] = zeros(*shape, device_mesh=mesh, placements=placements)
    return state


def check(state: dict[str, Any]) -> None:
    assert torch.equal(state["plain"], numbered(9))
    assert (state["epoch"], state["opt"]) == (7, {"lr": 0.5})
    for name in PLACEMENTS:
        for shape in SHAPES:
            found = state[f"{name} {shape}"]
            assert isinstance(found, DTensor)
            expected = distribute_tensor(numbered(*shape), found.device_mesh, found.placements)
            assert torch.equal(found.to_local(), expected.to_local()), (name, shape)


def save(_: Channel, path: str, balanced: bool) -> tuple[int, ...]:
    planner = BalancedSavePlanner(min_split=1 << 16) if balanced else None
    state_dict_saver.save(distributed(), checkpoint_id=path, planner=planner)
    return planner.loads if planner is not None else ()


def load(_: Channel, path: str, read_once: bool) -> LoadReport | None:
    reader = ReadOnceReader(path) if read_once else None
    state = emptied()
    state_dict_loader.load(state, checkpoint_id=path, storage_reader=reader)
    check(state)
    return reader.report if reader is not None else None


NBYTES = 9 * 4 + len(PLACEMENTS) * sum(h * w for h, w in SHAPES) * 4


@pytest.mark.parametrize("balanced", [False, True])
def test_each_byte_is_read_once(pool: RankPool, tmp_path: Path, balanced: bool) -> None:
    pool.run(save, str(tmp_path), balanced).values()
    reports = [r for r in pool.run(load, str(tmp_path), True).values() if r is not None]
    assert [report.lower_bound_read for report in reports] == [NBYTES] * 4
    read = sum(report.bytes_read for report in reports)
    assert NBYTES <= read <= 1.02 * NBYTES
    assert all(report.bytes_received == report.lower_bound_received for report in reports)


def test_what_is_written_in_balance_is_read_by_torch_alone(pool: RankPool, tmp_path: Path) -> None:
    loads = pool.run(save, str(tmp_path), True).values()[0]
    assert sum(loads) == NBYTES
    assert max(loads) <= 1.1 * NBYTES / 4
    pool.run(load, str(tmp_path), False).values()


def save_with_ckptx(channel: Channel, path: str) -> None:
    kinds: tuple[Format, ...] = ("dcp", "safetensors")
    for kind in kinds:
        ckptx.save(distributed(), f"{path}/{kind}", group=channel, format=kind)


def test_what_ckptx_saves_is_read_by_torch(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save_with_ckptx, str(tmp_path)).values()
    pool.run(load, str(tmp_path / "dcp"), False).values()
    pool.run(load, str(tmp_path / "dcp"), True).values()
    pool.run(load, str(tmp_path / "safetensors"), True).values()


def load_with_ckptx(channel: Channel, path: str, mode: Any) -> int:
    state = emptied()
    report = ckptx.load(state, path, group=channel, mode=mode)
    check(state)
    return report.bytes_read


def test_ckptx_loads_what_torch_saved(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save, str(tmp_path), False).values()
    for mode in ("auto", "exchange"):
        assert sum(pool.run(load_with_ckptx, str(tmp_path), mode).values()) <= 1.02 * NBYTES
    assert sum(pool.run(load_with_ckptx, str(tmp_path), "direct").values()) > 1.5 * NBYTES


def broken(channel: Channel, path: str) -> None:
    if channel.rank == 2:
        path += "/none"
    load(channel, path, True)


def test_a_rank_that_cannot_read_fails_all(pool: RankPool, tmp_path: Path) -> None:
    pool.run(save, str(tmp_path), False).values()
    for error in pool.run(broken, str(tmp_path)).exceptions:
        assert error is not None
        # torch 2.9 says only that there is no metadata.
        assert "No such file" in str(error) or "metadata is not None" in str(error)


# One process


def test_a_dtype_that_differs_is_an_error(tmp_path: Path) -> None:
    state_dict_saver.save({"w": numbered(8)}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(8, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointException, match="bfloat16 in the state dict and float32"):
        state_dict_loader.load(
            state, storage_reader=ReadOnceReader(tmp_path, group=SoloChannel()), no_dist=True
        )
    assert not state["w"].any()
    reader = ReadOnceReader(tmp_path, group=SoloChannel(), cast=True)
    state_dict_loader.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["w"], numbered(8).bfloat16())


class Evil:
    """Leaves a trace where a pickle of it is executed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def test_a_value_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, trace = tmp_path / "x", tmp_path / "trace"
    state_dict_saver.save({"v": Evil(str(trace))}, checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointException, match="its value needs"):
        state_dict_loader.load(
            {"v": 1}, storage_reader=ReadOnceReader(path, group=SoloChannel()), no_dist=True
        )
    assert not trace.exists()
    state_dict_loader.load({"v": 1}, checkpoint_id=path, no_dist=True)
    assert trace.exists()


def test_pytorch_104081_a_copy_goes_to_the_rank_with_less(tmp_path: Path) -> None:
    """Torch gives the copies to rank 0, which has most already."""
    planner = BalancedSavePlanner()
    planner.set_up_planner({"a": torch.zeros(100), "b": torch.zeros(100)})
    both = planner.create_local_plan()
    planner.set_up_planner({"a": torch.zeros(100)})
    one = planner.create_local_plan()
    planner.create_global_plan([both, one])
    assert planner.loads == (400, 400)
