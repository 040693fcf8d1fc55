"""Worked examples of owner planning, from the shapes to every buffer of every rank.

The elements of tensor i are 100 i, 100 i + 1, ..., and those of its result are 0.5 higher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace

import pytest
import torch

from ownerplan.layout import GlobalLayout, Range
from ownerplan.owner_planning import (
    GroupOwnerLayout,
    OwnerGatherPlan,
    OwnerScatterPlan,
    _OwnerWork,
    assign_owner_work,
    ns_cost_fn,
    select_ge_2d_params,
)

Part = tuple[int, int, int]
"""Elements [start, stop) of a tensor: (tensor, start, stop)."""


@dataclass(frozen=True)
class FakeMesh:
    """A mesh without a process group, seen from one rank."""

    ranks: object
    rank: int = 0

    @property
    def mesh(self) -> torch.Tensor:
        return torch.tensor(self.ranks)

    @property
    def ndim(self) -> int:
        return self.mesh.ndim

    def size(self, axis: int | None = None) -> int:
        return self.mesh.numel() if axis is None else self.mesh.shape[axis]

    def get_rank(self) -> int:
        return self.rank


@dataclass(frozen=True)
class Seen:
    """What the two plans of one rank have; a missing entry is an empty dict."""

    sends: dict[int, list[Part]] = field(default_factory=dict)
    gets: dict[int, int] = field(default_factory=dict)
    at: dict[tuple[int, int], int] = field(default_factory=dict)
    own: dict[int, Part] = field(default_factory=dict)
    returns: dict[int, list[Part]] = field(default_factory=dict)
    back: dict[int, int] = field(default_factory=dict)
    back_at: dict[tuple[int, int], int] = field(default_factory=dict)
    unpacked: dict[int, Part] = field(default_factory=dict)


NOTHING = Seen()


@dataclass(frozen=True)
class Example:
    """Shapes over a mesh, the offsets and owners that come of them, and the plan of each rank."""

    shapes: Sequence[tuple[int, ...]]
    mesh: object
    offsets: tuple[int, ...]
    size: int
    owners: dict[int, int]
    ranks: dict[int, Seen]
    chosen: dict[int, int] | None = None
    indices: Sequence[int] | None = None

    @property
    def layout(self) -> GlobalLayout:
        return GlobalLayout.build(self.shapes, torch.tensor(self.mesh).numel())

    @property
    def participating(self) -> Sequence[int]:
        return range(len(self.shapes)) if self.indices is None else self.indices

    def seen_from(self, rank: int) -> GroupOwnerLayout:
        owners = self.owners if self.chosen is None else self.chosen
        return GroupOwnerLayout(FakeMesh(self.mesh, rank), self.layout, owners)

    def value(self, *parts: Part, result: bool = False) -> torch.Tensor:
        return torch.cat([value(*part, result=result) for part in parts])

    def held(self, rank: int) -> dict[int, Part]:
        ranges = self.layout.get_rank_ranges(FakeMesh(self.mesh))
        found = {}
        for tensor in self.participating:
            whole, mine = self.layout.get_tensor_range(tensor), ranges[rank]
            low, high = max(whole.start, mine.start), min(whole.end, mine.end)
            if low < high:
                found[tensor] = (tensor, low - whole.start, high - whole.start)
        return found


def value(tensor: int, start: int, stop: int, *, result: bool = False) -> torch.Tensor:
    return torch.arange(start, stop, dtype=torch.float64) + 100 * tensor + 0.5 * result


SIX = [(6, 4), (4, 4)]
FEW = [(1, 4), (1, 4), (4, 4)]
EXAMPLES = {
    "E0 chosen owners": Example(
        SIX,
        [0, 1],
        (0, 24),
        40,
        {1: 1, 0: 0},
        {
            0: Seen(
                sends={1: [(0, 0, 20)]}, back={1: 20}, back_at={(0, 1): 0}, unpacked={0: (0, 0, 20)}
            ),
            1: Seen(
                gets={0: 20},
                at={(0, 0): 0},
                own={0: (0, 20, 24), 1: (1, 0, 16)},
                returns={0: [(0, 0, 20)]},
            ),
        },
        chosen={0: 1, 1: 1},
    ),
    "E0": Example(
        SIX,
        [0, 1],
        (0, 24),
        40,
        {1: 1, 0: 0},
        {
            0: Seen(gets={1: 4}, at={(0, 1): 0}, own={0: (0, 0, 20)}, returns={1: [(0, 20, 24)]}),
            1: Seen(
                sends={0: [(0, 20, 24)]},
                own={1: (1, 0, 16)},
                back={0: 4},
                back_at={(0, 0): 0},
                unpacked={0: (0, 20, 24)},
            ),
        },
    ),
    "E1 gaps": Example(
        [(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)],
        [0, 1, 2, 3, 4],
        (0, 12, 32, 28, 48),
        60,
        {0: 0, 4: 4, 3: 2, 1: 1, 2: 3},
        {
            0: Seen(own={0: (0, 0, 12)}),
            1: Seen(gets={2: 4}, at={(1, 2): 0}, own={1: (1, 0, 12)}, returns={2: [(1, 12, 16)]}),
            2: Seen(
                sends={1: [(1, 12, 16)], 3: [(2, 0, 4)]},
                own={3: (3, 0, 2)},
                back={1: 4, 3: 4},
                back_at={(1, 1): 0, (2, 3): 0},
                unpacked={1: (1, 12, 16), 2: (2, 0, 4)},
            ),
            3: Seen(gets={2: 4}, at={(2, 2): 0}, own={2: (2, 4, 16)}, returns={2: [(2, 0, 4)]}),
            4: Seen(own={4: (4, 0, 6)}),
        },
    ),
    "E2 three ranks": Example(
        [(6, 3), (4, 2), (2, 2)],
        [0, 1, 2],
        (0, 18, 26),
        36,
        {2: 2, 0: 0, 1: 1},
        {
            0: Seen(gets={1: 6}, at={(0, 1): 0}, own={0: (0, 0, 12)}, returns={1: [(0, 12, 18)]}),
            1: Seen(
                sends={0: [(0, 12, 18)]},
                gets={2: 2},
                at={(1, 2): 0},
                own={1: (1, 0, 6)},
                returns={2: [(1, 6, 8)]},
                back={0: 6},
                back_at={(0, 0): 0},
                unpacked={0: (0, 12, 18)},
            ),
            2: Seen(
                sends={1: [(1, 6, 8)]},
                own={2: (2, 0, 4)},
                back={1: 2},
                back_at={(1, 1): 0},
                unpacked={1: (1, 6, 8)},
            ),
        },
    ),
    "E3 one tensor, padding": Example(
        [(5, 4)],
        [0, 1, 2],
        (0,),
        24,
        {0: 0},
        {
            0: Seen(
                gets={1: 8, 2: 4},
                at={(0, 1): 0, (0, 2): 0},
                own={0: (0, 0, 8)},
                returns={1: [(0, 8, 16)], 2: [(0, 16, 20)]},
            ),
            1: Seen(
                sends={0: [(0, 8, 16)]},
                back={0: 8},
                back_at={(0, 0): 0},
                unpacked={0: (0, 8, 16)},
            ),
            2: Seen(
                sends={0: [(0, 16, 20)]},
                back={0: 4},
                back_at={(0, 0): 0},
                unpacked={0: (0, 16, 20)},
            ),
        },
    ),
    "E3b last rank empty": Example(
        [(7, 4), (2, 4)],
        [0, 1, 2, 3],
        (0, 28),
        48,
        {1: 2, 0: 0},
        {
            0: Seen(
                gets={1: 12, 2: 4},
                at={(0, 1): 0, (0, 2): 0},
                own={0: (0, 0, 12)},
                returns={1: [(0, 12, 24)], 2: [(0, 24, 28)]},
            ),
            1: Seen(
                sends={0: [(0, 12, 24)]},
                back={0: 12},
                back_at={(0, 0): 0},
                unpacked={0: (0, 12, 24)},
            ),
            2: Seen(
                sends={0: [(0, 24, 28)]},
                own={1: (1, 0, 8)},
                back={0: 4},
                back_at={(0, 0): 0},
                unpacked={0: (0, 24, 28)},
            ),
            3: NOTHING,
        },
    ),
    "E4 empty shards": Example(
        [(1, 4)],
        [0, 1, 2, 3],
        (0,),
        16,
        {0: 0},
        {0: Seen(own={0: (0, 0, 4)}), 1: NOTHING, 2: NOTHING, 3: NOTHING},
    ),
    "E5 permuted mesh": Example(
        SIX,
        [3, 1],
        (0, 24),
        40,
        {1: 1, 0: 3},
        {
            3: Seen(gets={1: 4}, at={(0, 1): 0}, own={0: (0, 0, 20)}, returns={1: [(0, 20, 24)]}),
            1: Seen(
                sends={3: [(0, 20, 24)]},
                own={1: (1, 0, 16)},
                back={3: 4},
                back_at={(0, 3): 0},
                unpacked={0: (0, 20, 24)},
            ),
        },
    ),
    "E5 permuted mesh, chosen owners": Example(
        SIX,
        [3, 1],
        (0, 24),
        40,
        {1: 1, 0: 3},
        {
            3: Seen(
                sends={1: [(0, 0, 20)]}, back={1: 20}, back_at={(0, 1): 0}, unpacked={0: (0, 0, 20)}
            ),
            1: Seen(
                gets={3: 20},
                at={(0, 3): 0},
                own={0: (0, 20, 24), 1: (1, 0, 16)},
                returns={3: [(0, 0, 20)]},
            ),
        },
        chosen={0: 1, 1: 1},
    ),
    "E6a cost order": Example(
        [(8, 1), (8, 8)],
        [0, 1, 2, 3],
        (0, 8),
        96,
        {0: 0, 1: 1},
        {
            0: Seen(
                sends={1: [(1, 0, 16)]},
                own={0: (0, 0, 8)},
                back={1: 16},
                back_at={(1, 1): 0},
                unpacked={1: (1, 0, 16)},
            ),
            1: Seen(
                gets={0: 16, 2: 24},
                at={(1, 0): 0, (1, 2): 0},
                own={1: (1, 16, 40)},
                returns={0: [(1, 0, 16)], 2: [(1, 40, 64)]},
            ),
            2: Seen(
                sends={1: [(1, 40, 64)]},
                back={1: 24},
                back_at={(1, 1): 0},
                unpacked={1: (1, 40, 64)},
            ),
            3: NOTHING,
        },
    ),
    "E6b ties against the bytes": Example(
        [(4, 8), (8, 8), (12, 8)],
        [0, 1, 2],
        (0, 32, 96),
        192,
        {0: 0, 2: 1, 1: 0},
        {
            0: Seen(
                gets={1: 32},
                at={(1, 1): 0},
                own={0: (0, 0, 32), 1: (1, 0, 32)},
                returns={1: [(1, 32, 64)]},
            ),
            1: Seen(
                sends={0: [(1, 32, 64)]},
                gets={2: 64},
                at={(2, 2): 0},
                own={2: (2, 0, 32)},
                returns={2: [(2, 32, 96)]},
                back={0: 32},
                back_at={(1, 0): 0},
                unpacked={1: (1, 32, 64)},
            ),
            2: Seen(
                sends={1: [(2, 32, 96)]},
                back={1: 64},
                back_at={(2, 1): 0},
                unpacked={2: (2, 32, 96)},
            ),
        },
    ),
    "E6c a tie goes to the first of the buffer": Example(
        [(8, 2), (8, 2), (8, 2)],
        [2, 0],
        (0, 16, 32),
        48,
        {0: 2, 2: 0, 1: 2},
        {
            2: Seen(
                gets={0: 8},
                at={(1, 0): 0},
                own={0: (0, 0, 16), 1: (1, 0, 8)},
                returns={0: [(1, 8, 16)]},
            ),
            0: Seen(
                sends={2: [(1, 8, 16)]},
                own={2: (2, 0, 16)},
                back={2: 8},
                back_at={(1, 2): 0},
                unpacked={1: (1, 8, 16)},
            ),
        },
    ),
    "E7 index order is not buffer order": Example(
        [(4, 2, 3), (5,), (3, 6)],
        [0, 1],
        (0, 42, 24),
        48,
        {0: 0, 2: 1},
        {0: Seen(own={0: (0, 0, 24)}), 1: Seen(own={2: (2, 0, 18)})},
        indices=[0, 2],
    ),
    "E8 mesh of two axes": Example(
        [(8, 4)],
        [[0, 1], [2, 3]],
        (0,),
        32,
        {0: 0},
        {
            0: Seen(
                gets={2: 8, 1: 8, 3: 8},
                at={(0, 2): 0, (0, 1): 0, (0, 3): 0},
                own={0: (0, 0, 8)},
                returns={2: [(0, 8, 16)], 1: [(0, 16, 24)], 3: [(0, 24, 32)]},
            ),
            **{
                rank: Seen(
                    sends={0: [(0, start, start + 8)]},
                    back={0: 8},
                    back_at={(0, 0): 0},
                    unpacked={0: (0, start, start + 8)},
                )
                for rank, start in ((2, 8), (1, 16), (3, 24))
            },
        },
    ),
    "E9 a tensor that ends its chunk": Example(
        [(5, 2), (3, 4), (3, 2)],
        [0, 1],
        (0, 16, 10),
        32,
        {1: 1, 0: 0, 2: 0},
        {0: Seen(own={0: (0, 0, 10), 2: (2, 0, 6)}), 1: Seen(own={1: (1, 0, 12)})},
    ),
    "E10": Example(
        FEW,
        [0, 1],
        (0, 4, 8),
        24,
        {0: 0, 1: 0, 2: 1},
        {
            0: Seen(
                sends={1: [(2, 0, 4)]},
                own={0: (0, 0, 4), 1: (1, 0, 4)},
                back={1: 4},
                back_at={(2, 1): 0},
                unpacked={2: (2, 0, 4)},
            ),
            1: Seen(gets={0: 4}, at={(2, 0): 0}, own={2: (2, 4, 16)}, returns={0: [(2, 0, 4)]}),
        },
    ),
    "E10 owner without a shard": Example(
        FEW,
        [0, 1],
        (0, 4, 8),
        24,
        {0: 0, 1: 0, 2: 1},
        {
            0: Seen(
                sends={1: [(0, 0, 4), (1, 0, 4), (2, 0, 4)]},
                back={1: 12},
                back_at={(0, 1): 0, (1, 1): 4, (2, 1): 8},
                unpacked={0: (0, 0, 4), 1: (1, 0, 4), 2: (2, 0, 4)},
            ),
            1: Seen(
                gets={0: 12},
                at={(0, 0): 0, (1, 0): 4, (2, 0): 8},
                own={0: (0, 0, 0), 1: (1, 0, 0), 2: (2, 4, 16)},
                returns={0: [(0, 0, 4), (1, 0, 4), (2, 0, 4)]},
            ),
        },
        chosen={0: 1, 1: 1, 2: 1},
    ),
}

each_example = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES.keys())


def same(found: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        found[key].ndim == 1 and torch.equal(found[key], wanted[key]) for key in wanted
    )


@each_example
def test_the_layout_is_the_documented_one(example: Example) -> None:
    assert example.layout.tensor_to_offset == example.offsets
    assert example.layout.size == example.size


@each_example
def test_the_owners_are_the_documented_ones(example: Example) -> None:
    owners = assign_owner_work(example.layout, FakeMesh(example.mesh), example.participating)
    assert owners == example.owners
    assert list(owners) == list(example.owners), "not in the order in which they were assigned"


@each_example
def test_each_rank_gathers_what_is_documented(example: Example) -> None:
    for rank, seen in example.ranks.items():
        shards = {at: example.value(part) for at, part in example.held(rank).items()}
        plan = OwnerGatherPlan.pack(example.seen_from(rank), shards)
        assert same(plan.send_buffers, {at: example.value(*p) for at, p in seen.sends.items()})
        assert plan.recv_sizes == seen.gets
        assert list(plan.recv_sizes) == list(seen.gets), "not in buffer order"
        assert plan.recv_offsets == seen.at
        assert same(plan.own_shards, {at: example.value(part) for at, part in seen.own.items()})
        assert plan.this_rank == rank


@each_example
def test_each_rank_scatters_what_is_documented(example: Example) -> None:
    for rank, seen in example.ranks.items():
        owned = {at: (at, 0, prod(example.shapes[at])) for at in seen.own}
        full = {at: example.value(part, result=True) for at, part in owned.items()}
        plan = OwnerScatterPlan.pack(example.seen_from(rank), full)
        assert same(
            plan.send_buffers,
            {at: example.value(*parts, result=True) for at, parts in seen.returns.items()},
        )
        assert plan.recv_sizes == seen.back
        assert plan.recv_offsets == seen.back_at
        received = {
            owner: example.value(*back[rank], result=True)
            for owner, other in example.ranks.items()
            if rank in (back := other.returns)
        }
        unpacked = plan.unpack(received)
        assert same(
            unpacked, {at: example.value(p, result=True) for at, p in seen.unpacked.items()}
        )
        for at, part in seen.own.items():
            assert torch.equal(plan.own_result(at, full[at]), example.value(part, result=True))


@each_example
def test_each_owner_puts_its_tensors_together(example: Example) -> None:
    for rank, seen in example.ranks.items():
        shards = {at: example.value(part) for at, part in example.held(rank).items()}
        plan = OwnerGatherPlan.pack(example.seen_from(rank), shards)
        received = {
            source: example.value(*sends[rank])
            for source, other in example.ranks.items()
            if rank in (sends := other.sends)
        }
        for at in seen.own:
            whole = example.value((at, 0, prod(example.shapes[at])))
            assert torch.equal(plan.reconstruct_full(at, received), whole)
            out = torch.full(example.shapes[at], -1, dtype=torch.float64)
            assert plan.reconstruct_full(at, received, out=out) is out
            assert torch.equal(out.reshape(-1), whole)


def test_e6b_the_optimal_policy_moves_half_of_it_for_the_same_makespan() -> None:
    example = EXAMPLES["E6b ties against the bytes"]
    mesh = FakeMesh(example.mesh)
    owners = assign_owner_work(example.layout, mesh, range(3), policy="optimal")
    assert owners == {0: 0, 1: 0, 2: 2}


def test_e8_parts_are_put_together_in_buffer_order() -> None:
    example = EXAMPLES["E8 mesh of two axes"]
    ranges = example.layout.get_rank_ranges(FakeMesh(example.mesh))
    assert list(ranges.items()) == [
        (0, Range(0, 8)),
        (2, Range(8, 8)),
        (1, Range(16, 8)),
        (3, Range(24, 8)),
    ]
    plan = OwnerGatherPlan.pack(example.seen_from(0), {0: example.value((0, 0, 8))})
    assert list(plan.rank_ranges) == [0, 2, 1, 3]


def test_e11_greedy_is_far_from_the_optimum() -> None:
    shapes = [(4, 4), (3, 8), (4, 4), (3, 8)]
    layout = GlobalLayout.build(shapes, 4)
    assert (layout.tensor_to_offset, layout.size) == ((0, 16, 40, 56), 96)
    mesh = FakeMesh([0, 1, 2, 3])
    greedy = assign_owner_work(layout, mesh, range(4))
    best = assign_owner_work(layout, mesh, range(4), policy="optimal")
    assert greedy == {0: 0, 1: 1, 3: 2, 2: 1}
    assert best == {0: 0, 1: 1, 2: 2, 3: 3}
    assert makespan(shapes, greedy) == 720
    assert makespan(shapes, best) == 384


def makespan(shapes: Sequence[tuple[int, ...]], owners: Mapping[int, int]) -> int:
    loads: dict[int, int] = {}
    for at, owner in owners.items():
        loads[owner] = loads.get(owner, 0) + ns_cost_fn(5)(shapes[at])
    return max(loads.values())


def test_equal_costs_keep_the_order_in_which_they_were_given() -> None:
    layout = GlobalLayout.build([(4, 2), (4, 2), (4, 2)], 2)
    mesh = FakeMesh([0, 1])

    def flat(shape: torch.Size) -> int:
        return 1

    assert layout.tensor_to_offset == (0, 8, 16)
    assert list(assign_owner_work(layout, mesh, [2, 0, 1], flat)) == [2, 0, 1]


def test_the_cost_function_is_given_a_torch_size() -> None:
    seen = []

    def cost(shape: torch.Size) -> int:
        seen.append(shape)
        return shape.numel()

    layout = GlobalLayout.build([(6, 4), (4, 4)], 2)
    assert assign_owner_work(layout, FakeMesh([0, 1]), [0, 1], cost) == {0: 0, 1: 1}
    assert [type(shape) for shape in seen] == [torch.Size, torch.Size]


def test_loads_from_before_count() -> None:
    layout = GlobalLayout.build([(6, 4), (4, 4)], 2)
    mesh = FakeMesh([0, 1])
    owners = assign_owner_work(layout, mesh, [0], initial_load={0: 1})
    assert owners == {0: 1}
    with pytest.raises(ValueError, match=r"ranks \[7\] are not in the mesh"):
        assign_owner_work(layout, mesh, [0], initial_load={7: 1})


def group_of(shapes: Sequence[tuple[int, ...]], mesh: FakeMesh) -> SimpleNamespace:
    return SimpleNamespace(
        mesh=mesh,
        main_weight=SimpleNamespace(layout=GlobalLayout.build(shapes, mesh.size())),
        fsdp_parameters=[SimpleNamespace(sharded=torch.empty(shape)) for shape in shapes],
    )


def test_a_group_takes_part_with_its_matrices() -> None:
    group = group_of([(4, 2, 3), (5,), (3, 6)], FakeMesh([0, 1]))
    owners = GroupOwnerLayout.from_group(group)
    assert owners.tensor_to_owner == {0: 0, 2: 1}
    assert owners.layout is group.main_weight.layout
    assert owners.mesh is group.mesh


def test_a_group_takes_part_with_what_is_eligible() -> None:
    group = group_of([(4, 2, 3), (5,), (3, 6)], FakeMesh([0, 1]))
    owners = GroupOwnerLayout.from_group(
        group, cost_fn=lambda shape: 1.0, eligible_fn=lambda param: param.ndim == 1
    )
    assert owners.tensor_to_owner == {1: 1}


def test_a_group_of_another_number_of_parameters_is_refused() -> None:
    group = group_of([(4, 2)], FakeMesh([0, 1]))
    group.fsdp_parameters = []
    with pytest.raises(ValueError, match="0 parameters for 1 tensors"):
        GroupOwnerLayout.from_group(group)


def test_matrices_are_what_has_two_dims() -> None:
    assert [select_ge_2d_params(torch.empty(shape)) for shape in [(), (3,), (3, 2), (3, 2, 1)]] == [
        False,
        False,
        True,
        True,
    ]


def test_work_is_a_frozen_value() -> None:
    work = _OwnerWork(tensor_index=1, cost=2.0, candidates=[3])
    assert work == _OwnerWork(1, 2.0, [3])
    with pytest.raises(AttributeError):
        work.cost = 3.0  # type: ignore[misc]


TWO = GlobalLayout.build(SIX, 2)


def owned(rank: int = 0) -> GroupOwnerLayout:
    return GroupOwnerLayout(FakeMesh([0, 1], rank), TWO, {0: 1, 1: 1})


def test_no_tensors_have_no_owners() -> None:
    assert assign_owner_work(TWO, FakeMesh([0, 1]), []) == {}
    assert assign_owner_work(TWO, FakeMesh([0, 1]), [], policy="optimal") == {}


def test_a_tensor_listed_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 0: is listed more than once"):
        assign_owner_work(TWO, FakeMesh([0, 1]), [0, 1, 0])


def test_a_tensor_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor -1: the layout has 2 tensors"):
        assign_owner_work(TWO, FakeMesh([0, 1]), [-1])
    with pytest.raises(ValueError, match="tensor 2: the layout has 2 tensors"):
        GroupOwnerLayout(FakeMesh([0, 1]), TWO, {2: 0})


def test_a_tensor_without_rows_has_no_owner() -> None:
    layout = GlobalLayout.build([(0, 4), (4, 4)], 2)
    with pytest.raises(RuntimeError, match=r"tensor 0 of shape \(0, 4\)"):
        assign_owner_work(layout, FakeMesh([0, 1]), [0, 1])


def test_a_tensor_without_rows_can_be_given_an_owner() -> None:
    layout = GlobalLayout.build([(0, 4), (4, 4)], 2)
    for rank in (0, 1):
        owners = GroupOwnerLayout(FakeMesh([0, 1], rank), layout, {0: 0})
        gathered = OwnerGatherPlan.pack(owners, {})
        scattered = OwnerScatterPlan.pack(owners, {})
        assert (gathered.send_buffers, gathered.recv_sizes) == ({}, {})
        assert (scattered.send_buffers, scattered.recv_sizes) == ({}, {})
        if rank == 0:
            assert gathered.reconstruct_full(0, {}).numel() == 0


def test_an_owner_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 1: its owner 5 is not in the mesh"):
        GroupOwnerLayout(FakeMesh([0, 1]), TWO, {0: 0, 1: 5})


def test_a_process_outside_the_mesh_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 5: this process is not in the mesh"):
        OwnerGatherPlan.pack(owned(5), {})
    with pytest.raises(ValueError, match="rank 5: this process is not in the mesh"):
        OwnerScatterPlan.pack(owned(5), {})


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
@pytest.mark.parametrize("policy", ["greedy", "optimal"])
def test_a_cost_that_is_none_is_refused(cost: float, policy: str) -> None:
    with pytest.raises(ValueError, match="tensor 0"):
        assign_owner_work(TWO, FakeMesh([0, 1]), [0], lambda shape: cost, policy=policy)  # type: ignore[arg-type]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="policy"):
        assign_owner_work(TWO, FakeMesh([0, 1]), [0], policy="best")  # type: ignore[arg-type]


def test_a_missing_shard_is_named() -> None:
    with pytest.raises(KeyError, match="tensor 0 has 20 elements here, but its shard is missing"):
        OwnerGatherPlan.pack(owned(), {1: torch.empty(0)})


def test_a_missing_result_is_named() -> None:
    with pytest.raises(KeyError, match="tensor 1 has 16 elements here, but its result is missing"):
        OwnerScatterPlan.pack(owned(1), {0: torch.zeros(24)})


def test_a_shard_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 0: its shard of shape \(6, 4\) must have 20"):
        OwnerGatherPlan.pack(owned(), {0: torch.zeros(6, 4)})
    with pytest.raises(ValueError, match=r"tensor 1: its shard of shape \(2,\) must have 0"):
        OwnerGatherPlan.pack(owned(), {0: torch.zeros(5, 4), 1: torch.zeros(2)})


def test_a_result_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 0: its result of shape \(5, 4\) must have 24"):
        OwnerScatterPlan.pack(owned(1), {0: torch.zeros(5, 4), 1: torch.zeros(4, 4)})


def test_shards_of_several_dtypes_are_refused() -> None:
    shards = {0: torch.zeros(4), 1: torch.zeros(16, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"tensor 1: its shard is torch\.bfloat16"):
        OwnerGatherPlan.pack(owned(1), shards)
    with pytest.raises(ValueError, match=r"tensor 1: its result is torch\.bfloat16"):
        OwnerScatterPlan.pack(
            owned(1), {0: torch.zeros(24), 1: torch.zeros(16, dtype=torch.bfloat16)}
        )


def test_a_received_buffer_of_another_size_or_missing_is_refused() -> None:
    plan = OwnerGatherPlan.pack(owned(1), {0: torch.zeros(4), 1: torch.zeros(16)})
    with pytest.raises(ValueError, match="rank 0: its buffer has 19 elements, not 20"):
        plan.reconstruct_full(0, {0: torch.zeros(19)})
    with pytest.raises(KeyError, match="no buffer came from rank 0; 20 elements"):
        plan.reconstruct_full(0, {})
    scattered = OwnerScatterPlan.pack(owned(0), {})
    with pytest.raises(ValueError, match="rank 1: its buffer has 21 elements, not 20"):
        scattered.unpack({1: torch.zeros(21)})
    with pytest.raises(KeyError, match="no buffer came from rank 1"):
        scattered.unpack({})


def test_a_tensor_of_another_owner_is_not_put_together() -> None:
    plan = OwnerGatherPlan.pack(owned(0), {0: torch.zeros(20)})
    with pytest.raises(KeyError, match="tensor 0 is not owned by rank 0"):
        plan.reconstruct_full(0, {})
