"""A load holds no more beside its tensors than it was allowed, however large they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptx
from ckptx.savejob import Format
from distcore.testing import RankPool, rank_pool
from distcore.v1 import Channel, Layout

MIB = 1 << 20
SHAPE = (4096, 8192)  # 128 MiB of float32
SMALL = (1024, 1024)
STAGING = 8 * MIB
LIMIT = 2 * STAGING  # what is allowed, and as much again for the allocator


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with rank_pool(2) as pool:
        yield pool


class Peak:
    """The most memory that this process held, looked at every millisecond."""

    def __init__(self) -> None:
        self.nbytes = self.before = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def growth(self) -> int:
        """End the watch, and return the growth in bytes."""
        self._done.set()
        self._thread.join()
        return self.nbytes - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.nbytes = max(self.nbytes, self._now())

    def _now(self) -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def load_watched(channel: Channel, path: str, placement: str) -> int:
    def loaded(key: str, shape: tuple[int, int]) -> int:
        layout = Layout.from_mesh(shape=shape, dtype="float32", mesh=[0, 1], placements=[placement])
        state = {key: torch.ones(layout.local_shape(channel.rank))}
        peak = Peak()
        ckptx.load(
            state,
            path,
            group=channel,
            strict=False,
            layouts={key: layout},
            max_staging_bytes=STAGING,
        )
        growth = peak.growth()
        assert not state[key].any()
        return growth

    loaded("small", SMALL)  # what is imported or set up late comes first
    return loaded("w", SHAPE)


@pytest.fixture(scope="module", params=["dcp", "safetensors"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind: Format = request.param
    path = tmp_path_factory.mktemp("saved") / kind
    ckptx.save({"w": torch.zeros(SHAPE), "small": torch.zeros(SMALL)}, path, format=kind)
    return path


def check(pool: RankPool, path: Path, placement: str) -> None:
    growth: Any = pool.run(load_watched, str(path), placement).values()
    assert max(growth) <= LIMIT, growth


def test_verl_6107_whole_tensors_on_every_rank(pool: RankPool, path: Path) -> None:
    check(pool, path, "R")


def test_pytorch_149640_shards_of_whole_tensors(pool: RankPool, path: Path) -> None:
    """No rank holds more of a large file than its own part."""
    check(pool, path, "S(0)")


def test_fastsafetensors_71_columns_of_one_large_file(pool: RankPool, path: Path) -> None:
    """They are read in rows that are staged, in parts that do not grow with the file."""
    check(pool, path, "S(1)")
