"""The traffic matrix, as numbers and as a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from distcore.v1 import Layout
from reshard import plan_reshard
from reshard.plot import traffic_of

PLAN = plan_reshard(
    {"w": Layout.from_mesh(shape=(4,), dtype="float32", mesh=[0, 1], placements=["S(0)"])},
    {"w": Layout.replicated(shape=(4,), dtype="float32", ranks=[1, 7])},
)


def test_the_matrix_has_a_row_per_sender() -> None:
    assert traffic_of(PLAN) == [[0, 8, 8], [0, 8, 8], [0, 0, 0]]


def test_a_picture_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "traffic.png"
    PLAN.plot(str(path))
    assert path.read_bytes().startswith(b"\x89PNG")
