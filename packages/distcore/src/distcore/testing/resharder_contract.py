"""The contract of a resharder, as a proof that any implementation can be put to. Needs no torch.

check_resharder(MyResharder())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import product

from distcore.v1 import Layout, Mesh, Piece, Plan, PlanError, Region, Resharder

_SHAPES = ((), (0, 3), (7,), (5, 4), (2, 3, 4))
_PLACED: tuple[tuple[Mesh, list[str]], ...] = (
    ([0], ["R"]),
    ([0, 1], ["S(0)"]),
    ([2, 3, 1], ["R"]),
    ([[0, 1], [3, 2]], ["R", "S(-1)"]),
    ([[0, 1], [2, 3], [4, 5]], ["_S(0,2)", "S(0)"]),
)


def check_resharder(resharder: Resharder) -> None:
    """Prove that `resharder` keeps the contract of `Resharder`.

    For every pair of some layouts: each rank of the destination gets every element that it shall
    hold exactly once, and only from a rank that holds it, itself where it does; nobody gets
    anything else. The same arguments give the same plan, whatever the order of the keys. Keys
    and shapes that differ raise PlanError naming the key. AssertionError says what does not hold.
    """
    src, dst = _state_dicts()
    plan = resharder.plan(src, dst)
    problem = _fault_of(plan, src, dst)
    _expect(problem is None, f"the plan does not fit its layouts: {problem}")
    again = resharder.plan(dict(reversed(src.items())), dict(reversed(dst.items())))
    _expect(plan.digest == again.digest, "two calls with the same layouts gave two plans")
    _check_refusals(resharder)


def _state_dicts() -> tuple[dict[str, Layout], dict[str, Layout]]:
    """Every pair of placements of every shape that allows them, and one pair given by pieces."""
    src, dst = {}, {}
    for shape in _SHAPES:
        for one, other in product(_PLACED, repeat=2):
            if not shape and (one[1] != ["R"] or other[1] != ["R"]):
                continue
            key = f"{shape} {one[1]} on {one[0]} to {other[1]} on {other[0]}"
            src[key], dst[key] = (
                Layout.from_mesh(shape=shape, dtype="bfloat16", mesh=mesh, placements=placements)
                for mesh, placements in (one, other)
            )
    halves = {
        rank: [Piece(Region((low,), (low + 2,)), (0,))] for rank, low in ((0, 0), (1, 2), (2, 0))
    }
    src["pieces"] = Layout(shape=(4,), dtype="int8", pieces=halves)
    dst["pieces"] = Layout.from_mesh(shape=(4,), dtype="int8", mesh=[3, 0], placements=["S(0)"])
    return src, dst


def _fault_of(plan: Plan, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> str | None:
    """The first thing that is wrong with a plan, element by element, or None."""
    received: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for transfer in plan:
        if transfer.key not in src:
            return f"{transfer} is of a tensor that nobody asked for"
        holder = src[transfer.key]
        for element in _elements(transfer.region):
            if not _holds(holder, transfer.src, element):
                return f"{transfer}: the sender does not hold {element}"
            if transfer.src != transfer.dst and _holds(holder, transfer.dst, element):
                return f"{transfer}: the receiver holds {element} itself"
            received[transfer.key, transfer.dst, element] += 1
    wanted = Counter(
        (key, rank, element)
        for key, layout in dst.items()
        for rank in layout.ranks
        for piece in layout.pieces(rank)
        for element in _elements(piece.region)
    )
    for key, rank, element in (wanted - received) or (received - wanted):
        times = received[key, rank, element]
        return f"{key}: rank {rank} gets {element} {times} times"
    return None


def _holds(layout: Layout, rank: int, element: tuple[int, ...]) -> bool:
    cell = Region(element, tuple(i + 1 for i in element))
    return any(piece.region.contains(cell) for piece in layout.pieces(rank))


def _elements(region: Region) -> Iterator[tuple[int, ...]]:
    return product(*map(range, region.start, region.stop))


def _check_refusals(resharder: Resharder) -> None:
    one = Layout.replicated(shape=(2,), dtype="int8", ranks=[0])
    other = Layout.replicated(shape=(3,), dtype="int8", ranks=[1])
    for what, src, dst in (
        ("a key without a source", {}, {"lonely": one}),
        ("a key without a destination", {"lonely": one}, {}),
        ("two shapes", {"lonely": one}, {"lonely": other}),
    ):
        try:
            resharder.plan(src, dst)
        except PlanError as error:
            _expect("lonely" in str(error), f"{what}: the error does not name the key: {error}")
        else:
            _expect(False, f"{what} raised no PlanError")


def _expect(holds: bool, text: str) -> None:
    if not holds:
        raise AssertionError(text)
