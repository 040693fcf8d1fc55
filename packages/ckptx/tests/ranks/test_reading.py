"""reading: a plan carried out, together or alone: the bytes, their count, and its failing twins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckptx import StoredTensor, plan_load
from ckptx.files import FileReader
from ckptx.integrity import Inspector, Integrity, blocks_of
from ckptx.plan import LoadPlan
from ckptx.reading import Moved, Step
from ckptx.stored import Chunk
from ckptx.ways import MIN_STAGING_NBYTES, Ways
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout, PeerError, Region
from distcore.v1.runtime import Shard

RANKS = (0, 1)
SHAPES = {"rows": (64, 50), "columns": (128, 96)}
VALUES = {
    key: torch.arange(shape[0] * shape[1], dtype=torch.int32).reshape(shape)
    for key, shape in SHAPES.items()
}
LAYOUTS = {
    # Both need all rows; each needs columns of its own, which go through staging.
    "rows": Layout.replicated(shape=SHAPES["rows"], dtype="int32", ranks=RANKS),
    "columns": Layout.from_mesh(
        shape=SHAPES["columns"], dtype="int32", mesh=list(RANKS), placements=["S(1)"]
    ),
}
NBYTES = {key: value.nbytes for key, value in VALUES.items()}


@dataclass(frozen=True)
class Written:
    """A file of both tensors, one behind the other, and what is known of it."""

    stored: Mapping[str, StoredTensor]
    integrity: Integrity

    def plan(self, ranks: tuple[int, ...]) -> LoadPlan:
        # Several rounds, since little is staged at a time.
        return plan_load(LAYOUTS, self.stored, ranks, max_staged=16 << 10)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    data = b"".join(value.numpy().tobytes() for value in VALUES.values())
    file = tmp_path / "f"
    file.write_bytes(data)
    stored, begin = {}, 0
    for key, shape in SHAPES.items():
        chunk = Chunk(Region((0, 0), shape), str(file), begin)
        stored[key] = StoredTensor(shape, "int32", (chunk,))
        begin += NBYTES[key]
    blocks = tuple(blocks_of(0, memoryview(data)))
    return Written(stored, Integrity({"f": blocks}, {"f": len(data)}))


def places_of(rank: int) -> dict[str, Shard]:
    return {
        key: Shard.of(torch.full(layout.local_shape(rank), -1, dtype=torch.int32), rank, layout)
        for key, layout in LAYOUTS.items()
    }


def check(places: Mapping[str, Shard], rank: int) -> None:
    for key, layout in LAYOUTS.items():
        (piece,) = layout.pieces(rank)
        assert torch.equal(places[key].data, VALUES[key][piece.region.slices()]), key


def carried_out(channel: Channel, written: Written, *, alone: bool, proven: bool = False) -> Moved:
    """Read as the plan says, and return what was moved."""
    inspector = Inspector(written.integrity, written.stored) if proven else None
    places = places_of(channel.rank)
    ways = Ways(channel, MIN_STAGING_NBYTES, "auto", verify=proven, timeout_s=5)
    moved = Moved()
    with FileReader(inspector.watch if inspector is not None else None) as files:
        step = Step(ways, files, inspector, moved)
        if alone:
            step.alone(written.plan((channel.rank,)), places)
        else:
            step.together(written.plan(RANKS), places)
        moved.read = files.nbytes
    check(places, channel.rank)
    return moved


@pytest.mark.parametrize("proven", [False, True])
def test_together_each_byte_is_read_once(written: Written, proven: bool) -> None:
    plan = written.plan(RANKS)
    assert len(plan.rounds) > 1
    found = rank_threads(
        2, lambda channel: carried_out(channel, written, alone=False, proven=proven)
    ).values()
    assert sum(moved.read for moved in found) == sum(NBYTES.values())
    # The rows that the other rank has read, and the half of its columns.
    assert sum(moved.received for moved in found) == NBYTES["rows"] + NBYTES["columns"] // 2
    assert sum(moved.sent for moved in found) == sum(moved.received for moved in found)
    for rank, moved in enumerate(found):
        assert moved.received == plan.lower_bound_received[rank]


@pytest.mark.parametrize("proven", [False, True])
def test_alone_nothing_is_sent(written: Written, proven: bool) -> None:
    found = rank_threads(
        2, lambda channel: carried_out(channel, written, alone=True, proven=proven)
    ).values()
    assert [(moved.sent, moved.received) for moved in found] == [(0, 0)] * 2
    for moved in found:
        assert moved.read >= NBYTES["rows"] + NBYTES["columns"] // 2


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("at", [17, NBYTES["rows"] + 5])
def test_damage_fails_all_ranks(written: Written, at: int, alone: bool) -> None:
    file = Path(written.stored["rows"].chunks[0].file)
    data = bytearray(file.read_bytes())
    data[at] ^= 2
    file.write_bytes(data)
    outcomes = rank_threads(
        2, lambda channel: carried_out(channel, written, alone=alone, proven=True)
    )
    for outcome in outcomes:
        assert outcome.seconds < 5
        assert "damaged" in str(outcome.exception)


@pytest.mark.parametrize("alone", [False, True])
def test_a_read_that_fails_on_one_rank_fails_all(written: Written, alone: bool) -> None:
    def job(channel: Channel) -> None:
        mine = written
        if channel.rank == 1:
            gone = {
                key: StoredTensor(
                    value.shape,
                    value.dtype,
                    tuple(Chunk(c.region, c.file + " gone", c.offset) for c in value.chunks),
                )
                for key, value in written.stored.items()
            }
            mine = Written(gone, written.integrity)
        carried_out(channel, mine, alone=alone)

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "f gone" in error.failures[1]
