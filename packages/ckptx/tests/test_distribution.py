"""Distributions: the worked examples, the greedy rule against a plain loop, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx import CheckpointingException
from ckptx.distribution import (
    ShardDistribution,
    distribute_shards_to_ranks,
    distribution_of,
    shard_nbytes,
    shard_rows,
)
from ckptx.sharded import ShardedTensor, ShardId

Shards = list[list[ShardedTensor]]
rank_offsets = ShardedTensor.from_rank_offsets


def build(all_shards: Shards, *, load: bool) -> ShardDistribution:
    return distribution_of(shard_rows(all_shards), len(all_shards), ignore_groups=load)


def named(distribution: ShardDistribution) -> dict[str, int]:
    """Main ranks by short names; `w@4` is the shard of w at offset 4."""
    return {short(name): rank for name, rank in distribution.main_rank_for_shard.items()}


def short(name: ShardId) -> str:
    offset = name[1][0] if name[1] else 0
    return f"{name[0]}@{offset}" if offset else name[0]


# The worked examples


@pytest.mark.parametrize(
    ("shape", "dtype", "nbytes"),
    [
        ((3, 4), torch.float32, 48),
        ((), torch.float32, 4),
        ((0, 3), torch.float32, 0),
        ((5,), torch.bool, 5),
        ((5,), torch.float8_e4m3fn, 5),
        ((5,), torch.bfloat16, 10),
    ],
)
def test_example_sizes(shape: tuple[int, ...], dtype: torch.dtype, nbytes: int) -> None:
    found = shard_nbytes(rank_offsets("w", torch.empty(shape, dtype=dtype)))
    assert found == nbytes
    assert type(found) is int


def test_example_coverage_before_size() -> None:
    found = distribute_shards_to_ranks({"A": [0, 1], "B": [0]}, {"A": 100, "B": 100}, 2, set())
    assert found == {"B": 0, "A": 1}
    assert list(found) == ["B", "A"]


def test_example_tie_by_id_and_order_of_the_dict() -> None:
    found = distribute_shards_to_ranks({"b": [0, 1], "a": [0, 1]}, {"a": 5, "b": 5}, 2, set())
    assert list(found.items()) == [("a", 0), ("b", 1)]


def test_example_cross_last() -> None:
    ranks = {"big": [0, 1], "own": [0, 1]}
    found = distribute_shards_to_ranks(ranks, {"big": 100, "own": 1}, 2, {"big"})
    assert list(found.items()) == [("own", 0), ("big", 1)]


def test_example_three_ranks_partial_need() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    all_shards = [
        [
            rank_offsets("A", a, replica_id=rank),
            *([rank_offsets("B", b, replica_id=rank)] if rank < 2 else []),
            rank_offsets("U", torch.zeros(1), (0, rank, 3)),
        ]
        for rank in range(3)
    ]
    found = build(all_shards, load=True)
    assert list(named(found).items()) == [("U", 0), ("U@1", 1), ("U@2", 2), ("B", 0), ("A", 1)]
    assert found.all_ranks_for_shard["B", (0,), None] == [0, 1]


def group_of_four() -> Shards:
    return [
        [
            rank_offsets("w", torch.zeros(4), (0, rank % 2, 2), replica_id=rank // 2),
            rank_offsets("n", torch.zeros(1), replica_id=rank),
            rank_offsets("u", torch.zeros(1), (0, rank, 4)),
        ]
        for rank in range(4)
    ]


def test_example_group_without_the_main_copy() -> None:
    half = group_of_four()[2:]
    save, load = build(half, load=False), build(half, load=True)
    assert list(named(save).items()) == [("u@2", 0), ("u@3", 1)]
    assert set(map(short, save.shards_in_this_group)) == {"u@2", "u@3"}
    assert set(save.all_ranks_for_shard) == save.shards_in_this_group
    # What is known of shards is not cut down to those of the group.
    assert set(map(short, save.shard_to_metadata)) == {"w", "w@4", "n", "u@2", "u@3"}
    order = [("u@2", 0), ("u@3", 1), ("w", 0), ("w@4", 1), ("n", 0)]
    assert list(named(load).items()) == order


@pytest.mark.parametrize("load", [False, True])
def test_example_group_with_all_main_copies(load: bool) -> None:
    found = named(build(group_of_four(), load=load))
    assert found == {"u": 0, "u@1": 1, "u@2": 2, "u@3": 3, "w": 0, "w@4": 1, "n": 2}


def world_of_eight() -> Shards:
    """Two tensor-parallel ranks in each of four data-parallel ranks."""

    def shards(rank: int) -> list[ShardedTensor]:
        tp, dp = rank % 2, rank // 2
        return [
            rank_offsets("TP_repl1", torch.zeros(10), (0, tp, 2), replica_id=dp),
            rank_offsets("TP_repl2", torch.zeros(10), (0, tp, 2), replica_id=dp),
            rank_offsets("keyB", torch.zeros(20), (0, rank, 8)),
            rank_offsets("keyC", torch.zeros(100), replica_id=(tp, dp)),
            rank_offsets("keyD", torch.zeros(1000), replica_id=(tp, dp)),
            rank_offsets("keyE", torch.zeros(100), replica_id=(tp, dp)),
        ]

    return [shards(rank) for rank in range(8)]


def test_example_eight_ranks_in_one_group() -> None:
    all_shards = world_of_eight()
    found = build(all_shards, load=False)
    assert named(found) == {
        **{f"keyB@{20 * rank}" if rank else "keyB": rank for rank in range(8)},
        "TP_repl1": 0,
        "TP_repl1@10": 1,
        "TP_repl2": 2,
        "TP_repl2@10": 3,
        "keyD": 4,
        "keyC": 5,
        "keyE": 6,
    }
    loads = [0] * 8
    for name, rank in found.main_rank_for_shard.items():
        loads[rank] += shard_nbytes(found.shard_to_metadata[name])
    assert loads == [120, 120, 120, 120, 4080, 480, 480, 80]


def test_example_eight_ranks_in_two_groups() -> None:
    everything = world_of_eight()
    first, second = everything[0::2], everything[1::2]

    def without_b(distribution: ShardDistribution) -> dict[str, int]:
        return {n: rank for n, rank in named(distribution).items() if not n.startswith("keyB")}

    expected = {"keyD": 0, "keyC": 1, "keyE": 2, "TP_repl1": 3, "TP_repl2": 3}
    assert without_b(build(first, load=False)) == expected
    assert without_b(build(second, load=False)) == {"TP_repl1@10": 0, "TP_repl2@10": 1}
    assert without_b(build(second, load=True)) == {
        "TP_repl1@10": 0,
        "TP_repl2@10": 1,
        "keyD": 2,
        "keyC": 3,
        "keyE": 0,
    }


def test_example_cross_data_parallel() -> None:
    ranks = {"d": [0, 3], "e": [0, 2], "f": [0, 2], "g": [3], "b": [0, 1, 2, 3]}
    found = distribute_shards_to_ranks(ranks, dict.fromkeys(ranks, 4), 4, {"b"})
    assert list(found.items()) == [("g", 3), ("d", 0), ("e", 2), ("f", 0), ("b", 1)]


def test_example_empty_shards_all_go_to_rank_0() -> None:
    ranks = {name: [0, 1, 2] for name in "abcd"}
    found = distribute_shards_to_ranks(ranks, dict.fromkeys(ranks, 0), 3, set())
    assert found == dict.fromkeys("abcd", 0)


def test_example_errors() -> None:
    with pytest.raises(KeyError, match="a"):
        distribute_shards_to_ranks({"a": [0]}, {}, 1, set())
    with pytest.raises(ValueError, match="not ranks 0 to 0"):
        distribute_shards_to_ranks({"a": [1]}, {"a": 1}, 1, set())
    with pytest.raises(ValueError, match="not ranks 0 to 0"):
        distribute_shards_to_ranks({"a": []}, {"a": 1}, 1, set())
    assert distribute_shards_to_ranks({}, {}, 1, set()) == {}


def test_ids_that_do_not_compare_matter_only_in_a_tie() -> None:
    ids: list[tuple[str, tuple[int, ...], tuple[int, int] | None]]
    ids = [("a", (0,), None), ("a", (0,), (0, 1))]
    ranks = {name: [0, 1] for name in ids}
    sizes = {ids[0]: 1, ids[1]: 2}
    assert distribute_shards_to_ranks(ranks, sizes, 2, set()) == {ids[1]: 0, ids[0]: 1}
    with pytest.raises(TypeError):
        distribute_shards_to_ranks(ranks, dict.fromkeys(ids, 1), 2, set())


# The greedy rule


def plain_loop(
    ranks: Mapping[str, Sequence[int]], sizes: Mapping[str, int], num_ranks: int, cross: set[str]
) -> dict[str, int]:
    loads = [0] * num_ranks
    found = {}
    for name in sorted(ranks, key=lambda n: (n in cross, len(ranks[n]), -sizes[n], n)):
        found[name] = min(sorted(ranks[name]), key=lambda rank: loads[rank])
        loads[found[name]] += sizes[name]
    return found


@given(st.data(), st.integers(1, 6))
def test_it_is_the_greedy_of_the_plain_loop(data: st.DataObject, num_ranks: int) -> None:
    rank = st.integers(0, num_ranks - 1)
    some = st.lists(rank, min_size=1, max_size=num_ranks, unique=True)
    ranks = data.draw(st.dictionaries(st.text("abc", max_size=3), some, max_size=12))
    sizes = {name: data.draw(st.sampled_from([0, 1, 4, 9, 100, 1 << 40])) for name in ranks}
    cross = {name for name in sorted(ranks) if data.draw(st.booleans())}
    found = distribute_shards_to_ranks(ranks, sizes, num_ranks, cross)
    assert list(found.items()) == list(plain_loop(ranks, sizes, num_ranks, cross).items())


# What ranks say of their shards


def test_a_shard_that_two_ranks_describe_differently_is_refused() -> None:
    """The first rank's word would win, and the bytes be taken for another dtype."""
    all_shards = [
        [rank_offsets("w", torch.zeros(2))],
        [rank_offsets("w", torch.zeros(2, dtype=torch.int32), replica_id=1)],
    ]
    with pytest.raises(CheckpointingException, match=r"rank 0 has torch.float32.*rank 1 torch.int"):
        build(all_shards, load=True)
    all_shards[1] = [rank_offsets("w", torch.zeros(3), replica_id=1)]
    with pytest.raises(CheckpointingException, match=r"\(2,\).*\(3,\)"):
        build(all_shards, load=True)


def test_tied_weights_count_once() -> None:
    """A key that a rank holds twice is no more widely held, and needs no exchange."""
    tied = [rank_offsets("w", torch.zeros(2)), rank_offsets("w", torch.zeros(2))]
    found = build([tied, []], load=True)
    assert found.all_ranks_for_shard == {("w", (0,), None): [0]}
    ranks = {"A": [0, 0], "B": [0, 1]}
    assert list(distribute_shards_to_ranks(ranks, {"A": 1, "B": 2}, 2, set())) == ["A", "B"]


def test_megatron_bridge_5862_two_mains_are_named() -> None:
    all_shards = [[rank_offsets("w", torch.zeros(2))] for _ in range(3)]
    with pytest.raises(CheckpointingException, match=r"w at \(0,\): ranks \[0, 1, 2\]"):
        build(all_shards, load=False)
    # In a load it does not matter whose copy is filled first.
    assert named(build(all_shards, load=True)) == {"w": 0}


def test_the_first_rank_that_has_a_shard_describes_it() -> None:
    found = build(group_of_four()[1:], load=True)
    assert found.shard_to_metadata["n", (0,), None].replica_id == 1
    assert all(shard.data is None for shard in found.shard_to_metadata.values())
