"""The cache's files: data only, one per group, several layouts, never half written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx import CheckpointingException, FormatError
from ckptx.cache import MAX_LAYOUTS, CachedLayout, cache_file, read_layouts, write_layout
from ckptx.sharded import ShardedTensor

rank_offsets = ShardedTensor.from_rank_offsets
RANKS = (0, 2)


def layout(*names: str) -> CachedLayout:
    return CachedLayout.of(
        [
            [
                *(rank_offsets(name, torch.zeros(4), replica_id=rank) for name in names),
                rank_offsets("own", torch.zeros(2), (0, rank, 2)),
            ]
            for rank in range(2)
        ]
    )


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "deep" / "plans.json")


def test_what_is_written_is_read_back(file: str) -> None:
    written = layout("w", "b")
    write_layout(file, written, RANKS)
    (found,) = read_layouts(file, RANKS)
    assert found == written
    assert found.plans() == written.plans()
    assert list(found.plans()) == [False, True]
    before = written.plans()[True].main_rank_for_shard
    assert list(found.plans()[True].main_rank_for_shard.items()) == list(before.items())
    assert os.listdir(os.path.dirname(file)) == ["plans.json"]


def test_several_layouts_lie_in_one_file_the_latest_last(file: str) -> None:
    for names in (["w"], ["w", "b"], ["w"]):
        write_layout(file, layout(*names), RANKS)
    assert read_layouts(file) == [layout("w", "b"), layout("w")]
    for number in range(MAX_LAYOUTS):
        write_layout(file, layout(f"n{number}"), RANKS)
    assert read_layouts(file) == [layout(f"n{number}") for number in range(MAX_LAYOUTS)]


def test_groups_with_the_same_lowest_rank_have_files_of_their_own() -> None:
    """One file by the lowest rank would give the one group the plans of the other."""
    files = {
        cache_file("dir", ranks, prefix="pg_dist")
        for ranks in [(0, 1), (0, 2), (0, 1, 2, 3), (0, 2, 1, 3), (1, 2)]
    }
    assert len(files) == 5
    assert all(os.path.basename(file).startswith("pg_dist_") for file in files)


def test_a_file_of_another_group_is_refused(file: str) -> None:
    write_layout(file, layout("w"), RANKS)
    with pytest.raises(FormatError, match=r"for the ranks \[0, 2\], not \[0, 1\]"):
        read_layouts(file, (0, 1))


def test_no_file_is_no_layouts(file: str) -> None:
    with pytest.raises(FileNotFoundError):
        read_layouts(file)


def broken(table: dict[str, Any], how: str) -> object:
    one = table["layouts"][0]
    if how == "kind":
        table["kind"] = "other"
    elif how == "format":
        table["format"] = 2
    elif how == "fields":
        del table["layouts"]
    elif how == "no table":
        return [1]
    elif how == "a shard":
        one["shards"][0][0][2] = [5]
    elif how == "a rank":
        one["shards"][0][1] = [0, 7]
    elif how == "a table":
        one["tables"].pop()
    elif how == "no hex":
        one["tables"][0] = "x" * 32
    return table


@pytest.mark.parametrize(
    "how",
    ["kind", "format", "fields", "no table", "a shard", "a rank", "a table", "no hex"],
)
def test_a_damaged_file_is_refused_by_name(file: str, how: str) -> None:
    write_layout(file, layout("w"), RANKS)
    table = json.loads(Path(file).read_text())
    Path(file).write_text(json.dumps(broken(table, how)))
    with pytest.raises(FormatError, match=r"plans\.json"):
        read_layouts(file)
    # Written over, as if it were not there.
    write_layout(file, layout("b"), RANKS)
    assert read_layouts(file) == [layout("b")]


@pytest.mark.parametrize("size", [0, 1, 100, -1])
def test_a_file_that_was_cut_off_is_refused(file: str, size: int) -> None:
    write_layout(file, layout("w"), RANKS)
    Path(file).write_bytes(Path(file).read_bytes()[:size])
    with pytest.raises(FormatError):
        read_layouts(file)


def test_pytorch_189308_a_pickle_is_refused_and_not_run(file: str, tmp_path: Path) -> None:
    """`os.mkdir` in a pickle of protocol 0."""
    os.makedirs(os.path.dirname(file))
    trap = tmp_path / "sprung"
    Path(file).write_bytes(f"cos\nmkdir\n(S'{trap}'\ntR.".encode())
    with pytest.raises(FormatError):
        read_layouts(file)
    assert not trap.exists()


def test_a_write_that_fails_leaves_the_old_file(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout(file, layout("w"), RANKS)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_layout(file, layout("b"), RANKS)
    assert read_layouts(file) == [layout("w")]


def test_two_mains_cannot_be_cached() -> None:
    doubled = [[rank_offsets("w", torch.zeros(4))] for _ in range(2)]
    with pytest.raises(CheckpointingException, match="claim the main copy"):
        CachedLayout.of(doubled).plans()
