"""What was reported against torch's distributed checkpoint and gloo still happens there, in 2.13.

Each test gives one input to torch, where it goes wrong as reported, and to ckptx, where it does
not. Should one fail, torch may have mended it: then the test has done its work.

Not here, because torch 2.13 does the right thing with the input by itself: a key that one rank
lacks (an error on all ranks where a collective needs it), and scalars in safetensors files
(safetensors 280). Not here either, because it takes more than two ranks or a GPU: the memory of
`broadcast_from_rank0` (pytorch 149640) and object collectives over NCCL (pytorch 145965).
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint._consolidate_hf_safetensors import consolidate_safetensors_files
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

import ckptx
from ckptx import CheckpointingException, CheckpointPlanError
from ckptx.distribution import distribution_of, shard_rows
from ckptx.exchange import ExchangeOptions, exchange
from ckptx.sharded import ShardedTensor
from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, Layout, Region

pytestmark = [
    pytest.mark.skipif(
        not torch.__version__.startswith("2.13."), reason="the reports were looked at in torch 2.13"
    ),
    pytest.mark.filterwarnings("ignore"),
]

MIB = 1 << 20


def save(state: Mapping[str, Any], path: Path) -> None:
    state_dict_saver.save(dict(state), checkpoint_id=path, no_dist=True)


def load(state: dict[str, Any], path: Path) -> None:
    state_dict_loader.load(state, checkpoint_id=path, no_dist=True)


def load_hf(state: dict[str, Any], path: Path) -> None:
    reader = HuggingFaceStorageReader(str(path))
    state_dict_loader.load(state, storage_reader=reader, no_dist=True)


def load_plan(state: dict[str, Any], path: Path) -> tuple[DefaultLoadPlanner, LoadPlan]:
    """What one rank plans to read."""
    planner = DefaultLoadPlanner()
    planner.set_up_planner(state, FileSystemReader(path).read_metadata(), is_coordinator=True)
    return planner, planner.create_local_plan()


def save_plan(state: dict[str, Any]) -> SavePlan:
    """What one rank would write."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


# Reads


def test_pytorch_118327_121519_every_rank_reads_everything(tmp_path: Path) -> None:
    save({"w": torch.arange(100.0), "opt": {"lr": 0.5}}, tmp_path)
    state: dict[str, Any] = {"w": torch.zeros(100), "opt": {"lr": 0.0}}
    plans = [load_plan(state, tmp_path) for _ in range(2)]
    planner = plans[0][0]
    found = planner.create_global_plan([plan for _, plan in plans])
    names = [[item.storage_index.fqn for item in plan.items] for plan in found]
    assert names == [["w", "opt.lr"]] * 2

    def job(channel: Channel) -> int:
        mine = {"w": torch.zeros(100), "opt": {"lr": 0.0}}
        return ckptx.load(mine, tmp_path, group=channel).bytes_read

    assert sum(rank_threads(2, job).values()) == 400


class Slices(DefaultLoadPlanner):
    """Takes parts of a tensor to where they belong in one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        begin = read_item.storage_offsets[0]
        return self._target[begin : begin + read_item.lengths[0]]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


def test_pytorch_76331_eight_slices_load_the_tensor_eight_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.arange(MIB, dtype=torch.float32)
    save({"w": whole}, tmp_path)
    loaded: list[int] = []
    unpickle = torch.load

    def counted(*args: Any, **options: Any) -> Any:
        found = unpickle(*args, **options)
        loaded.append(found.nbytes)
        return found

    reader = FileSystemReader(tmp_path)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    chunks = [
        ChunkStorageMetadata(torch.Size([low]), torch.Size([MIB // 8]))
        for low in range(0, MIB, MIB // 8)
    ]
    entry: Any = metadata.state_dict_metadata["w"]
    items = create_read_items_for_chunk_list("w", entry, chunks)
    target = torch.zeros(MIB)
    monkeypatch.setattr(torch, "load", counted)
    reader.read_data(LoadPlan(items), Slices(target)).wait()
    assert torch.equal(target, whole)
    assert sum(loaded) == 8 * whole.nbytes

    read = 0
    count = os.preadv

    def counted_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        found = count(fd, buffers, offset)
        read += found
        return found

    checkpoint = ckptx.open_checkpoint(tmp_path)
    monkeypatch.setattr(os, "preadv", counted_read)
    for low in range(0, MIB, MIB // 8):
        checkpoint.read("w", Region((low,), (low + MIB // 8,)))
    assert read == whole.nbytes


def test_tnt_1064_what_is_told_grows_with_the_tensors(tmp_path: Path) -> None:
    """Every rank's plan goes to rank 0, an entry for each tensor; ckptx tells a digest."""
    sizes = []
    for count in (4, 400):
        state = {f"w{i}": torch.zeros(4) for i in range(count)}
        save(state, tmp_path / str(count))
        sizes.append(len(pickle.dumps(load_plan(state, tmp_path / str(count))[1])))
    assert sizes[1] > 40_000 > 40 * sizes[0]


# Balance


def test_pytorch_104081_the_rank_that_has_most_gets_the_copies(tmp_path: Path) -> None:
    """A on both ranks and B on rank 0 alone: 200 and 0."""
    both = save_plan({"A": torch.zeros(100), "B": torch.zeros(100)})
    found = dedup_save_plans([both, save_plan({"A": torch.zeros(100)})])
    assert [[item.index.fqn for item in plan.items] for plan in found] == [["A", "B"], []]

    layout = Layout.replicated(shape=(100,), dtype="float32", ranks=(0,))

    def job(channel: Channel) -> int:
        state = {"A": torch.zeros(100), "B": torch.zeros(0 if channel.rank else 100)}
        layouts = {"B": layout}
        return ckptx.save(state, tmp_path / "x", group=channel, layouts=layouts).bytes_written

    assert rank_threads(2, job).values() == (400, 400)


def test_pytorch_125740_scalars_are_strewn_over_all_files() -> None:
    """So each rank, loading its own layout again, needs the files of all others.

    ckptx may strew them too, but a file is read by one rank; see test_loader_reports.
    """
    steps = {f"{i}.step": torch.tensor(1.0) for i in range(6)}
    found = dedup_save_plans([save_plan(steps), save_plan(steps)])
    assert [len(plan.items) for plan in found] == [3, 3]


# Silent errors


def test_pytorch_187138_a_dtype_is_cast_without_a_word(tmp_path: Path) -> None:
    save({"w": torch.full((3,), 1.0009765625)}, tmp_path)
    state = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    load(state, tmp_path)
    assert state["w"].tolist() == [1.0] * 3
    with pytest.raises(CheckpointPlanError, match="dtype is bfloat16"):
        ckptx.load(state, tmp_path)


def test_a_hole_is_left_as_it_was(tmp_path: Path) -> None:
    save({"w": torch.arange(4.0)}, tmp_path)
    file = tmp_path / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([8])
    file.write_bytes(pickle.dumps(metadata))
    state = {"w": torch.full((8,), 7.0)}
    load(state, tmp_path)
    assert state["w"].tolist() == [0, 1, 2, 3, 7, 7, 7, 7]
    with pytest.raises(CheckpointPlanError, match="not stored once"):
        ckptx.load(state, tmp_path)


def test_sglang_36438_a_missing_part_is_not_noticed(tmp_path: Path) -> None:
    """Reported of another loader of parts; torch's reader of safetensors does the same."""
    whole = torch.arange(12.0).reshape(6, 2)
    for low in (0, 4):
        info = json.dumps({"w": {"saved_offsets": [low, 0]}})
        file = tmp_path / f"shard-{low:05}-model-00001-of-00001.safetensors"
        save_file({"w": whole[low : low + 2].clone()}, file, {"DCP_SHARDING_INFO": info})
    state = {"w": torch.full((6, 2), 9.0)}
    load_hf(state, tmp_path)
    assert state["w"][2:4].tolist() == [[9, 9], [9, 9]]
    with pytest.raises(CheckpointPlanError, match="not stored once"):
        ckptx.load(state, tmp_path)


def test_a_stray_file_wins_over_the_index(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"w": torch.full((2,), 9.0)}, tmp_path / "consolidated.safetensors")
    save_file({"w": torch.full((2,), 9.0)}, tmp_path / "zzz.safetensors")
    state = {"w": torch.zeros(2)}
    load_hf(state, tmp_path)
    assert state["w"].tolist() == [9, 9]
    ckptx.load(state, tmp_path)
    assert state["w"].tolist() == [1, 1]


def test_pytorch_192485_consolidation_fails_on_integers_and_empties_scalars(
    tmp_path: Path,
) -> None:
    for name, value in {"int": torch.arange(8), "scalar": torch.tensor(2.5)}.items():
        source, target = tmp_path / name, tmp_path / f"{name} whole"
        source.mkdir()
        target.mkdir()
        info = json.dumps({"x": {"saved_offsets": [0] * value.ndim}})
        file = source / "shard-00001-model-00001-of-00001.safetensors"
        save_file({"x": value}, file, {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0"})
        if name == "int":
            with pytest.raises(TypeError, match="floating point"):
                consolidate_safetensors_files(str(source), str(target), {"x": 1})
        else:
            consolidate_safetensors_files(str(source), str(target), {"x": 1})
            (made,) = target.glob("*.safetensors")
            assert load_file(made)["x"].item() == 0
        ckptx.convert(source, tmp_path / f"{name} by ckptx")
        assert torch.equal(ckptx.open_checkpoint(tmp_path / f"{name} by ckptx").read("x"), value)


def test_torchtitan_4011_a_bit_that_flipped_on_the_disk_is_loaded(tmp_path: Path) -> None:
    whole = torch.arange(1000.0)
    state = {"w": torch.zeros(1000)}
    save({"w": whole}, tmp_path / "torch")
    ckptx.save({"w": whole}, tmp_path / "ckptx", format="dcp")
    for name in ("torch", "ckptx"):
        chunk = ckptx.open_checkpoint(tmp_path / name).meta("w").chunks[0]
        data = bytearray(Path(chunk.file).read_bytes())
        data[chunk.offset + 1000] ^= 1
        Path(chunk.file).write_bytes(data)
    load(state, tmp_path / "torch")
    assert int((state["w"] != whole).sum()) == 1
    with pytest.raises(CheckpointingException, match="damaged"):
        ckptx.load(state, tmp_path / "ckptx")


def test_pytorch_191391_the_error_of_a_writing_thread_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save returns and publishes; only the load finds that nothing is there."""
    failed = threading.Event()
    main = threading.get_ident()
    write = filesystem._write_item

    def full(*args: Any) -> Any:
        if threading.get_ident() == main:
            failed.wait(20)
            return write(*args)
        failed.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(filesystem, "_write_item", full)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    state = {f"w{i}": torch.ones(4) for i in range(4)}
    writer = FileSystemWriter(tmp_path / "torch", thread_count=2)
    state_dict_saver.save(state, storage_writer=writer, no_dist=True)
    assert failed.is_set()
    assert (tmp_path / "torch" / ".metadata").exists()
    with pytest.raises(CheckpointException, match="KeyError"):
        load({key: torch.zeros(4) for key in state}, tmp_path / "torch")

    def refused(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refused)
    with pytest.raises(CheckpointingException, match="No space left"):
        ckptx.save(state, tmp_path / "ckptx")
    assert not (tmp_path / "ckptx").exists()


# Code in files


class Evil:
    """Leaves a trace where a pickle of it is executed."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_pytorch_189308_the_metadata_runs_code(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "x")
    file = tmp_path / "x" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = Evil(tmp_path / "trace")
    file.write_bytes(pickle.dumps(metadata))
    ckptx.load({"w": torch.zeros(2)}, tmp_path / "x")
    assert not (tmp_path / "trace").exists()
    FileSystemReader(tmp_path / "x").read_metadata()
    assert (tmp_path / "trace").exists()


def test_automodel_3240_a_value_runs_code(tmp_path: Path) -> None:
    save({"v": Evil(tmp_path / "trace")}, tmp_path / "x")
    with pytest.raises(CheckpointingException, match="which is not loaded"):
        ckptx.load({"v": 1}, tmp_path / "x")
    assert not (tmp_path / "trace").exists()
    load({"v": 1}, tmp_path / "x")
    assert (tmp_path / "trace").exists()


# What gloo does with memory and dtypes


def broadcast(channel: Any, tensor: Tensor) -> None:
    group: dist.ProcessGroup = channel.group
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def exchanged(channel: Channel, value: Tensor, target: Tensor) -> Tensor:
    """Rank 0's value on both ranks, by ckptx."""
    shape = tuple(value.shape)
    zero = (0,) * len(shape)
    shards = [
        ShardedTensor("w", None, value.dtype, shape, shape, zero, None, replica)
        for replica in range(2)
    ]
    found = distribution_of(shard_rows([[shard] for shard in shards]), 2, ignore_groups=True)
    name = shards[0].shard_id
    mine, needed = {name: value}, {}
    if channel.rank != found.main_rank_for_shard[name]:
        mine = {}
        needed[name] = ShardedTensor("w", target, value.dtype, shape, shape, zero, None, 1)
    return exchange(mine, needed, found, channel, options=ExchangeOptions(timeout_s=10))[0][name]


@pytest.mark.parametrize("kind", ["transposed", "channels_last"])
def test_pytorch_192920_163483_elements_arrive_in_the_order_of_memory(kind: str) -> None:
    if kind == "transposed":
        value = torch.arange(6).view(2, 3).t()
    else:
        value = torch.arange(48).view(2, 3, 2, 4).to(memory_format=torch.channels_last)

    def job(channel: Channel) -> tuple[Tensor, Tensor]:
        target = torch.zeros(value.shape, dtype=value.dtype)
        broadcast(channel, target if channel.rank else value)
        return target, exchanged(channel, value, torch.zeros(value.shape, dtype=value.dtype))

    wrong, right = rank_threads(2, job).values()[1]
    assert not torch.equal(wrong, value)
    assert sorted(wrong.flatten().tolist()) == sorted(value.flatten().tolist())
    assert torch.equal(right, value)


@pytest.mark.parametrize(
    "name", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64"]
)
def test_fastsafetensors_54_a_dtype_that_is_not_sent(name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    value = torch.arange(40, dtype=torch.uint8).view(dtype)

    def job(channel: Channel) -> Tensor:
        target = torch.zeros(40, dtype=torch.uint8).view(dtype)
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            broadcast(channel, target)
        return exchanged(channel, value, target)

    for found in rank_threads(2, job).values():
        assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))


def test_ranks_that_differ_in_dtype_are_not_told() -> None:
    """What rank 0 sends as 1.0 arrives as the integer 1065353216."""

    def job(channel: Channel) -> int:
        target = torch.zeros(2, dtype=torch.int32) if channel.rank else torch.ones(2)
        broadcast(channel, target)
        return int(target[0])

    assert rank_threads(2, job).values() == (1, 1065353216)

    def by_ckptx(channel: Channel) -> None:
        dtype = torch.int32 if channel.rank else torch.float32
        exchanged(channel, torch.ones(2, dtype=dtype), torch.zeros(2, dtype=dtype))

    for error in rank_threads(2, by_ckptx).raised(DisagreementError, within_s=5):
        assert "rank 1: 'w at [0]' is int32" in str(error)
