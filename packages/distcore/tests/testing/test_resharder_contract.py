"""check_resharder passes a right resharder, and sees each way to be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product

import pytest

from distcore.testing import check_resharder
from distcore.v1 import Layout, Plan, PlanError, Problem, Region, Transfer

Change = Callable[[list[Transfer]], Iterable[Transfer]]


class ElementByElement:
    """Sends every element on its own, from the first rank that holds it."""

    def __init__(self, change: Change = lambda transfers: transfers) -> None:
        self._change = change

    def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
        for key in sorted({*src, *dst}):
            if key not in src or key not in dst or src[key].shape != dst[key].shape:
                raise PlanError(Problem(key, "key", "does not fit"))
        return Plan(self._change(list(transfers_of(src, dst))))


def transfers_of(src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Iterable[Transfer]:
    for key in sorted(dst):
        for rank in dst[key].ranks:
            for piece in dst[key].pieces(rank):
                for element in product(*map(range, piece.region.start, piece.region.stop)):
                    cell = Region(element, tuple(i + 1 for i in element))
                    yield Transfer(key, holder(src[key], rank, cell), rank, cell)


def holder(layout: Layout, rank: int, cell: Region) -> int:
    ranks = [r for r in layout.ranks if any(p.region.contains(cell) for p in layout.pieces(r))]
    return rank if rank in ranks else ranks[0]


def test_a_right_resharder_passes() -> None:
    check_resharder(ElementByElement())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda transfers: transfers[1:], "0 times"),
        (lambda transfers: [*transfers, transfers[0]], "2 times"),
        (lambda ts: [Transfer(t.key, 9, t.dst, t.region) for t in ts], "does not hold"),
        (
            lambda ts: [Transfer("my " + t.key, t.src, t.dst, t.region) for t in ts],
            "nobody asked for",
        ),
    ],
)
def test_a_wrong_plan_is_seen(change: Change, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        check_resharder(ElementByElement(change))


def test_a_needless_transfer_is_seen() -> None:
    def take_from_a_peer(transfers: list[Transfer]) -> list[Transfer]:
        key = "(7,) ['R'] on [2, 3, 1] to ['R'] on [2, 3, 1]"
        return [Transfer(t.key, 2, t.dst, t.region) if t.key == key else t for t in transfers]

    with pytest.raises(AssertionError, match=r"holds .* itself"):
        check_resharder(ElementByElement(take_from_a_peer))


def test_an_order_that_follows_the_caller_is_seen() -> None:
    class Follows(ElementByElement):
        def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
            plan = super().plan(src, dst)
            return Plan(sorted(plan, key=lambda transfer: list(src).index(transfer.key)))

    with pytest.raises(AssertionError, match="two plans"):
        check_resharder(Follows())


def test_a_resharder_that_refuses_nothing_is_seen() -> None:
    class Lenient(ElementByElement):
        def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
            common = {*src} & {*dst}
            return super().plan({k: src[k] for k in common}, {k: dst[k] for k in common})

    with pytest.raises(AssertionError, match="a key without a source raised no PlanError"):
        check_resharder(Lenient())
