"""load on thread ranks: every layout, exact bytes, and its failing twins."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ckptx
from ckptx import (
    CheckpointDisagreement,
    CheckpointingException,
    CheckpointPeerError,
    CheckpointPlanError,
    LoadReport,
)
from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, Layout, PeerError, Piece, PlanError, Region

MESH = [[0, 1], [2, 3]]


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose bytes are all over the place, of any dtype."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = (torch.arange(count) * 37 % 251).to(torch.uint8)
    if dtype == torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape)


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


def total(reports: tuple[LoadReport, ...]) -> tuple[int, int, int]:
    return (
        sum(report.bytes_read for report in reports),
        sum(report.bytes_sent for report in reports),
        sum(report.bytes_received for report in reports),
    )


WEIGHTS = {
    "embed": numbered((50, 8)),
    "bias": numbered((7,), torch.bfloat16),
    "steps": numbered((1, 9), torch.int64),
    "scalar": numbered((), torch.float64),
    "none": numbered((0, 3)),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("same_host", ["auto", "off"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_plain_tensors_are_filled_on_every_rank(file: Path, size: int, same_host: str) -> None:
    def job(channel: Channel) -> LoadReport:
        state = {key: torch.full_like(tensor, 1) for key, tensor in WEIGHTS.items()}
        report = ckptx.load(state, file, group=channel, same_host=same_host)  # type: ignore[arg-type]
        for key, tensor in state.items():
            assert bits(tensor) == bits(WEIGHTS[key]), key
        return report

    reports = rank_threads(size, job).values()
    nbytes = sum(tensor.nbytes for tensor in WEIGHTS.values())
    assert total(reports) == (nbytes, nbytes * (size - 1), nbytes * (size - 1))
    for report in reports:
        assert report.lower_bound_read == nbytes
        assert report.bytes_received == report.lower_bound_received == nbytes - report.bytes_read
        assert report.header_bytes_read == (file / "model.safetensors").stat().st_size - nbytes
        assert (report.missing, report.unexpected) == ((), ())


def test_without_a_group_it_is_one_rank(file: Path) -> None:
    state = {key: torch.zeros_like(tensor) for key, tensor in WEIGHTS.items()}
    report = ckptx.load(state, file)
    assert all(bits(state[key]) == bits(WEIGHTS[key]) for key in WEIGHTS)
    assert (report.bytes_sent, report.bytes_received) == (0, 0)


def test_nested_dicts_and_parameters(tmp_path: Path) -> None:
    save_file({"a.b.w": WEIGHTS["embed"], "a.c": WEIGHTS["bias"]}, tmp_path / "x.safetensors")
    w = torch.nn.Parameter(torch.zeros(50, 8))
    c = torch.zeros(7, dtype=torch.bfloat16)
    ckptx.load({"a": {"b": {"w": w}, "c": c}}, tmp_path)
    assert bits(w) == bits(WEIGHTS["embed"])
    assert bits(c) == bits(WEIGHTS["bias"])
    assert w.requires_grad


def test_a_process_group_object_is_taken(file: Path) -> None:
    def job(channel: Channel) -> None:
        state = {key: torch.zeros_like(tensor) for key, tensor in WEIGHTS.items()}
        ckptx.load(state, file, group=channel.group)  # type: ignore[attr-defined]
        assert bits(state["embed"]) == bits(WEIGHTS["embed"])

    rank_threads(2, job).values()


LAYOUTS = {
    "rows": Layout.from_mesh(shape=(10, 6), dtype="float32", mesh=MESH, placements=["R", "S(0)"]),
    "columns": Layout.from_mesh(
        shape=(10, 6), dtype="float32", mesh=MESH, placements=["R", "S(1)"]
    ),
    "both": Layout.from_mesh(shape=(10, 6), dtype="int16", mesh=MESH, placements=["S(0)", "S(1)"]),
    "uneven": Layout.from_mesh(shape=(5,), dtype="int8", mesh=[0, 1, 2, 3], placements=["S(0)"]),
    "strided": Layout.from_mesh(
        shape=(7, 3), dtype="float32", mesh=MESH, placements=["_S(0,2)", "S(0)"]
    ),
    "lonely": Layout(shape=(4,), dtype="uint16", pieces={2: (Piece(Region((1,), (3,)), (0,)),)}),
}


def expected_of(layout: Layout, rank: int, whole: Tensor) -> Tensor:
    local = torch.zeros(layout.local_shape(rank), dtype=whole.dtype)
    for piece in layout.pieces(rank):
        local.view(torch.uint8 if whole.itemsize == 1 else whole.dtype)[piece.local.slices()] = (
            whole[piece.region.slices()]
        )
    return local


def test_parts_of_tensors_are_filled_by_their_layouts(tmp_path: Path) -> None:
    whole = {
        key: numbered(layout.shape, getattr(torch, layout.dtype)) for key, layout in LAYOUTS.items()
    }
    save_file(whole, tmp_path / "x.safetensors")

    def job(channel: Channel) -> LoadReport:
        rank = channel.rank
        state, layouts = {}, {}
        for key, layout in LAYOUTS.items():
            held = rank in layout.ranks
            shape = layout.local_shape(rank) if held else (0,)
            state[key] = torch.zeros(shape, dtype=whole[key].dtype)
            layouts[key] = layout
        report = ckptx.load(state, tmp_path, group=channel, layouts=layouts)
        for key, layout in LAYOUTS.items():
            if rank in layout.ranks:
                as_ints = whole[key].view(torch.int16) if key == "lonely" else whole[key]
                found = state[key].view(as_ints.dtype)
                assert torch.equal(found, expected_of(layout, rank, as_ints)), (key, rank)
        return report

    reports = rank_threads(4, job).values()
    for report in reports:
        assert report.bytes_received == report.lower_bound_received
    needed = sum(tensor.nbytes for tensor in whole.values()) - 2 * 2
    assert reports[0].lower_bound_read == needed
    assert total(reports)[0] == needed


def test_columns_in_short_runs_are_read_once_and_in_rounds(tmp_path: Path) -> None:
    whole = numbered((4096, 64))
    save_file({"w": whole}, tmp_path / "x.safetensors")
    layout = Layout.from_mesh(
        shape=(4096, 64), dtype="float32", mesh=[0, 1, 2, 3], placements=["S(1)"]
    )

    def job(channel: Channel) -> LoadReport:
        local = torch.zeros(layout.local_shape(channel.rank))
        # 64 KiB are staged at a time, of 1 MiB: several rounds.
        report = ckptx.load(
            {"w": local},
            tmp_path,
            group=channel,
            layouts={"w": layout},
            max_staging_bytes=128 << 10,
        )
        assert torch.equal(local, whole[layout.pieces(channel.rank)[0].region.slices()])
        return report

    reports = rank_threads(4, job).values()
    assert total(reports)[0] == whole.nbytes == reports[0].lower_bound_read
    assert all(report.bytes_received == report.lower_bound_received for report in reports)


@pytest.mark.parametrize("kind", ["transposed", "channels_last", "every other"])
def test_pytorch_62283_destinations_that_do_not_lie_in_order(tmp_path: Path, kind: str) -> None:
    whole = numbered((60, 4, 50, 3))
    save_file({"w": whole}, tmp_path / "x.safetensors")

    def job(channel: Channel) -> None:
        if kind == "transposed":
            target = torch.zeros(3, 50, 4, 60).permute(3, 2, 1, 0)
        elif kind == "channels_last":
            target = torch.zeros(60, 4, 50, 3).to(memory_format=torch.channels_last)
        else:
            target = torch.zeros(60, 8, 50, 3)[:, ::2]
        strides = target.stride()
        ckptx.load({"w": target}, tmp_path, group=channel, max_staging_bytes=128 << 10)
        assert torch.equal(target, whole)
        assert target.stride() == strides

    rank_threads(2, job).values()


def test_fastsafetensors_54_float8_and_unsigned_dtypes_keep_their_bits(tmp_path: Path) -> None:
    names = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "uint16", "uint32", "uint64", "bool")
    whole = {name: numbered((33,), getattr(torch, name)) for name in names}
    save_file(whole, tmp_path / "x.safetensors")

    def job(channel: Channel) -> None:
        state = {key: torch.empty_like(tensor) for key, tensor in whole.items()}
        ckptx.load(state, tmp_path, group=channel)
        assert {key: bits(tensor) for key, tensor in state.items()} == {
            key: bits(tensor) for key, tensor in whole.items()
        }

    rank_threads(3, job).values()


def test_shards_of_one_replica_that_know_only_their_own_mesh(tmp_path: Path) -> None:
    """Ranks 0 and 1 share a copy, ranks 2 and 3 another; neither knows of the other."""
    whole = numbered((10, 4))
    save_file({"w": whole}, tmp_path / "x.safetensors")

    def job(channel: Channel) -> LoadReport:
        pair = [0, 1] if channel.rank < 2 else [2, 3]
        layout = Layout.from_mesh(shape=(10, 4), dtype="float32", mesh=pair, placements=["S(0)"])
        local = torch.zeros(5, 4)
        report = ckptx.load({"w": local}, tmp_path, group=channel, layouts={"w": layout})
        assert torch.equal(local, whole[layout.pieces(channel.rank)[0].region.slices()])
        return report

    reports = rank_threads(4, job).values()
    assert total(reports)[0] == whole.nbytes


def test_not_strict_leaves_the_rest_alone_and_lists_it(file: Path) -> None:
    def job(channel: Channel) -> LoadReport:
        state = {"embed": torch.zeros(50, 8), "mine": torch.ones(2)}
        report = ckptx.load(state, file, group=channel, strict=False)
        assert bits(state["embed"]) == bits(WEIGHTS["embed"])
        assert torch.equal(state["mine"], torch.ones(2))
        return report

    for report in rank_threads(2, job).values():
        assert report.missing == ("mine",)
        assert set(report.unexpected) == set(WEIGHTS) - {"embed"}
        assert report.lower_bound_read == WEIGHTS["embed"].nbytes


@pytest.mark.gpu
def test_tensors_on_a_cuda_device_are_filled(tmp_path: Path) -> None:
    """Over a gloo group: bytes go through bounded staging on both ends."""
    whole = {"w": numbered((300, 70)), "scale": numbered((9,), torch.float8_e4m3fn)}
    save_file(whole, tmp_path / "x.safetensors")
    layout = Layout.from_mesh(shape=(300, 70), dtype="float32", mesh=[0, 1], placements=["S(1)"])

    def job(channel: Channel) -> None:
        part = torch.zeros(layout.local_shape(channel.rank), device="cuda")
        state = {"w": part, "scale": torch.zeros(9, device="cuda").to(torch.float8_e4m3fn)}
        ckptx.load(
            state, tmp_path, group=channel, layouts={"w": layout}, max_staging_bytes=128 << 10
        )
        assert torch.equal(part.cpu(), whole["w"][layout.pieces(channel.rank)[0].region.slices()])
        assert bits(state["scale"].cpu()) == bits(whole["scale"])

    rank_threads(2, job).values()


class Untouched:
    """A state dict of ones, and the proof that it still is one."""

    def __init__(self, weights: Mapping[str, Tensor] = WEIGHTS) -> None:
        self.state = {key: torch.ones_like(tensor) for key, tensor in weights.items()}

    def check(self) -> None:
        assert all(torch.equal(t, torch.ones_like(t)) for t in self.state.values())


def test_everything_that_does_not_fit_is_told_at_once_on_every_rank(file: Path) -> None:
    def job(channel: Channel) -> None:
        mine = Untouched()
        mine.state["embed"] = torch.ones(50, 9)
        mine.state["bias"] = torch.ones(7)
        mine.state["extra"] = torch.ones(1)
        mine.state["meta"] = torch.ones(1, device="meta")
        del mine.state["meta"], mine.state["scalar"]
        try:
            ckptx.load(mine.state, file, group=channel)
        finally:
            mine.check()

    for error in rank_threads(3, job).raised(CheckpointPlanError, within_s=3):
        assert isinstance(error, PlanError)
        assert [(p.where, p.kind) for p in error.problems] == [
            ("bias", "dtype"),
            ("embed", "shape"),
            ("extra", "missing"),
            ("scalar", "unexpected"),
        ]


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (torch.ones(2, device="meta"), "meta device"),
        (torch.ones(1).expand(2), "share memory"),
        (torch.ones(2, 2).to_sparse(), "not strided"),
    ],
)
def test_what_cannot_be_filled_is_refused(file: Path, leaf: object, text: str) -> None:
    with pytest.raises(CheckpointPlanError, match=text):
        ckptx.load({"a": {"x": leaf}}, file, strict=False)


def test_a_value_is_no_tensor(file: Path) -> None:
    with pytest.raises(CheckpointPlanError, match="embed: a value in the state dict, a tensor"):
        ckptx.load({"embed": 3}, file, strict=False)


def test_two_entries_of_one_name_are_refused(file: Path) -> None:
    with pytest.raises(CheckpointPlanError, match=r"a\.x: two entries"):
        ckptx.load({"a.x": torch.ones(1), "a": {"x": torch.ones(1)}}, file, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_accelerate_3982_a_key_that_one_rank_lacks(file: Path, strict: bool) -> None:
    def job(channel: Channel) -> None:
        mine = Untouched()
        if channel.rank == 1:
            del mine.state["bias"]
        try:
            ckptx.load(mine.state, file, group=channel, strict=strict)
        finally:
            mine.check()

    kind = CheckpointPeerError if strict else CheckpointDisagreement
    for error in rank_threads(4, job).raised(kind, within_s=3):
        assert isinstance(error, PeerError if strict else DisagreementError)
        assert "rank 1" in str(error)
        assert "bias" in str(error)


def test_a_dtype_that_differs_on_one_rank(file: Path) -> None:
    def job(channel: Channel) -> None:
        mine = Untouched()
        if channel.rank == 2:
            mine.state["bias"] = mine.state["bias"].float()
        try:
            ckptx.load(mine.state, file, group=channel)
        finally:
            mine.check()

    for error in rank_threads(4, job).raised(CheckpointPeerError, within_s=3):
        assert list(error.failures) == [2]
        assert "bias: the dtype is float32 in the state dict and bfloat16" in error.failures[2]


def test_a_file_that_one_rank_cannot_open(file: Path) -> None:
    def job(channel: Channel) -> None:
        mine = Untouched()
        path = file / "nowhere.safetensors" if channel.rank == 1 else file
        try:
            ckptx.load(mine.state, path, group=channel)
        finally:
            mine.check()

    for error in rank_threads(3, job).raised(CheckpointPeerError, within_s=3):
        assert list(error.failures) == [1]
        assert "No such file or directory" in error.failures[1]
        assert "nowhere.safetensors" in error.failures[1]
        assert f"[Errno {errno.ENOENT}]" in error.failures[1]


def test_a_truncated_file_is_refused_by_all_before_anything_is_written(file: Path) -> None:
    whole = file / "model.safetensors"
    os.truncate(whole, whole.stat().st_size - 1)

    def job(channel: Channel) -> None:
        mine = Untouched()
        try:
            ckptx.load(mine.state, file, group=channel)
        finally:
            mine.check()

    for error in rank_threads(3, job).raised(CheckpointingException, within_s=3):
        assert str(whole) in str(error)
        assert "its bytes end at" in str(error)


def test_files_that_differ_between_ranks(tmp_path: Path) -> None:
    for name, shape in (("0", (2, 3)), ("1", (3, 2))):
        (tmp_path / name).mkdir()
        tensors = {"a": torch.ones(shape), "b": torch.ones(4)}
        save_file(tensors, tmp_path / name / "model.safetensors")

    def job(channel: Channel) -> None:
        state = {"b": torch.zeros(4)}
        try:
            ckptx.load(state, tmp_path / str(channel.rank), group=channel, strict=False)
        finally:
            assert torch.equal(state["b"], torch.zeros(4))

    for error in rank_threads(2, job).raised(CheckpointDisagreement, within_s=3):
        assert "<files>" in str(error)


def test_a_read_that_fails_fails_all_with_file_and_errno(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file / "model.safetensors"
    header = path.stat().st_size - sum(tensor.nbytes for tensor in WEIGHTS.values())
    whole = os.preadv

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == header:  # the first tensor, which one rank reads
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)

    def job(channel: Channel) -> None:
        ckptx.load(Untouched().state, file, group=channel)

    for error in rank_threads(3, job).raised(CheckpointPeerError, within_s=3):
        ((_, text),) = error.failures.items()
        assert f"[Errno {errno.EIO}]" in text
        assert str(path) in text
