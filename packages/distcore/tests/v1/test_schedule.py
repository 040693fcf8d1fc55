"""Schedules: the rounds of all ranks fit together, cover the plan, and keep the budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distcore.testing import strategies
from distcore.v1 import Plan, Region, Transfer, schedule
from distcore.v1.schedule import (
    DIRECT_NBYTES,
    MAX_PARTS,
    OWN_BUFFER_NBYTES,
    PEERS,
    Batch,
    Part,
    Round,
    Terms,
    aligned,
    cut_region,
    fit_one_batch,
    phases_of,
    plan_rounds,
    regions_of,
    rows_of,
)

KIB, MIB = 1 << 10, 1 << 20
SHAPES = ((), (3,), (0, 4), (70_000,), (300, 401), (2, 1, 90_001), (5, 4), (1, 16, 3), (3 * MIB,))
ITEMSIZES = (1, 2, 4, 8, 16)


@dataclass
class Case:
    """A plan on a group of ranks, and what its pairs know about each other."""

    plan: Plan
    ranks: tuple[int, ...]
    itemsizes: Mapping[str, int]
    staging_nbytes: int = 64 * MIB
    digest_nbytes: int = 0
    scattering: frozenset[frozenset[int]] = frozenset()
    contiguous: frozenset[int] = frozenset()
    rounds: dict[int, tuple[Round, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        phases = phases_of(self.plan, self.ranks)
        for index, rank in enumerate(self.ranks):
            _, sends, receives = rows_of(self.plan, rank)
            self.rounds[rank] = plan_rounds(
                {peer: self.parts(rows) for peer, rows in sends.items()},
                {peer: self.parts(rows) for peer, rows in receives.items()},
                index,
                self.ranks,
                self.terms(rank),
                phases=phases,
            )

    def parts(self, rows: Sequence[int]) -> list[Part]:
        return [
            Part(key, region, region.numel * self.itemsizes[key])
            for key, region in regions_of(self.plan, rows)
        ]

    def terms(self, rank: int) -> Terms:
        return Terms(
            self.staging_nbytes,
            scatters=lambda peer: self.scatters(rank, peer),
            direct=lambda peer: self.is_direct(rank, peer),
            digest_nbytes=self.digest_nbytes,
        )

    def scatters(self, one: int, other: int) -> bool:
        return frozenset((one, other)) in self.scattering

    def is_direct(self, one: int, other: int) -> bool:
        return {one, other} <= self.contiguous

    def messages(self, src: int, dst: int) -> tuple[list[Batch], list[Batch]]:
        """The batches from `src` to `dst`, as the sender and as the receiver has them."""
        sent = [b for step in self.rounds[src] for b in step.sends if b.peer == dst]
        received = [b for step in self.rounds[dst] for b in step.receives if b.peer == src]
        return sent, received


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 6))
    ranks = tuple(draw(st.permutations(range(12)))[:size])
    shapes = {f"t{n}": draw(st.sampled_from(SHAPES)) for n in range(3)}
    transfers = []
    for _ in range(draw(st.integers(0, 14))):
        key = draw(st.sampled_from(sorted(shapes)))
        corners = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in shapes[key]]
        region = Region(tuple(low for low, _ in corners), tuple(high for _, high in corners))
        src, dst = draw(st.sampled_from(ranks)), draw(st.sampled_from(ranks))
        transfers += [Transfer(key, src, dst, region)] * draw(st.sampled_from((1, 1, 3, 60)))
    pairs = [frozenset((one, other)) for one in ranks for other in ranks if one != other]
    return Case(
        plan=Plan(transfers),
        ranks=ranks,
        itemsizes={key: draw(st.sampled_from(ITEMSIZES)) for key in shapes},
        staging_nbytes=draw(st.sampled_from((64 * KIB, 100_001, MIB, 64 * MIB))),
        digest_nbytes=draw(st.sampled_from((0, 8))),
        scattering=frozenset(pair for pair in pairs if draw(st.booleans())),
        contiguous=frozenset(rank for rank in ranks if draw(st.booleans())),
    )


def check_pairs(case: Case) -> None:
    """Both ends of every pair have the same messages, and these are the plan's transfers."""
    crossing = defaultdict(list)
    for transfer in case.plan:
        if transfer.src != transfer.dst:
            crossing[transfer.src, transfer.dst].append((transfer.key, transfer.region))
    for src in case.ranks:
        for dst in case.ranks:
            sent, received = case.messages(src, dst)
            assert [(b.parts, b.buffers) for b in sent] == [(b.parts, b.buffers) for b in received]
            check_parts(crossing[src, dst], [part for batch in sent for part in batch.parts], case)
            for batch in sent:
                assert [at for run in batch.buffers for at in run] == list(range(len(batch.parts)))


def check_parts(wanted: list[tuple[str, Region]], parts: list[Part], case: Case) -> None:
    """The parts are the transfers in order, each whole or cut into boxes that cover it once."""
    left_over = iter(parts)
    for key, region in wanted:
        left = region.numel
        while left:
            part = next(left_over)
            assert part.key == key
            assert region.contains(part.region)
            assert part.nbytes == part.region.numel * case.itemsizes[key] > 0
            left -= part.region.numel
        assert left == 0
    assert list(left_over) == []


def check_budget(case: Case) -> None:
    """What may be staged of two rounds stays within the budget, and operations are bounded."""
    for rank, rounds in case.rounds.items():
        for step in rounds:
            assert step.sends or step.receives
            for batches in (step.sends, step.receives):
                peers = [batch.peer for batch in batches]
                assert len(set(peers)) == len(peers) <= PEERS
                staged = sum(staged_nbytes(case, rank, batch) for batch in batches)
                assert staged <= case.staging_nbytes // 4
                assert all(0 < len(batch.parts) <= MAX_PARTS for batch in batches)


def staged_nbytes(case: Case, rank: int, batch: Batch) -> int:
    """The staging that a batch takes at worst: a part alone in its buffer may lie contiguous."""
    direct = case.is_direct(rank, batch.peer)
    runs = [run for run in batch.buffers if not (direct and len(run) == 1)]
    packed = sum(aligned(batch.parts[at].nbytes) for run in runs for at in run)
    return packed + aligned(case.digest_nbytes * len(batch.parts))


def check_progress(case: Case, in_flight: int) -> None:
    """Where each message waits for both ends, and each rank for its oldest round, all ends.

    A rank begins its rounds in order and has at most `in_flight` of them begun at a time.
    """
    begun = dict.fromkeys(case.ranks, 0)
    ended = dict.fromkeys(case.ranks, 0)
    posted: dict[tuple[str, int, int], int] = defaultdict(int)
    places = {rank: numbered(case, rank) for rank in case.ranks}
    moved = True
    while moved:
        moved = False
        for rank, rounds in case.rounds.items():
            while begun[rank] < len(rounds) and begun[rank] - ended[rank] < in_flight:
                for side, peer, _ in places[rank][begun[rank]]:
                    pair = (rank, peer) if side == "send" else (peer, rank)
                    posted[side, *pair] += 1
                begun[rank] += 1
                moved = True
            if ended[rank] < begun[rank] and all(
                posted["receive" if side == "send" else "send", *pair_of(side, rank, peer)] > place
                for side, peer, place in places[rank][ended[rank]]
            ):
                ended[rank] += 1
                moved = True
    assert ended == {rank: len(rounds) for rank, rounds in case.rounds.items()}


def pair_of(side: str, rank: int, peer: int) -> tuple[int, int]:
    return (rank, peer) if side == "send" else (peer, rank)


def numbered(case: Case, rank: int) -> list[list[tuple[str, int, int]]]:
    """For each round its messages: side, peer, and which message of that pair it is."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    found = []
    for step in case.rounds[rank]:
        here = []
        for side, batches in (("send", step.sends), ("receive", step.receives)):
            for batch in batches:
                here.append((side, batch.peer, counts[side, batch.peer]))
                counts[side, batch.peer] += 1
        found.append(here)
    return found


@given(cases())
def test_rounds_of_any_plan_fit_together(case: Case) -> None:
    check_pairs(case)
    check_budget(case)
    check_progress(case, in_flight=1)
    check_progress(case, in_flight=2)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("size", [2, 9, 10, 40])
@pytest.mark.parametrize("digest_nbytes", [0, 8])
def test_rounds_of_a_large_group_fit_together(size: int, digest_nbytes: int, dense: bool) -> None:
    ranks = tuple(range(3, size + 3))
    transfers = [
        Transfer(f"t{src}", src, dst, Region((0,), (1 + (src * 37 + dst * 11) % 3000,)))
        for src in ranks
        for dst in ranks
        if ((src + dst) % 3 > 0) is dense
    ]
    itemsizes = {f"t{src}": ITEMSIZES[src % 5] for src in ranks}
    case = Case(Plan(transfers), ranks, itemsizes, 64 * KIB, digest_nbytes)
    check_pairs(case)
    check_budget(case)
    check_progress(case, in_flight=1)
    check_progress(case, in_flight=2)


def far_apart(size: int, peers: int) -> Case:
    """A part from each rank to `peers` others, at distances as different as can be."""
    step = size // peers
    transfers = [
        Transfer("w", rank, (rank + 1 + step * at) % size, Region((), ()))
        for rank in range(size)
        for at in range(peers)
    ]
    return Case(Plan(transfers), tuple(range(size)), {"w": 1})


def test_a_rank_with_few_peers_has_them_all_under_way_wherever_they_are() -> None:
    case = far_apart(64, PEERS)
    assert phases_of(case.plan, case.ranks) == {}
    assert {len(rounds) for rounds in case.rounds.values()} == {1}
    check_pairs(case)
    check_budget(case)


def test_there_are_as_few_phases_as_can_be() -> None:
    """Of 20 peers each, at distances 1, 4, 7, ...: eight, eight and four."""
    case = far_apart(60, 20)
    phases = phases_of(case.plan, case.ranks)
    assert sorted({*phases.values()}) == [0, 1, 2]
    assert {len(rounds) for rounds in case.rounds.values()} == {3}
    check_pairs(case)
    check_budget(case)
    check_progress(case, in_flight=1)


def test_very_many_pairs_go_by_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    case = far_apart(60, 20)
    monkeypatch.setattr(schedule, "MAX_MATCHED", len(case.plan) - 1)
    phases = phases_of(case.plan, case.ranks)
    assert phases[0, 1] == phases[59, 0] == 0
    assert phases[0, 58] == phases[5, 3] == 57 // PEERS


def test_where_most_are_peers_of_most_they_go_by_distance() -> None:
    case = far_apart(40, 20)
    assert phases_of(case.plan, case.ranks)[39, 38] == 38 // PEERS


PAIR = frozenset({frozenset({0, 1})})
BOTH = frozenset({0, 1})


@pytest.mark.parametrize(
    "terms",
    [
        {"digest_nbytes": 8},
        {"staging_nbytes": 100_001},
        {"digest_nbytes": 8, "contiguous": BOTH},
        {"digest_nbytes": 8, "contiguous": BOTH, "scattering": PAIR},
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [[40 * KIB], [1] * 5000], ids=["one large", "many small"])
def test_the_budget_is_kept_to_the_byte(sizes: list[int], terms: dict[str, Any]) -> None:
    case = two_ranks(sizes, **{"staging_nbytes": 64 * KIB, **terms})
    check_pairs(case)
    check_budget(case)


def test_the_check_of_progress_finds_a_deadlock() -> None:
    """The proof above can fail: two ranks that begin with different peers wait for ever."""
    region = Region((0,), (4,))
    pairs = [(0, 1), (1, 2), (2, 0)]
    plan = Plan([Transfer("t0", src, dst, region) for src, dst in pairs])
    case = Case(plan, (0, 1, 2), {"t0": 1})
    for src, dst in pairs:
        send = next(b for step in case.rounds[src] for b in step.sends if b.peer == dst)
        other = next(b for step in case.rounds[src] for b in step.receives)
        case.rounds[src] = (Round((send,), ()), Round((), (other,)))
    with pytest.raises(AssertionError):
        check_progress(case, in_flight=1)


# What lies in one message


def batches_of(case: Case) -> list[list[list[int]]]:
    """The sizes of the parts of rank 0's messages to rank 1, by message and buffer."""
    sent, _ = case.messages(0, 1)
    return [[[b.parts[at].nbytes for at in run] for run in b.buffers] for b in sent]


def two_ranks(sizes: list[int], **terms: Any) -> Case:
    transfers = [Transfer(f"t{n}", 0, 1, Region((0,), (size,))) for n, size in enumerate(sizes)]
    return Case(Plan(transfers), (0, 1), {f"t{n}": 1 for n in range(len(sizes))}, **terms)


def test_small_parts_are_packed_and_large_ones_have_buffers_of_their_own() -> None:
    case = two_ranks([10, 20, OWN_BUFFER_NBYTES, 30, OWN_BUFFER_NBYTES - 1])
    large = 256 * KIB
    assert batches_of(case) == [[[10, 20], [large], [30, large - 1]]]


def test_a_batch_ends_where_the_quota_is_full() -> None:
    # 64 KiB / (2 rounds * 2 directions * 1 peer) = 16 KiB, in which a part of 5000 takes 5008.
    case = two_ranks([5000] * 7, staging_nbytes=64 * KIB)
    assert batches_of(case) == [[[5000] * 3], [[5000] * 3], [[5000]]]


def test_digests_take_their_share_of_the_quota() -> None:
    sizes = [8176, 8176, 16]
    assert batches_of(two_ranks(sizes, staging_nbytes=64 * KIB)) == [[[8176, 8176, 16]]]
    case = two_ranks(sizes, staging_nbytes=64 * KIB, digest_nbytes=8)
    assert batches_of(case) == [[[8176, 8176]], [[16]]]


def test_a_part_above_the_quota_is_cut_unless_nothing_is_staged() -> None:
    sizes = [40 * KIB]
    assert batches_of(two_ranks(sizes, staging_nbytes=64 * KIB)) == [
        [[16 * KIB]],
        [[16 * KIB]],
        [[8 * KIB]],
    ]
    case = two_ranks(sizes, staging_nbytes=64 * KIB, contiguous=BOTH)
    assert batches_of(case) == [[[40 * KIB]]]
    case = two_ranks([DIRECT_NBYTES + 5], staging_nbytes=MIB, contiguous=BOTH)
    assert batches_of(case) == [[[DIRECT_NBYTES]], [[5]]]


def test_where_buffers_cost_nothing_none_is_packed() -> None:
    case = two_ranks([10, 20, 30], scattering=PAIR)
    assert batches_of(case) == [[[10], [20], [30]]]
    case = two_ranks([MIB] * 40, scattering=PAIR, contiguous=BOTH)
    assert batches_of(case) == [[[MIB]] * 40]
    assert len(batches_of(two_ranks([MIB] * 40, scattering=PAIR))) == 3


def test_empty_regions_are_not_sent() -> None:
    assert batches_of(two_ranks([0, 5, 0])) == [[[5]]]
    assert two_ranks([0]).rounds == {0: (), 1: ()}


# Cutting and reading a plan


@given(st.lists(st.integers(1, 7), max_size=4), st.integers(1, 60), st.integers(0, 3))
def test_boxes_of_a_cut_cover_the_region_once_in_order(
    shape: list[int], max_numel: int, offset: int
) -> None:
    region = Region(tuple(offset for _ in shape), tuple(offset + n for n in shape))
    boxes = list(cut_region(region, max_numel))
    assert all(0 < box.numel <= max_numel and region.contains(box) for box in boxes)
    indices = [index for box in boxes for index in indices_of(box)]
    assert indices == indices_of(region)


def indices_of(region: Region) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for low, high in zip(region.start, region.stop, strict=True):
        found = [(*index, at) for index in found for at in range(low, high)]
    return found


def test_a_cut_keeps_whole_rows_where_they_fit() -> None:
    boxes = cut_region(Region((0, 2), (1, 8)), 4)
    assert [(box.start, box.stop) for box in boxes] == [((0, 2), (1, 6)), ((0, 6), (1, 8))]
    assert list(cut_region(Region((), ()), 1)) == [Region((), ())]


@given(strategies.plans(num_ranks=3))
def test_rows_and_regions_of_a_rank_are_those_of_the_plan(plan: Plan) -> None:
    for rank in range(3):
        local, sends, receives = rows_of(plan, rank)
        wanted: dict[tuple[int, int], list[int]] = defaultdict(list)
        for row, transfer in enumerate(plan):
            if rank in (transfer.src, transfer.dst):
                wanted[transfer.src, transfer.dst].append(row)
        found = {(rank, peer): rows for peer, rows in sends.items()}
        found |= {(peer, rank): rows for peer, rows in receives.items()}
        assert {**found, **({(rank, rank): local} if local else {})} == wanted
        for rows in (local, *found.values()):
            pairs = [(plan[row].key, plan[row].region) for row in rows]
            assert regions_of(plan, rows) == pairs


def test_equal_regions_are_one_object() -> None:
    plan = Plan([Transfer(key, 0, 1, Region((0,), (4,))) for key in "abc"])
    assert len({id(region) for _, region in regions_of(plan, [0, 1, 2])}) == 1


@settings(max_examples=30)
@given(cases())
def test_what_fits_one_batch_goes_the_same_way_whoever_lies_in_order(case: Case) -> None:
    def never(peer: int) -> bool:
        return False

    def always(peer: int) -> bool:
        return True

    for index, rank in enumerate(case.ranks):
        sends, receives = (
            {peer: case.parts(rows) for peer, rows in side.items()}
            for side in rows_of(case.plan, rank)[1:]
        )
        staged, direct = (Terms(case.staging_nbytes, never, one, 8) for one in (never, always))
        if fit_one_batch(sends, receives, len(case.ranks), staged):
            rounds, others = (
                plan_rounds(sends, receives, index, case.ranks, one, phases={})
                for one in (staged, direct)
            )
            assert rounds == others
            peers = [batch.peer for step in rounds for batch in step.sends]
            assert len(set(peers)) == len(peers)


def test_one_byte_more_than_the_quota_does_not_fit_one_batch() -> None:
    """Of 64 KiB, with one peer, a batch has a quarter."""
    terms = Terms(64 * KIB, lambda _: False, lambda _: False)
    region = Region((0,), (16 * KIB,))
    part = Part("w", region, 16 * KIB)
    assert fit_one_batch({1: [part]}, {1: [part]}, 2, terms)
    assert not fit_one_batch({1: [part]}, {1: [part, part]}, 2, terms)
    assert not fit_one_batch({1: [Part("w", region, 16 * KIB + 1)]}, {}, 2, terms)
