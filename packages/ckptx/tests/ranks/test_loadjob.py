"""loadjob: what one rank has to do: refused as a whole, agreed upon, and cut into batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptx
from ckptx import CheckpointPlanError
from ckptx.loadjob import LoadJob, Mode
from ckptx.ways import MIN_STAGING_NBYTES, Ways
from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, Layout
from distcore.v1.runtime import SoloChannel

KIB = 1 << 10


@pytest.fixture
def path(tmp_path: Path) -> Path:
    state = {f"w{i}": torch.full((16 * KIB,), float(i)) for i in range(4)}  # 64 KiB each
    save_file({**state, "ids": torch.arange(6)}, tmp_path / "model.safetensors")
    return tmp_path


def job_of(state: dict[str, Any], path: Path, channel: Channel, **options: Any) -> LoadJob:
    given = {"strict": True, "cast": "never", "given": {}, **options}
    return LoadJob.of(state, path, channel, **given)


def ways_over(channel: Channel, staging: int = MIN_STAGING_NBYTES) -> Ways:
    return Ways(channel, staging, "auto", verify=True, timeout_s=5)


def full(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    state: dict[str, Any] = {f"w{i}": torch.zeros(16 * KIB, dtype=dtype) for i in range(4)}
    return {**state, "ids": torch.zeros(6, dtype=torch.int64)}


def test_all_that_does_not_fit_is_told_in_order(path: Path) -> None:
    state = full() | {"ids": torch.zeros(7), "more": torch.zeros(1)}
    del state["w2"]
    with pytest.raises(CheckpointPlanError) as caught:
        job_of(state, path, SoloChannel())
    assert [(p.where, p.kind) for p in caught.value.problems] == [
        ("ids", "shape"),
        ("ids", "dtype"),
        ("more", "missing"),
        ("w2", "unexpected"),
    ]


def test_what_is_left_alone_is_listed(path: Path) -> None:
    job = job_of({"w1": torch.zeros(16 * KIB), "x": 1}, path, SoloChannel(), strict=False)
    assert list(job.tensors) == list(job.layouts) == ["w1"]
    assert (job.missing, job.wanted) == (("x",), ())
    assert sorted(job.unexpected) == ["ids", "w0", "w2", "w3"]


def test_a_cast_hides_no_other_misfit(path: Path) -> None:
    state = full(torch.bfloat16)
    assert len(job_of(state, path, SoloChannel(), cast="allow").tensors) == 5
    state["w0"] = torch.zeros(3, dtype=torch.bfloat16)
    with pytest.raises(CheckpointPlanError) as caught:
        job_of(state, path, SoloChannel(), cast="allow")
    assert [(p.where, p.kind) for p in caught.value.problems] == [("w0", "shape")]


def planned(channel: Channel, path: Path, state: dict[str, Any], mode: Mode = "auto") -> LoadJob:
    job = job_of(state, path, channel, cast="allow")
    job.plan(ways_over(channel), mode)
    return job


def test_casts_go_in_batches_that_fit_into_staging(path: Path) -> None:
    """Each takes 64 KiB as it is read, so two fit into 128 KiB."""
    job = planned(SoloChannel(), path, full(torch.bfloat16))
    assert [(batch.is_cast, len(batch.keys)) for batch in job.batches] == [
        (False, 1),
        (True, 2),
        (True, 2),
    ]
    assert [key for batch in job.batches for key in batch.keys] == ["ids", "w0", "w1", "w2", "w3"]
    places = job.places(job.batches[1], 0)
    assert {key: place.data.dtype for key, place in places.items()} == {
        "w0": torch.float32,
        "w1": torch.float32,
    }
    assert sum(place.data.nbytes for place in places.values()) <= MIN_STAGING_NBYTES
    places["w1"].data.fill_(1.0009765625)
    job.cast(job.batches[1], places, 0)
    assert job.tensors["w1"].unique().tolist() == [1.0]


def test_places_are_the_callers_own_memory_where_nothing_is_cast(path: Path) -> None:
    state = full()
    job = planned(SoloChannel(), path, state)
    (batch,) = job.batches
    places = job.places(batch, 0)
    assert all(places[key].data.data_ptr() == state[key].data_ptr() for key in state)


@pytest.mark.parametrize(
    ("mode", "copies", "direct"),
    [
        ("auto", True, False),
        ("auto", False, True),
        ("exchange", False, False),
        ("direct", True, True),
    ],
)
def test_who_reads(path: Path, mode: Mode, copies: bool, direct: bool) -> None:
    """By itself it reads directly where the ranks need hardly a byte twice."""
    layout = Layout.from_mesh(
        shape=(16 * KIB,), dtype="float32", mesh=[0, 1], placements=["R" if copies else "S(0)"]
    )

    def job(channel: Channel) -> tuple[bool, int]:
        state = {f"w{i}": torch.zeros(layout.local_shape(channel.rank)) for i in range(4)}
        given = dict.fromkeys(state, layout)
        job = job_of(state, path, channel, strict=False, given=given)
        job.plan(ways_over(channel), mode)
        (batch,) = job.batches
        assert batch.plan.lower_bound_read == 256 * KIB
        return job.is_direct, batch.plan.read_nbytes(channel.rank)

    found = rank_threads(2, job).values()
    assert [is_direct for is_direct, _ in found] == [direct] * 2
    assert sum(nbytes for _, nbytes in found) == (512 if direct and copies else 256) * KIB


@pytest.mark.parametrize("what", ["mode", "staging", "values"])
def test_ranks_that_ask_for_something_else_are_told(tmp_path: Path, what: str) -> None:
    ckptx.save({"w": torch.zeros(4), "epoch": 1}, tmp_path / "x", format="dcp")

    def job(channel: Channel) -> None:
        odd = channel.rank == 1
        state: dict[str, Any] = {"w": torch.zeros(4), "epoch": 0}
        if odd and what == "values":
            del state["epoch"]
        mode: Mode = "direct" if odd and what == "mode" else "exchange"
        staging = MIN_STAGING_NBYTES * (2 if odd and what == "staging" else 1)
        job = job_of(state, tmp_path / "x", channel, strict=False)
        job.plan(ways_over(channel, staging), mode)

    names = {"mode": "<mode>", "staging": "<max_staging_bytes>", "values": "value epoch"}
    for error in rank_threads(3, job).raised(DisagreementError, within_s=5):
        assert names[what] in str(error)
