"""Plan cache: what was planned is not planned again, and nothing else is taken for it."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.v1 import Layout, Piece, PlanError, Region
from reshard import Options, PlanCache, plan_reshard
from reshard.plan_cache import are_alike


def rows(*ranks: int, shape: tuple[int, ...] = (8, 4), dtype: str = "int8") -> Layout:
    return Layout.from_mesh(shape=shape, dtype=dtype, mesh=list(ranks), placements=["S(0)"])


def whole(*ranks: int, shape: tuple[int, ...] = (8, 4), dtype: str = "int8") -> Layout:
    return Layout.replicated(shape=shape, dtype=dtype, ranks=ranks)


def halves(first: int, second: int, at: int = 4) -> Layout:
    """Rows of two ranks, told by pieces."""
    ends = {first: (0, at), second: (at, 8)}
    pieces = {
        rank: [Piece(Region((low, 0), (high, 4)), (0, 0))] for rank, (low, high) in ends.items()
    }
    return Layout(shape=(8, 4), dtype="int8", pieces=pieces)


def test_the_same_plan_comes_again() -> None:
    cache = PlanCache()
    src, dst = {"a": rows(0, 1), "b": whole(0)}, {"a": rows(2, 3), "b": whole(2, 3)}
    plan = plan_reshard(src, dst, cache=cache)
    assert plan_reshard(src, dst, cache=cache) is plan
    made_anew = {"b": whole(0), "a": rows(0, 1)}, {"b": whole(2, 3), "a": rows(2, 3)}
    assert plan_reshard(*made_anew, cache=cache) is plan
    assert (cache.hits, cache.misses, len(cache)) == (2, 1, 1)
    assert plan_reshard(src, dst).digest == plan.digest


SRC, DST = {"a": rows(0, 1)}, {"a": rows(2, 3)}
OTHERS: dict[str, tuple[dict[str, Layout], dict[str, Layout], dict[str, object]]] = {
    "source": ({"a": rows(1, 0)}, DST, {}),
    "destination": (SRC, {"a": whole(2, 3)}, {}),
    "shape": ({"a": rows(0, 1, shape=(9, 4))}, {"a": rows(2, 3, shape=(9, 4))}, {}),
    "dtype": ({"a": rows(0, 1, dtype="uint8")}, {"a": rows(2, 3, dtype="uint8")}, {}),
    "key": ({"b": rows(0, 1)}, {"b": rows(2, 3)}, {}),
    "one key more": (SRC | {"b": whole(0)}, DST | {"b": whole(2)}, {}),
    "pieces": ({"a": halves(0, 1)}, DST, {}),
    "nodes": (SRC, DST, {"nodes": [0, 0, 1, 1]}),
    "options": (SRC, DST, {"options": Options(quantum_nbytes=1)}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_differs_is_planned_for_itself(name: str) -> None:
    cache = PlanCache()
    first = plan_reshard(SRC, DST, cache=cache)
    src, dst, terms = OTHERS[name]
    other = plan_reshard(src, dst, cache=cache, **terms)  # type: ignore[arg-type]
    assert other is not first
    assert (cache.hits, cache.misses, len(cache)) == (0, 2, 2)
    assert other.digest == plan_reshard(src, dst, **terms).digest  # type: ignore[arg-type]
    assert plan_reshard(src, dst, cache=cache, **terms) is other  # type: ignore[arg-type]
    assert plan_reshard(SRC, DST, cache=cache) is first


def test_aliases_belong_to_what_was_planned() -> None:
    cache = PlanCache()
    src, dst = {"a": rows(0, 1), "b": rows(0, 1)}, {"a": whole(2), "b": whole(2)}
    apart = plan_reshard(src, dst, cache=cache)
    tied = plan_reshard(src, dst, cache=cache, aliases={"b": "a"})
    assert tied.stats().wire_bytes * 2 == apart.stats().wire_bytes


def test_equal_layouts_with_ranks_in_another_order_are_planned_apart() -> None:
    """They are equal, but of two holders the first sends; and all ranks must plan the same."""
    cache = PlanCache()
    one, other = whole(0, 1), whole(1, 0)
    assert one == other
    dst = {"w": whole(2)}
    plans = [plan_reshard({"w": layout}, dst, cache=cache) for layout in (one, other)]
    assert [plan.stages[0][0].src for plan in plans] == [0, 1]


def test_pieces_are_compared_one_by_one() -> None:
    assert are_alike({"w": halves(0, 1)}, {"w": halves(0, 1)})
    assert not are_alike({"w": halves(0, 1)}, {"w": halves(0, 1, at=5)})
    assert not are_alike({"w": halves(0, 1)}, {"w": rows(0, 1)})


meshes = st.permutations(range(3)).flatmap(
    lambda ranks: st.sampled_from([rows(*ranks), rows(*ranks[:2]), whole(*ranks), whole(ranks[0])])
)


@given(st.lists(st.tuples(meshes, meshes), min_size=1, max_size=12))
def test_a_cache_never_changes_what_is_planned(pairs: list[tuple[Layout, Layout]]) -> None:
    cache = PlanCache(3)
    for src, dst in pairs:
        cached = plan_reshard({"w": src}, {"w": dst}, cache=cache)
        assert cached.digest == plan_reshard({"w": src}, {"w": dst}).digest
    assert cache.hits + cache.misses == len(pairs)
    assert len(cache) <= 3
    repeated = sum(one == other for one, other in pairwise(map(str, pairs)))
    assert cache.hits >= repeated


def test_what_was_not_asked_for_longest_goes_first() -> None:
    cache = PlanCache(2)
    sides = [({"w": rows(0, 1)}, {"w": whole(rank)}) for rank in (2, 3, 4)]
    plans = [plan_reshard(*sides[at], cache=cache) for at in (0, 1)]
    assert plan_reshard(*sides[0], cache=cache) is plans[0]
    plan_reshard(*sides[2], cache=cache)
    assert len(cache) == 2
    assert plan_reshard(*sides[0], cache=cache) is plans[0]
    assert plan_reshard(*sides[1], cache=cache) is not plans[1]
    cache.clear()
    assert len(cache) == 0


def test_threads_that_planned_at_once_keep_one_plan() -> None:
    cache = PlanCache()
    made = [plan_reshard(SRC, DST) for _ in range(2)]
    assert [cache.keep(plan) for plan in made] == [made[0], made[0]]
    assert cache.keep(made[1]) is made[0]
    assert len(cache) == 1


def test_mistakes_are_not_kept() -> None:
    cache = PlanCache()
    for _ in range(2):
        with pytest.raises(PlanError, match="no destination"):
            plan_reshard(SRC | {"b": whole(0)}, DST, cache=cache)
    assert len(cache) == 0
    with pytest.raises(PlanError, match="max_plans"):
        PlanCache(0)


def test_a_cached_plan_takes_microseconds_a_tensor() -> None:
    """Where nothing else runs, 0.1 us a tensor for the same layouts, 3 us for others like them."""
    keys = [f"layers.{number}.weight" for number in range(10_000)]
    src, dst = dict.fromkeys(keys, rows(0, 1)), dict.fromkeys(keys, rows(2, 3))
    cache = PlanCache()
    plan = plan_reshard(src, dst, cache=cache)
    anew = {key: rows(0, 1) for key in keys}, {key: rows(2, 3) for key in keys}
    for sides in ((src, dst), anew):
        begin = time.process_time()
        assert plan_reshard(*sides, cache=cache) is plan
        assert (time.process_time() - begin) / len(keys) < 50e-6
