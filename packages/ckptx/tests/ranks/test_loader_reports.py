"""What users of other loaders reported, as tests on thread ranks: redundant reads, hangs, casts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

import ckptx
from ckptx import CheckpointingException, LoadReport
from ckptx.savejob import Format
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout, Message, Pending, Region

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MIB = 1 << 20
FORMATS: tuple[Format, ...] = ("dcp", "safetensors")


class Disk:
    """What the process asks the system for: every read as thread, file, begin and end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[tuple[int, str, int, int]] = []
        self.opened: list[tuple[int, str]] = []
        self._preadv, self._open = os.preadv, os.open
        monkeypatch.setattr(os, "preadv", self._read)
        monkeypatch.setattr(os, "open", self._opened)

    def nbytes(self, ranges: Mapping[str, list[tuple[int, int]]]) -> int:
        """How many bytes of some ranges of files were read, each as often as it was."""
        return sum(
            max(0, min(end, high) - max(begin, low))
            for _, file, begin, end in self.reads
            for low, high in ranges.get(file, ())
        )

    def _read(self, fd: int, buffers: list[memoryview], offset: int) -> int:
        count = self._preadv(fd, buffers, offset)
        file = os.readlink(f"/proc/self/fd/{fd}")
        self.reads.append((threading.get_ident(), file, offset, offset + count))
        return count

    def _opened(self, path: Any, *args: Any) -> int:
        self.opened.append((threading.get_ident(), os.fspath(path)))
        return self._open(path, *args)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def tensors_in(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Where the elements of all tensors lie, by file."""
    found: dict[str, list[tuple[int, int]]] = {}
    for stored in ckptx.open_checkpoint(path).tensors.values():
        for chunk in stored.chunks:
            nbytes = chunk.region.numel * stored.nbytes // stored.numel
            found.setdefault(chunk.file, []).append((chunk.offset, chunk.offset + nbytes))
    return found


def numbered(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def rows(shape: tuple[int, ...], mesh: Any, placements: list[str]) -> Layout:
    return Layout.from_mesh(shape=shape, dtype="float32", mesh=mesh, placements=placements)


# Redundant reads


@pytest.mark.parametrize("kind", FORMATS)
def test_pytorch_118327_replicas_read_each_byte_once(
    tmp_path: Path, disk: Disk, kind: Format
) -> None:
    """Two replicas of two shards; the reads are counted at the system, not in the report."""
    whole = numbered(64, 4096)
    ckptx.save({"w": whole}, tmp_path / "x", format=kind)
    places = tensors_in(tmp_path / "x")
    layout = rows((64, 4096), [[0, 1], [2, 3]], ["R", "S(0)"])
    disk.reads.clear()

    def job(channel: Channel) -> int:
        state = {"w": torch.zeros(32, 4096)}
        report = ckptx.load(state, tmp_path / "x", group=channel, layouts={"w": layout})
        assert torch.equal(state["w"], whole[32 * (channel.rank % 2) :][:32])
        return report.bytes_read

    assert sum(rank_threads(4, job).values()) == whole.nbytes
    # Each rank looks for the end of the archive in the last 1 024 bytes, where a tensor may lie.
    assert whole.nbytes <= disk.nbytes(places) <= whole.nbytes + 4 * 1024


def test_pytorch_121519_values_are_read_by_one_rank(tmp_path: Path, disk: Disk) -> None:
    """Where every rank needs the groups of an optimizer, one rank reads them for all."""
    ckptx.save({"w": numbered(4), "groups": [{"lr": 0.5}]}, tmp_path / "x", format="dcp")
    value = ckptx.open_checkpoint(tmp_path / "x").objects["groups.0.lr"]
    disk.reads.clear()

    def job(channel: Channel) -> None:
        state = {"w": torch.zeros(4), "groups": [{"lr": 0.0}]}
        ckptx.load(state, tmp_path / "x", group=channel)
        assert state["groups"] == [{"lr": 0.5}]

    rank_threads(4, job).values()
    readers = {
        thread
        for thread, file, begin, end in disk.reads
        if file == value.file and begin <= value.offset and end >= value.offset + value.nbytes
    }
    assert len(readers) == 1


@pytest.mark.parametrize("kind", FORMATS)
def test_pytorch_125740_the_layout_that_was_saved_costs_no_second_read(
    tmp_path: Path, kind: Format
) -> None:
    """A shard and a scalar of both ranks per layer: the scalars lie in either rank's file."""
    layers = range(6)
    layouts = {f"{i}.w": rows((10, 4), [0, 1], ["S(0)"]) for i in layers}

    def state_of(rank: int, scale: float) -> dict[str, Tensor]:
        part = numbered(10, 4)[5 * rank :][:5] * scale
        return {f"{i}.w": part + scale * i for i in layers} | {
            f"{i}.step": torch.tensor(scale * (7.0 + i)) for i in layers
        }

    def save(channel: Channel) -> None:
        state = state_of(channel.rank, 1)
        ckptx.save(state, tmp_path / "x", group=channel, format=kind, layouts=layouts)

    rank_threads(2, save).values()
    assert len(tensors_in(tmp_path / "x")) == 2

    def load(channel: Channel) -> LoadReport:
        state = state_of(channel.rank, 0)
        report = ckptx.load(state, tmp_path / "x", group=channel, layouts=layouts, mode="exchange")
        expected = state_of(channel.rank, 1)
        assert all(torch.equal(state[key], expected[key]) for key in state)
        return report

    reports = rank_threads(2, load).values()
    assert sum(report.bytes_read for report in reports) == 6 * (10 * 4 + 1) * 4
    # What a rank does not read itself comes from the other rank, not from its file.
    assert sum(report.bytes_received for report in reports) == 6 * 4


def test_cosmos_rl_427_no_rank_reads_more_than_its_part(tmp_path: Path) -> None:
    """Four ranks that need all of one file: the slowest reads a quarter, not everything."""
    save_file({"w": numbered(8 * MIB // 4)}, tmp_path / "model.safetensors")

    def job(channel: Channel) -> LoadReport:
        return ckptx.load({"w": torch.zeros(8 * MIB // 4)}, tmp_path, group=channel)

    reports = rank_threads(4, job).values()
    assert [report.bytes_read for report in reports] == [2 * MIB] * 4
    assert {report.lower_bound_slowest_read for report in reports} == {2 * MIB}


def test_hyper_parallel_624_a_file_is_not_opened_for_each_tensor(
    tmp_path: Path, disk: Disk
) -> None:
    state = {f"w{i:03}": numbered(8) for i in range(200)}
    save_file(state, tmp_path / "model.safetensors")
    disk.opened.clear()

    def job(channel: Channel) -> None:
        ckptx.load({key: torch.zeros(8) for key in state}, tmp_path, group=channel)

    rank_threads(2, job).values()
    opened = [at for at in disk.opened if at[1].endswith("model.safetensors")]
    assert len(opened) == 2 * 2  # once for its header, once for its tensors


def test_automodel_3616_each_file_is_read_in_one_go(tmp_path: Path, disk: Disk) -> None:
    """Eight files of one tensor each: a rank opens only those that it reads, once, and reads on."""
    index = {f"w{i}": tmp_path / f"part-{i}.safetensors" for i in range(8)}
    for key, file in index.items():
        save_file({key: numbered(1 << 16)}, file)
    places = tensors_in_files(index)
    disk.reads.clear()

    def job(channel: Channel) -> None:
        ckptx.load({key: torch.zeros(1 << 16) for key in index}, index, group=channel)

    rank_threads(2, job).values()
    big = [(thread, file) for thread, file, begin, end in disk.reads if end - begin >= 1 << 16]
    assert sorted(file for _, file in big) == sorted(map(str, index.values()))
    assert disk.nbytes(places) == 8 * 4 << 16


def tensors_in_files(index: Mapping[str, Path]) -> dict[str, list[tuple[int, int]]]:
    found = {}
    for key, file in index.items():
        stored = ckptx.open_checkpoint(file).tensors[key]
        begin = stored.chunks[0].offset
        found[str(file)] = [(begin, begin + stored.nbytes)]
    return found


def test_pytorch_76331_eight_slices_read_the_tensor_once(tmp_path: Path, disk: Disk) -> None:
    """One chunk of 4 MiB that torch saved: 4 MiB are read, not 32."""
    whole = numbered(MIB)
    state_dict_saver.save({"w": whole}, checkpoint_id=tmp_path, no_dist=True)
    places = tensors_in(tmp_path)
    layout = rows((MIB,), list(range(8)), ["S(0)"])
    disk.reads.clear()

    def job(channel: Channel) -> LoadReport:
        state = {"w": torch.zeros(MIB // 8)}
        report = ckptx.load(state, tmp_path, group=channel, layouts={"w": layout})
        assert torch.equal(state["w"], whole[MIB // 8 * channel.rank :][: MIB // 8])
        return report

    reports = rank_threads(8, job).values()
    assert sum(report.bytes_read for report in reports) == whole.nbytes
    assert disk.nbytes(places) <= 1.01 * whole.nbytes


def test_pytorch_76331_a_slice_is_read_alone(tmp_path: Path, disk: Disk) -> None:
    state_dict_saver.save({"w": numbered(MIB)}, checkpoint_id=tmp_path, no_dist=True)
    found = ckptx.open_checkpoint(tmp_path)
    disk.reads.clear()
    part = found.read("w", Region((MIB // 2,), (MIB // 2 + 1000,)))
    assert torch.equal(part, numbered(MIB)[MIB // 2 :][:1000])
    assert sum(end - begin for *_, begin, end in disk.reads) == part.nbytes


# What the ranks tell each other before they read


class Counted:
    """A channel that adds up the rows that it gathers and the messages that it sends."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.rows = 0
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        if name == "same_host":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        self.rows += len(row)
        return self._inner.all_gather(row, timeout_s=timeout_s)

    def start(
        self, sends: list[Message], receives: list[Message], *, timeout_s: float | None = None
    ) -> Pending:
        self.sent += sum(buffer.nbytes for message in sends for buffer in message.buffers)
        return self._inner.start(sends, receives, timeout_s=timeout_s)


def told(path: Path, count: int, size: int) -> tuple[int, int]:
    """The bytes that a rank gives to all others for a load, and those of its messages."""
    layout = rows((16, 4), list(range(size)), ["S(0)"])
    save_file({f"w{i}": numbered(16, 4) for i in range(count)}, path)

    def job(channel: Channel) -> tuple[int, int]:
        counted: Any = Counted(channel)
        layouts = {f"w{i}": layout for i in range(count)}
        state = {key: torch.zeros(16 // size, 4) for key in layouts}
        ckptx.load(state, path, group=counted, layouts=layouts, mode="exchange")
        return counted.rows, counted.sent

    found = rank_threads(size, job).values()
    return max(rows for rows, _ in found), sum(sent for _, sent in found)


def test_tnt_1064_what_is_told_does_not_grow_with_the_tensors(tmp_path: Path) -> None:
    """A mesh tells what every rank holds, so no list of tensors is gathered."""
    few, none = told(tmp_path / "few.safetensors", 4, 4)
    many, nothing = told(tmp_path / "many.safetensors", 400, 4)
    assert (none, nothing) == (0, 0)
    assert few == many


def test_pytorch_145965_planning_for_many_ranks_takes_a_kilobyte(tmp_path: Path) -> None:
    rows, _ = told(tmp_path / "x.safetensors", 64, 16)
    assert rows <= 1024


def test_verl_6365_keys_may_come_in_any_order(tmp_path: Path) -> None:
    state = {f"w{i}": numbered(50 + i) for i in range(9)}
    save_file(state, tmp_path / "x.safetensors")

    def job(channel: Channel) -> None:
        keys = sorted(state, reverse=bool(channel.rank % 2))
        mine = {key: torch.zeros_like(state[key]) for key in keys}
        ckptx.load(mine, tmp_path, group=channel)
        assert all(torch.equal(mine[key], state[key]) for key in keys)

    rank_threads(3, job).values()


def slow_reads(
    monkeypatch: pytest.MonkeyPatch, path: Path, seconds: float, slow: list[int]
) -> None:
    """The thread whose number is in `slow` waits before it reads a tensor."""
    header = ckptx.open_checkpoint(path).header_nbytes
    whole = os.preadv

    def waiting(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset >= header and threading.get_ident() in slow:
            time.sleep(seconds)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", waiting)


@pytest.mark.parametrize("timeout", [10, 0.5])
def test_orbax_3181_a_slow_source_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float
) -> None:
    """One rank's storage is slow: the others wait for it, and no longer than they were told."""
    state = {f"w{i}": numbered(1 << 10) for i in range(8)}
    save_file(state, tmp_path / "model.safetensors")
    slow: list[int] = []
    slow_reads(monkeypatch, tmp_path, 1.5, slow)

    def job(channel: Channel) -> None:
        if channel.rank == 1:
            slow.append(threading.get_ident())
        mine = {key: torch.zeros_like(value) for key, value in state.items()}
        ckptx.load(mine, tmp_path, group=channel, timeout=timeout)
        assert all(torch.equal(mine[key], state[key]) for key in state)

    outcomes = rank_threads(3, job)
    if timeout > 1.5:
        outcomes.values()
    else:
        for error in outcomes.raised(CheckpointingException, within_s=8):
            assert isinstance(error, OSError | RuntimeError | ValueError), error


# Damage on the way


class Noisy(Counted):
    """A channel on which a bit of every larger message flips."""

    def start(
        self, sends: list[Message], receives: list[Message], *, timeout_s: float | None = None
    ) -> Pending:
        for message in sends:
            for buffer in message.buffers:
                if buffer.numel() >= 1000:
                    buffer[77] ^= 4
        return self._inner.start(sends, receives, timeout_s=timeout_s)


@pytest.mark.parametrize("verify", [True, "xxh3", False])
def test_torchtitan_4011_a_bit_that_flips_between_ranks_is_found(
    tmp_path: Path, verify: Any
) -> None:
    """Where the checkpoint has digests, or the caller asks for proof; not otherwise."""
    whole = numbered(1 << 10)
    if verify is True:
        ckptx.save({"w": whole}, tmp_path / "x")
    else:
        (tmp_path / "x").mkdir()
        save_file({"w": whole}, tmp_path / "x" / "model.safetensors")

    def job(channel: Channel) -> int:
        noisy: Any = Noisy(channel)
        mine = {"w": torch.zeros_like(whole)}
        ckptx.load(mine, tmp_path / "x", group=noisy, same_host="off", verify=verify, timeout=10)
        return int((mine["w"] != whole).sum())

    outcomes = rank_threads(2, job)
    if verify:
        for error in outcomes.raised(CheckpointingException, within_s=8):
            assert "'w'" in str(error)
            assert "not those that were sent" in str(error)
    else:
        assert sorted(outcomes.values()) in ([0, 1], [1, 1])


# Destinations


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e8m0fnu"])
def test_vllm_34070_strided_float8_scales_are_filled_in_place(tmp_path: Path, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    codes = torch.arange(96, dtype=torch.uint8).reshape(8, 12)
    save_file({"scale": codes.view(dtype)}, tmp_path / "x.safetensors")

    def job(channel: Channel) -> None:
        scale = torch.zeros(12, 8, dtype=torch.uint8).view(dtype).t()
        ckptx.load({"scale": scale}, tmp_path, group=channel)
        assert scale.stride() == (1, 8)
        assert torch.equal(scale.view(torch.uint8), codes)

    rank_threads(2, job).values()


@pytest.mark.parametrize("same_host", ["auto", "off"])
@pytest.mark.parametrize("kind", FORMATS)
def test_vllm_1696_scalars_and_empty_tensors(tmp_path: Path, kind: Format, same_host: Any) -> None:
    state = {"scale": torch.tensor(0.5), "none": torch.zeros(0), "thin": torch.zeros(3, 0, 2)}

    def job(channel: Channel) -> None:
        ckptx.save(state, tmp_path / "x", group=channel, format=kind)
        mine = {key: torch.full_like(value, 9) for key, value in state.items()}
        ckptx.load(mine, tmp_path / "x", group=channel, same_host=same_host)
        assert mine["scale"].item() == 0.5
        assert {key: tensor.shape for key, tensor in mine.items()} == {
            key: tensor.shape for key, tensor in state.items()
        }

    rank_threads(3, job).values()
