"""plan_reshard: worked examples, an oracle of single elements, yardsticks of real models."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcore.testing.strategies import layout_pairs
from distcore.v1 import Layout, Mesh, PlanError, Region
from reshard import Options, ReshardPlan, plan_reshard
from reshard.models import model_of
from reshard.strategy import Strategy

Move = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def layout(shape: tuple[int, ...], mesh: Mesh, *placements: str) -> Layout:
    return Layout.from_mesh(shape=shape, dtype="float32", mesh=mesh, placements=placements)


def moves(plan: ReshardPlan) -> list[Move]:
    (stage,) = plan.stages
    return [(t.src, t.dst, t.region.start, t.region.stop) for t in stage]


# Cells with one holder each, so that there is one right plan. Numbers are elements.
EXAMPLES: dict[str, tuple[Layout, Layout, list[Move]]] = {
    "uneven rows to one rank": (
        layout((10,), [0, 1, 2, 3], "S(0)"),
        layout((10,), [4], "R"),
        [(0, 4, (0,), (3,)), (1, 4, (3,), (6,)), (2, 4, (6,), (9,)), (3, 4, (9,), (10,))],
    ),
    "three ranks to two": (
        layout((7, 3), [0, 1, 2], "S(0)"),
        layout((7, 3), [3, 4], "S(0)"),
        [
            (0, 3, (0, 0), (3, 3)),
            (1, 3, (3, 0), (4, 3)),
            (1, 4, (4, 0), (6, 3)),
            (2, 4, (6, 0), (7, 3)),
        ],
    ),
    "two axes cut one dim": (
        layout((5,), [[0, 1], [2, 3]], "S(0)", "S(0)"),
        layout((5,), [4, 5], "S(0)"),
        [(0, 4, (0,), (2,)), (1, 4, (2,), (3,)), (2, 5, (3,), (4,)), (3, 5, (4,), (5,))],
    ),
    "rows to columns": (
        layout((4, 6), [0, 1], "S(0)"),
        layout((4, 6), [2, 3], "S(1)"),
        [
            (0, 2, (0, 0), (2, 3)),
            (0, 3, (0, 3), (2, 6)),
            (1, 2, (2, 0), (4, 3)),
            (1, 3, (2, 3), (4, 6)),
        ],
    ),
    "more ranks than rows": (
        layout((2, 3), [0, 1, 2, 3], "S(0)"),
        layout((2, 3), [4, 5, 6], "S(0)"),
        [(0, 4, (0, 0), (1, 3)), (1, 5, (1, 0), (2, 3))],
    ),
    "a mesh out of order": (
        layout((4,), [1, 0], "S(0)"),
        layout((4,), [2], "R"),
        [(0, 2, (2,), (4,)), (1, 2, (0,), (2,))],
    ),
    "a scalar": (layout((), [0], "R"), layout((), [1], "R"), [(0, 1, (), ())]),
    "no elements": (layout((0, 4), [0, 1], "S(0)"), layout((0, 4), [2], "R"), []),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_examples(name: str) -> None:
    src, dst, expected = EXAMPLES[name]
    assert moves(plan_reshard({"w": src}, {"w": dst})) == expected


def test_replicas_share_what_is_sent() -> None:
    """[0,1] R -> four replicas: each source serves two receivers whole, in one stage."""
    src, dst = layout((8, 2), [0, 1], "R"), layout((8, 2), [2, 3, 4, 5], "R")
    plan = plan_reshard({"w": src}, {"w": dst}, options=Options(fan_out="direct"))
    assert plan.stats()["max_egress_bytes"] == plan.bounds()["max_egress_bytes"] == 128


def test_stripes_spread_a_fan_out_over_its_receivers() -> None:
    src, dst = layout((8, 2), [0, 1], "R"), layout((8, 2), [2, 3, 4, 5], "R")
    options = Options(fan_out="stripe", stripe_nbytes=1)
    plan = plan_reshard({"w": src}, {"w": dst}, options=options)
    first = [(t.src, t.dst, t.region.start[0], t.region.stop[0]) for t in plan.stages[0]]
    assert first == [(0, 2, 0, 2), (0, 4, 4, 6), (1, 3, 2, 4), (1, 5, 6, 8)]
    assert len(plan.stages[1]) == 12
    stats = plan.stats()
    assert (stats["wire_bytes"], stats["max_egress_bytes"]) == (256, 48)
    assert stats["max_ingress_bytes"] == 64


def test_three_replicas_of_rows_that_three_does_not_divide_are_striped() -> None:
    src, dst = layout((8, 2), [0], "R"), layout((8, 2), [2, 3, 4], "R")
    plan = plan_reshard({"w": src}, {"w": dst}, options=Options(stripe_nbytes=1))
    assert len(plan.stages) == 2
    assert plan.stats()["max_egress_bytes"] == 64  # direct would be 192


def test_what_a_rank_holds_already_is_never_sent() -> None:
    """Overlapping meshes: rank 0 holds all that it needs, so only 2 and 3 receive."""
    src, dst = layout((8,), [0, 1], "S(0)"), layout((8,), [[0, 1], [2, 3]], "R", "S(0)")
    assert moves(plan_reshard({"w": src}, {"w": dst})) == [
        (0, 0, (0,), (4,)),
        (0, 2, (0,), (4,)),
        (1, 1, (4,), (8,)),
        (1, 3, (4,), (8,)),
    ]


def test_a_large_cell_is_split_over_its_holders() -> None:
    src, dst = layout((4,), [0, 1, 2, 3], "R"), layout((4,), [9], "R")
    plan = plan_reshard({"w": src}, {"w": dst}, options=Options(quantum_nbytes=4))
    assert plan.stats()["max_egress_bytes"] == 4


def test_senders_on_the_receivers_own_node_come_first() -> None:
    src, dst = layout((6,), [0, 4], "R"), layout((6,), [1, 5], "R")
    plan = plan_reshard({"w": src}, {"w": dst}, nodes=[0, 0, 0, 0, 1, 1, 1, 1])
    assert [(t.src, t.dst) for t in plan.stages[0]] == [(0, 1), (4, 5)]


def test_one_copy_crosses_the_nodes_where_that_is_dear() -> None:
    src, dst = layout((600,), [0], "R"), layout((600,), [4, 5, 6, 7], "R")
    options = Options(node_cost=10, stripe_nbytes=1)
    plan = plan_reshard({"w": src}, {"w": dst}, nodes=[0] * 4 + [1] * 4, options=options)
    assert sum(t.region.numel for t in plan.stages[0]) == 600
    assert {t.src for t in plan.stages[1]} == {4, 5, 6, 7}


def test_peers_are_few_where_few_are_asked_for() -> None:
    src = {f"w{n}": layout((64,), list(range(8)), "R") for n in range(32)}
    dst = {f"w{n}": layout((64,), [8, 9, 10], "R") for n in range(32)}
    few = plan_reshard(src, dst, options=Options(max_peers=2)).stats()
    assert few["max_peers"] == 2
    assert few["wire_bytes"] == 32 * 3 * 256
    assert plan_reshard(src, dst).stats()["max_peers"] == 8


@given(pair=layout_pairs(), options=st.sampled_from(["auto", "direct", "stripe"]))
def test_every_missing_element_arrives_exactly_once(
    pair: tuple[Layout, Layout], options: str
) -> None:
    src, dst = pair
    how = Options(fan_out=options, quantum_nbytes=3, stripe_nbytes=1)  # type: ignore[arg-type]
    held = {rank: elements(src, rank) for rank in {*src.ranks, *dst.ranks}}
    needed = {index for rank in dst.ranks for index in elements(dst, rank)}
    if not needed <= set().union(*held.values()):
        with pytest.raises(PlanError, match="no source rank holds"):
            plan_reshard({"w": src}, {"w": dst}, options=how)
        return
    plan = plan_reshard({"w": src}, {"w": dst}, options=how)
    reached = {rank: elements(src, rank) for rank in held}
    arrived: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in held}
    for stage in plan.stages:
        before = {rank: set(found) for rank, found in reached.items()}
        for transfer in stage:
            sent = set(indices(transfer.region))
            assert sent <= before[transfer.src]
            if transfer.src != transfer.dst:
                arrived[transfer.dst] += sent
            reached[transfer.dst] |= sent
    for rank, own in held.items():
        missing = elements(dst, rank) - own
        assert sorted(arrived[rank]) == sorted(missing)


def indices(region: Region) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for low, high in zip(region.start, region.stop, strict=True):
        found = [(*index, i) for index in found for i in range(low, high)]
    return found


def elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    return {index for piece in layout.pieces(rank) for index in indices(piece.region)}


# From, to, and the bound on what the busiest rank sends, in bytes: the whole Llama-3-8B state
# dict in bfloat16, 291 tensors, 16 060 522 496 bytes.
LLAMA = [
    ("dp=4,fsdp=2", "tp=8@8", 2_008_031_232),
    ("dp=4", "tp=2@4", 4_015_263_744),
    ("tp=4,dp=2", "tp=8@8", 2_008_031_232),
    ("fsdp=8", "tp=4,dp=2@8", 4_015_529_984),
    ("fsdp=8", "dp=3@8", 6_022_695_936),
    ("fsdp=8", "tp=8@8", 2_008_031_232),
    ("dp=2,fsdp=2,tp=2", "tp=4@4", 2_007_498_752),
]


@pytest.mark.parametrize(("src", "dst", "bound"), LLAMA)
def test_a_whole_llama_goes_at_the_lower_bound(src: str, dst: str, bound: int) -> None:
    model = model_of("llama-3-8b")
    assert (len(model.weights), model.nbytes) == (291, 16_060_522_496)
    plan = plan_reshard(
        Strategy.parse(src).layouts(model),
        Strategy.parse(dst).layouts(model),
    )
    stats, bounds = plan.stats(), plan.bounds()
    assert bounds["max_egress_bytes"] == bound
    assert stats["wire_bytes"] == bounds["wire_bytes"]
    assert stats["max_ingress_bytes"] == bounds["max_ingress_bytes"]
    assert bound <= stats["max_egress_bytes"] <= 1.02 * bound
    assert stats["max_peers"] <= 8


# The cases of Alpa's benchmark of transfers between meshes (its seventh and eighth are alike): the
# sizes of both meshes, placements, and the shape of the tensor.
ALPA: list[tuple[int, str, int, str, tuple[int, ...]]] = [
    (2, "S(0) R", 2, "S(0) R", (1024, 1024, 512)),
    (2, "R R", 2, "S(0) R", (1024, 1024, 512)),
    (2, "S(1) R", 2, "S(0) R", (1024, 1024, 512)),
    (2, "S(1) S(1)", 2, "S(0) S(0)", (1024, 1024, 512)),
    (2, "R S(0)", 2, "S(0) R", (1024, 1024, 512)),
    (2, "S(0) R", 3, "S(0) R", (3072, 1024, 170)),
    (1, "R S(0)", 2, "R R", (1024, 1024, 512)),
    (2, "S(1) R", 2, "S(2) R", (1024, 1024, 512)),
]


@pytest.mark.parametrize(("src", "placed", "dst", "wanted", "shape"), ALPA)
def test_alpas_cases_go_at_the_lower_bound(
    src: int, placed: str, dst: int, wanted: str, shape: tuple[int, ...]
) -> None:
    """Hosts with four devices each; the meshes are apart."""
    sides = [
        [[first + 4 * host + device for device in range(4)] for host in range(hosts)]
        for hosts, first in ((src, 0), (dst, 8))
    ]
    plan = plan_reshard(
        {"w": layout(shape, sides[0], *placed.split())},
        {"w": layout(shape, sides[1], *wanted.split())},
    )
    stats, bounds = plan.stats(), plan.bounds()
    assert stats["wire_bytes"] == bounds["wire_bytes"]
    assert stats["max_egress_bytes"] <= 1.02 * bounds["max_egress_bytes"]
    assert stats["max_ingress_bytes"] == bounds["max_ingress_bytes"]


def test_more_than_4_gib_per_rank_is_planned_in_full() -> None:
    """nccl-extensions#15: 2**32 bytes per rank hung. Plans count in 64 bits."""
    shape = (1 << 17, 1 << 17)
    src, dst = layout(shape, [0], "R"), layout(shape, [1, 2], "S(1)")
    plan = plan_reshard({"w": src}, {"w": dst})
    assert plan.stats()["wire_bytes"] == 1 << 36


def test_a_thousand_ranks_to_a_thousand_take_little_time() -> None:
    src = layout((1_049_353,), list(range(1024)), "S(0)")
    dst = layout((1_049_353,), list(range(1024, 2048)), "S(0)")
    plan_reshard({"w": src}, {"w": dst})
    begin = time.process_time()
    plan = plan_reshard({"w": src}, {"w": dst})
    assert time.process_time() - begin < 0.5  # 0.03 s where nothing else runs
    assert len(plan.stages[0]) == 1024


def test_many_experts_between_many_ranks() -> None:
    """A slice of a trillion parameters: 2 of 94 layers, from 2 048 ranks to 1 024."""
    model = model_of("moe-1t")
    kept = {
        key: weight
        for key, weight in model.weights.items()
        if weight.expert is not None and weight.layer in (0, 50)
    }
    model = type(model)(kept, model.num_layers, model.num_experts)
    src = Strategy.parse("pp=8,ep=32,fsdp=8").layouts(model)
    dst = Strategy.parse("ep=128,tp=8@2048").layouts(model)
    plan = plan_reshard(src, dst)
    assert len(kept) == 2112
    assert plan.stats()["wire_bytes"] == plan.bounds()["wire_bytes"] == model.nbytes


def test_json_keeps_digest_stats_and_bounds() -> None:
    src = {"b": layout((5,), [0, 1], "S(0)"), "a": layout((4, 2), [0], "R")}
    dst = {"a": layout((4, 2), [1, 2, 3], "R"), "b": layout((5,), [2], "R")}
    options = Options(fan_out="stripe", stripe_nbytes=1, max_peers=3)
    plan = plan_reshard(src, dst, nodes={0: 0, 1: 0, 2: 1, 3: 1}, options=options)
    again = ReshardPlan.from_json(plan.to_json())
    assert again.digest == plan.digest
    assert dict(again.stats()) == dict(plan.stats())
    assert dict(again.bounds()) == dict(plan.bounds())
    assert (again.options, again.nodes) == (plan.options, plan.nodes)
    assert plan_reshard(dict(reversed(src.items())), dst, nodes=plan.nodes, options=options) == plan


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": 2}, "format 2; this reads 1"),
        ({"kind": "other"}, "not a reshard.plan object"),
        ({"stages": 3}, "a part is missing or of the wrong type"),
        ({"options": {"strange": 1}}, "a part is missing or of the wrong type"),
        ({"forms": [{}]}, "format None"),
        ({"tensors": {}}, "w: is moved, but has no layout"),
    ],
)
def test_json_that_is_no_plan_is_refused(change: dict[str, object], text: str) -> None:
    plan = plan_reshard({"w": layout((4,), [0], "R")}, {"w": layout((4,), [1], "R")})
    table = json.loads(plan.to_json()) | change
    with pytest.raises(PlanError, match=text):
        ReshardPlan.from_json(json.dumps(table))


def test_text_that_is_no_json_is_refused() -> None:
    with pytest.raises(PlanError, match="not JSON"):
        ReshardPlan.from_json("{")


def test_all_that_does_not_fit_is_told_at_once() -> None:
    one = layout((4,), [0], "R")
    other = Layout.from_mesh(shape=(5,), dtype="int8", mesh=[1], placements=["R"])
    with pytest.raises(PlanError) as caught:
        plan_reshard({"a": one, "b": one, "c": one}, {"b": other, "c": one, "d": one})
    found = [(problem.where, problem.kind) for problem in caught.value.problems]
    assert found == [("a", "missing"), ("d", "missing"), ("b", "shape"), ("b", "dtype")]


def test_an_element_that_nobody_holds_is_named() -> None:
    from distcore.v1 import Piece

    half = Layout(shape=(4,), dtype="float32", pieces={0: [Piece(Region((0,), (2,)), (0,))]})
    with pytest.raises(PlanError, match=r"w: no source rank holds Region\(start=\(2,\)"):
        plan_reshard({"w": half}, {"w": layout((4,), [1], "R")})


def test_explain_lists_the_transfers_of_a_key() -> None:
    plan = plan_reshard({"w": layout((4,), [0], "R")}, {"w": layout((4,), [1], "R")})
    assert "stage 1: 0 -> 1  (0,) to (4,)" in plan.explain("w")
    with pytest.raises(PlanError, match="v: no tensor of this name"):
        plan.explain("v")


def test_an_alias_is_planned_once() -> None:
    one, other = layout((4,), [0], "R"), layout((4,), [1], "R")
    src, dst = {"embed": one, "head": one}, {"embed": other, "head": other}
    plan = plan_reshard(src, dst, aliases={"head": "embed"})
    assert plan.stats()["wire_bytes"] == plan.bounds()["wire_bytes"] == 16
    assert "shares the memory of embed" in plan.explain("head")
    assert ReshardPlan.from_json(plan.to_json()) == plan


def test_an_alias_has_the_layouts_of_its_original() -> None:
    one, other = layout((4,), [0], "R"), layout((4,), [1], "R")
    third = layout((4,), [2], "R")
    with pytest.raises(PlanError, match="its layouts differ from those of 'a'"):
        plan_reshard({"a": one, "b": one}, {"a": other, "b": third}, aliases={"b": "a"})
    with pytest.raises(PlanError, match="'z' is not among the tensors"):
        plan_reshard({"a": one}, {"a": other}, aliases={"a": "z"})


def test_no_tensors_make_an_empty_plan() -> None:
    plan = plan_reshard({}, {})
    assert (plan.keys, plan.ranks, len(plan.stages[0])) == ((), (), 0)
    assert dict(plan.stats())["wire_bytes"] == 0


def test_a_plan_has_as_many_rounds_as_its_stats_say() -> None:
    """The second stage, in which receivers pass stripes on, comes after the first."""
    src = Layout.from_mesh(shape=(64, 64), dtype="float32", mesh=[0], placements=["S(0)"])
    dst = Layout.replicated(shape=(64, 64), dtype="float32", ranks=[1, 2, 3])
    plan = plan_reshard({"w": src}, {"w": dst}, options=Options(fan_out="stripe", stripe_nbytes=1))
    assert plan.rounds() == (
        ((0, 1),),
        ((0, 2),),
        ((0, 3),),
        ((1, 2), (2, 3), (3, 1)),
        ((1, 3), (2, 1), (3, 2)),
    )
    assert plan.stats().rounds == 5
