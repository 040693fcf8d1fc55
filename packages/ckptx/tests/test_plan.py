"""Who reads what: literals, bounds, and an oracle that plays the plan through."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptx import CheckpointPlanError, Chunk, LoadPlan, StoredTensor, plan_load
from ckptx.plan import MIN_SPLIT_NBYTES
from distcore.v1 import Layout, Piece, PlanError, Region

Table = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def inside(region: Region) -> Any:
    """An index that gives a view of a table, of one without dims too."""
    return (*region.slices(), ...)


def stored_in_a_row(
    shapes: Mapping[str, tuple[int, ...]], dtype: str = "int8"
) -> dict[str, StoredTensor]:
    """Tensors one behind the other in one file."""
    found, offset = {}, 0
    for key, shape in shapes.items():
        found[key] = StoredTensor(shape, dtype, (Chunk(Region.of_shape(shape), "file", offset),))
        offset += found[key].nbytes
    return found


def replicated(stored: dict[str, StoredTensor], size: int) -> dict[str, Layout]:
    return {
        key: Layout.replicated(shape=tensor.shape, dtype=tensor.dtype, ranks=range(size))
        for key, tensor in stored.items()
    }


def play(plan: LoadPlan, needs: dict[str, Layout], stored: dict[str, StoredTensor]) -> Counter[str]:
    """Carry the plan out on tables of numbers; returns how often each byte was read, by key.

    Fails where a rank reads what it does not need, sends what it has not, gets an element twice,
    or lacks one at the end.
    """
    values = {key: np.arange(prod(t.shape)).reshape(t.shape) for key, t in stored.items()}
    counts = {key: np.zeros(t.shape, dtype=np.int64) for key, t in stored.items()}
    have = {
        (rank, key): np.full(layout.shape, -1)
        for key, layout in needs.items()
        for rank in layout.ranks
    }

    def put(rank: int, key: str, region: Region, table: Table) -> None:
        box = have[rank, key][inside(region)]
        assert (box == -1).all(), f"{key} {region} reaches rank {rank} twice"
        box[...] = table

    for rank, reads in plan.reads.items():
        for read in reads:
            assert read.chunk.region.contains(read.region)
            counts[read.key][read.region.slices()] += 1
            put(rank, read.key, read.region, values[read.key][read.region.slices()])
    for transfer in plan.exchange:
        assert transfer.src != transfer.dst
        found = have[transfer.src, transfer.key][inside(transfer.region)]
        assert (found != -1).all()
        put(transfer.dst, transfer.key, transfer.region, found)
    for step in plan.rounds:
        staged = {(rank, read.key): read for rank, reads in step.reads.items() for read in reads}
        for (_, name), read in staged.items():
            counts[step.keys[name]][read.region.slices()] += 1
        for transfer in step.exchange:
            assert staged[transfer.src, transfer.key].region.contains(transfer.region)
            key = step.keys[transfer.key]
            put(transfer.dst, key, transfer.region, values[key][transfer.region.slices()])
    for (rank, key), table in have.items():
        held = np.zeros(table.shape, dtype=bool)
        for piece in needs[key].pieces(rank):
            held[piece.region.slices()] = True
        assert (table == np.where(held, values[key], -1)).all()
    return Counter({key: int(count.max(initial=0)) for key, count in counts.items()})


def reads_of(plan: LoadPlan) -> dict[int, list[tuple[str, tuple[int, ...], tuple[int, ...]]]]:
    return {
        rank: [(read.key, read.region.start, read.region.stop) for read in reads]
        for rank, reads in sorted(plan.reads.items())
    }


def test_planning_needs_no_torch() -> None:
    code = "import sys, ckptx; ckptx.plan_load({}, {}, (0,)); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_small_tensors_are_dealt_out_in_file_order() -> None:
    stored = stored_in_a_row({f"t{i}": (10,) for i in range(8)})
    plan = plan_load(replicated(stored, 4), stored, range(4))
    assert reads_of(plan) == {
        rank: [(f"t{i}", (0,), (10,)) for i in (2 * rank, 2 * rank + 1)] for rank in range(4)
    }
    assert plan.lower_bound_read == 80
    assert plan.lower_bound_slowest == 20
    assert plan.needed == dict.fromkeys(range(4), 80)
    assert plan.lower_bound_received == dict.fromkeys(range(4), 60)


def test_orbax_megatron_one_huge_tensor_beside_small_ones_is_split() -> None:
    """One embedding of 1024 units and eight of 1, on 8 ranks: 129 each, not 1024."""
    unit = 1000
    shapes = {"e": (1024, unit), **{f"s{i}": (1, unit) for i in range(8)}}
    stored = stored_in_a_row(shapes)
    plan = plan_load(replicated(stored, 8), stored, range(8), min_split=unit)
    loads = [plan.read_nbytes(rank) for rank in range(8)]
    assert plan.lower_bound_slowest == 129 * unit
    assert max(loads) <= 131 * unit
    assert sum(loads) == plan.lower_bound_read == 1032 * unit


def test_pytorch_104081_coverage_before_order() -> None:
    """A held by both ranks, B by rank 0 alone: 100 bytes each, not 200 and 0."""
    stored = stored_in_a_row({"A": (100,), "B": (100,)})
    needs = {
        "A": Layout.replicated(shape=(100,), dtype="int8", ranks=(0, 1)),
        "B": Layout.replicated(shape=(100,), dtype="int8", ranks=(0,)),
    }
    plan = plan_load(needs, stored, (0, 1))
    assert [plan.read_nbytes(rank) for rank in (0, 1)] == [100, 100]
    assert reads_of(plan) == {0: [("B", (0,), (100,))], 1: [("A", (0,), (100,))]}
    assert plan.lower_bound_received == {0: 100, 1: 0}


def test_a_large_tensor_is_cut_at_rows_and_small_ones_never() -> None:
    stored = stored_in_a_row({"w": (3 * 1024, 1024), "b": (1024, 1023)})
    plan = plan_load(replicated(stored, 2), stored, (0, 1))
    assert reads_of(plan) == {
        0: [("w", (0, 0), (2048, 1024))],
        1: [("w", (2048, 0), (3072, 1024)), ("b", (0, 0), (1024, 1023))],
    }
    assert MIN_SPLIT_NBYTES > 1024 * 1023


def test_replicas_of_shards_read_their_shard_once() -> None:
    stored = stored_in_a_row({"w": (8, 4), "b": (5,)}, dtype="float32")
    needs = {
        key: Layout.from_mesh(
            shape=tensor.shape, dtype="float32", mesh=[[0, 1], [2, 3]], placements=["R", "S(0)"]
        )
        for key, tensor in stored.items()
    }
    plan = plan_load(needs, stored, range(4))
    assert play(plan, needs, stored) == {"w": 1, "b": 1}
    assert plan.lower_bound_read == 32 * 4 + 5 * 4
    assert [(t.key, t.src, t.dst) for t in plan.exchange] == [
        ("w", 0, 2),
        ("w", 1, 3),
        ("b", 2, 0),
        ("b", 3, 1),
    ]


def test_columns_are_read_by_rows_once_and_passed_on() -> None:
    """Row-parallel weights: each rank's columns are short runs of every row."""
    stored = stored_in_a_row({"w": (64, 32)}, dtype="float32")
    layout = Layout.from_mesh(
        shape=(64, 32), dtype="float32", mesh=[0, 1, 2, 3], placements=["S(1)"]
    )
    plan = plan_load({"w": layout}, stored, range(4), min_split=16, max_staged=1024)
    assert plan.reads == {}
    assert len(plan.rounds) == 2
    assert [plan.read_nbytes(rank) for rank in range(4)] == [2048] * 4
    assert plan.lower_bound_received == dict.fromkeys(range(4), 2048 * 3 // 4)
    assert play(plan, {"w": layout}, stored) == {"w": 1}
    for step in plan.rounds:
        assert all(sum(r.nbytes for r in reads) <= 1024 for reads in step.reads.values())


def test_everything_that_does_not_fit_is_told_at_once() -> None:
    stored = stored_in_a_row({"a": (4,), "b": (4,), "c": (4,)})
    half = StoredTensor((4,), "int8", (Chunk(Region((0,), (2,)), "file", 0),))
    needs = replicated(stored, 1)
    wrong = {
        **needs,
        "a": Layout.replicated(shape=(5,), dtype="int8", ranks=(0,)),
        "b": Layout.replicated(shape=(4,), dtype="uint8", ranks=(0,)),
        "x": Layout.replicated(shape=(4,), dtype="int8", ranks=(0,)),
    }
    with pytest.raises(CheckpointPlanError) as caught:
        plan_load(wrong, stored, (0,))
    assert isinstance(caught.value, PlanError)
    assert [(p.where, p.kind) for p in caught.value.problems] == [
        ("a", "shape"),
        ("b", "dtype"),
        ("x", "missing"),
    ]
    with pytest.raises(CheckpointPlanError, match=r"c: .*ranks \(0,\) need, is not stored once"):
        plan_load(needs, {**stored, "c": half}, (0,))


def test_ranks_outside_the_group_are_left_out() -> None:
    stored = stored_in_a_row({"a": (4,)})
    plan = plan_load(replicated(stored, 4), stored, (3, 1))
    assert plan.needed == {3: 4, 1: 4}
    assert [(t.src, t.dst) for t in plan.exchange] == [(3, 1)]


def test_the_order_of_the_state_dict_and_directories_do_not_matter() -> None:
    stored = stored_in_a_row({f"t{i}": (300,) for i in range(5)})
    moved = {
        key: StoredTensor(
            t.shape, t.dtype, (Chunk(t.chunks[0].region, "/x/file", t.chunks[0].offset),)
        )
        for key, t in reversed(stored.items())
    }
    needs = replicated(stored, 3)
    one = plan_load(needs, stored, range(3), min_split=10)
    other = plan_load(dict(reversed(needs.items())), moved, range(3), min_split=10)
    assert one.exchange.digest == other.exchange.digest
    assert reads_of(one) == reads_of(other)


@st.composite
def problems(draw: st.DrawFn) -> tuple[dict[str, Layout], dict[str, StoredTensor], int]:
    size = draw(st.integers(1, 4))
    needs, stored, offset = {}, {}, 0
    for number in range(draw(st.integers(0, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        dtype = draw(st.sampled_from(["int8", "float32"]))
        key = f"t{number}"
        chunks = draw(chunks_of(shape))
        stored[key] = StoredTensor(
            shape,
            dtype,
            tuple(Chunk(region, "f", offset + 1000 * i) for i, region in enumerate(chunks)),
        )
        offset += 10_000
        needs[key] = draw(layouts(shape, dtype, size))
    return needs, stored, size


@st.composite
def chunks_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Region]:
    """The whole in one, or cut in two along one dim."""
    if not shape or draw(st.booleans()):
        return [Region.of_shape(shape)]
    dim = draw(st.integers(0, len(shape) - 1))
    at = draw(st.integers(0, shape[dim]))
    low, high = list(shape), [0] * len(shape)
    low[dim], high[dim] = at, at
    return [Region((0,) * len(shape), tuple(low)), Region(tuple(high), shape)]


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], dtype: str, size: int) -> Layout:
    if draw(st.booleans()):
        mesh: list[int] | list[list[int]] = list(range(size))
        if size == 4 and draw(st.booleans()):
            mesh = [[0, 1], [2, 3]]
        choices = ["R", *(f"S({dim})" for dim in range(len(shape)))]
        axes = 2 if isinstance(mesh[0], list) else 1
        placements = [draw(st.sampled_from(choices)) for _ in range(axes)]
        return Layout.from_mesh(shape=shape, dtype=dtype, mesh=mesh, placements=placements)
    pieces = {}
    for rank in range(size):
        edges = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        box = Region(tuple(low for low, _ in edges), tuple(high for _, high in edges))
        pieces[rank] = (Piece(box, (0,) * len(shape)),)
    return Layout(shape=shape, dtype=dtype, pieces=pieces)


@given(
    problems(),
    st.sampled_from([1, 4, 16]),
    st.sampled_from([1, 8, 1 << 20]),
    st.sampled_from([1, 16, 1 << 20]),
)
def test_every_rank_gets_what_it_needs_and_bytes_are_read_once(
    problem: tuple[dict[str, Layout], dict[str, StoredTensor], int],
    min_split: int,
    min_run: int,
    max_staged: int,
) -> None:
    needs, stored, size = problem
    plan = plan_load(
        needs, stored, range(size), min_split=min_split, min_run=min_run, max_staged=max_staged
    )
    assert all(times <= 1 for times in play(plan, needs, stored).values())
    received = Counter[int]()
    for step in (plan.exchange, *(step.exchange for step in plan.rounds)):
        for transfer in step:
            key = transfer.key.split("#")[0]
            if transfer.src != transfer.dst:
                width = 4 if stored[key].dtype == "float32" else 1
                received[transfer.dst] += transfer.region.numel * width
    assert {rank: received[rank] for rank in range(size)} == plan.lower_bound_received
    total = sum(plan.read_nbytes(rank) for rank in range(size))
    if not plan.rounds:
        assert total == plan.lower_bound_read
    assert plan.lower_bound_read <= total <= 2 * plan.lower_bound_read
    assert max(plan.read_nbytes(rank) for rank in range(size)) >= plan.lower_bound_slowest * (
        not plan.rounds
    )
