"""shared_values: values are read by one rank, and put in place by all or by none."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import state_dict_saver

import ckptx
from ckptx.loadjob import LoadJob
from ckptx.savejob import Format
from ckptx.shared_values import replace_values, shared_bytes
from ckptx.ways import MIN_STAGING_NBYTES, Ways
from distcore.testing import rank_threads
from distcore.v1 import Channel, PeerError

VALUES: dict[str, Any] = {
    "none": None,
    "text": "a" * 3000,
    "pair": (1, 2.5),
    "nested": {"names": ["x", "y"], "deep": {"lr": 0.1}},
}


def ways_over(channel: Channel) -> Ways:
    return Ways(channel, MIN_STAGING_NBYTES, "auto", verify=True, timeout_s=5)


def job_of(state: dict[str, Any], path: Path, channel: Channel) -> LoadJob:
    return LoadJob.of(state, path, channel, strict=False, cast="never", given={})


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_every_rank_gets_the_stored_values(tmp_path: Path, kind: Format) -> None:
    ckptx.save(VALUES, tmp_path / "x", format=kind)

    def job(channel: Channel) -> None:
        state: dict[str, Any] = {
            "none": 1,
            "text": "",
            "pair": None,
            "nested": {"names": [], "deep": {"lr": 0.0}},
            "mine": 4,
        }
        replace_values(job_of(state, tmp_path / "x", channel), ways_over(channel))
        assert state == {**VALUES, "mine": 4}

    rank_threads(3, job).values()


def test_only_the_first_rank_reads(tmp_path: Path) -> None:
    """Rank 1 knows another place, where the files are gone by then."""
    for name in "01":
        ckptx.save({"a": 1, "b": "two"}, tmp_path / name, format="dcp")
    found = [ckptx.open_checkpoint(tmp_path / name) for name in "01"]
    shutil.rmtree(tmp_path / "1")

    def job(channel: Channel) -> dict[str, bytes]:
        return shared_bytes(found[channel.rank], ["a", "b"], ways_over(channel))

    one, other = rank_threads(2, job).values()
    assert one == other
    assert list(one) == ["a", "b"]
    assert all(one.values())


class Other:
    """Not loaded by whoever reads it."""

    lr = 0.5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_value_of_another_class_is_put_nowhere(tmp_path: Path) -> None:
    values = {"a": 1, "other": Other()}
    state_dict_saver.save(values, checkpoint_id=tmp_path / "x", no_dist=True)

    def job(channel: Channel) -> None:
        state: dict[str, Any] = {"other": 0}
        try:
            replace_values(job_of(state, tmp_path / "x", channel), ways_over(channel))
        finally:
            assert state == {"other": 0}

    for error in rank_threads(2, job).exceptions:
        assert error is not None
        assert "Other, which is not loaded" in str(error)


def test_a_rank_that_cannot_read_fails_all(tmp_path: Path) -> None:
    ckptx.save({"a": 1}, tmp_path / "x", format="dcp")
    checkpoint = ckptx.open_checkpoint(tmp_path / "x")
    for file in (tmp_path / "x").glob("*.distcp"):
        file.unlink()

    def job(channel: Channel) -> None:
        shared_bytes(checkpoint, ["a"], ways_over(channel))

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [0]
        assert "No such file" in error.failures[0]
