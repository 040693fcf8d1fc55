"""Packs: which shards go together, in which order, and that nothing is lost on the way."""

from __future__ import annotations

import torch

from ckptx.distribution import shard_nbytes
from ckptx.packs import MIN_SHARDS, SMALL_NBYTES, Pack, pack_small
from ckptx.part import Crossing
from ckptx.sharded import ShardedTensor, ShardId


def crossing(
    name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, main: int = 0
) -> Crossing:
    zeros = (0,) * len(shape)
    metadata = ShardedTensor(name, None, dtype, shape, shape, zeros, None)
    nbytes = shard_nbytes(metadata)
    return Crossing(metadata.shard_id, name, metadata, main, (1 - main,), nbytes)


def many(count: int, nbytes: int = 64) -> list[Crossing]:
    return [crossing(f"t{at:03}", (nbytes // 4,), main=at % 2) for at in range(count)]


def test_shards_that_go_the_same_way_make_one_pack() -> None:
    packs, rest = pack_small(many(MIN_SHARDS), (), 1 << 20)
    assert rest == ()
    assert [{move.main for move in pack.moves} for pack in packs] == [{0}, {1}]
    assert [pack.nbytes for pack in packs] == [64 * MIN_SHARDS // 2] * 2


def test_few_shards_are_not_packed() -> None:
    moves = many(MIN_SHARDS - 1)
    assert pack_small(moves, (), 1 << 20) == ([], tuple(moves))


def test_large_and_empty_shards_and_those_apart_go_on_their_own() -> None:
    odd = [
        crossing("large", (SMALL_NBYTES // 4 + 1,)),
        crossing("empty", (0, 3)),
        crossing("class", (4,)),
    ]
    packs, rest = pack_small([*many(MIN_SHARDS), *odd], ["class"], 1 << 20)
    assert [move.name for move in rest] == ["large", "empty", "class"]
    assert sum(len(pack.moves) for pack in packs) == MIN_SHARDS


def test_no_more_is_packed_than_the_budget_allows() -> None:
    packs, rest = pack_small(many(2 * MIN_SHARDS), (), 64 * MIN_SHARDS + 63)
    assert sum(pack.nbytes for pack in packs) == 64 * MIN_SHARDS
    assert [move.name for move in rest] == [f"t{at:03}" for at in range(MIN_SHARDS, 2 * MIN_SHARDS)]


def test_the_larger_elements_lie_first_so_that_all_are_aligned() -> None:
    dtypes = [torch.int8, torch.float64, torch.bfloat16, torch.complex128, torch.float32]
    moves = [crossing(f"{dtype}", (3,), dtype) for dtype in dtypes]
    pack = Pack.of(moves)
    assert [move.metadata.dtype.itemsize for move in pack.moves] == [16, 8, 4, 2, 1]
    assert pack.sizes == (48, 24, 12, 6, 3)


def test_a_pack_gives_back_what_was_put_in() -> None:
    values: dict[ShardId, torch.Tensor] = {}
    moves = []
    for at, dtype in enumerate([torch.int8, torch.float64, torch.bfloat16, torch.int32]):
        tensor = torch.arange(6).to(dtype).view(2, 3)
        tensor = tensor.t().contiguous().t() if at % 2 else tensor
        moves.append(crossing(f"{dtype}", (2, 3), dtype))
        values[moves[-1].shard_id] = tensor
    moves.append(crossing("scalar", ()))
    values[moves[-1].shard_id] = torch.tensor(7.5)
    pack = Pack.of(moves)
    places = {
        name: torch.zeros_like(tensor).t().contiguous().t() for name, tensor in values.items()
    }
    pack.empty_into(pack.fill(values, "cpu"), places, "cpu")
    for name, tensor in values.items():
        assert places[name].tolist() == tensor.tolist()


def test_packs_that_differ_have_other_keys() -> None:
    keys = {
        Pack.of([crossing("a", (2,)), crossing("b", (2,))]).key,
        Pack.of([crossing("a", (2,)), crossing("b", (2,), torch.int32)]).key,
        Pack.of([crossing("a", (2,)), crossing("b", (1, 2))]).key,
        Pack.of([crossing("b", (2,)), crossing("a", (2,))]).key,
    }
    assert len(keys) == 4
