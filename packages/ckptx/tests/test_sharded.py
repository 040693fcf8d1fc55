"""Sharded values: what their constructors work out, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from ckptx import CheckpointingException
from ckptx.sharded import ShardedObject, ShardedTensor, is_main_replica

rank_offsets = ShardedTensor.from_rank_offsets


def piece(**changes: object) -> ShardedTensor:
    fields: dict[str, object] = {
        "key": "w",
        "data": None,
        "dtype": torch.float32,
        "local_shape": (3, 4),
        "global_shape": (6, 16),
        "global_offset": (3, 8),
        "axis_fragmentations": (2, 4),
    }
    return ShardedTensor(**{**fields, **changes})  # type: ignore[arg-type]


def test_example_offsets() -> None:
    shard = rank_offsets("w", torch.ones(3, 4), (0, 1, 2), (1, 2, 4), replica_id=(0, 1))
    assert shard.local_shape == (3, 4)
    assert shard.global_shape == (6, 16)
    assert shard.global_offset == (3, 8)
    assert shard.axis_fragmentations == (2, 4)
    assert shard.shard_id == ("w", (3, 8), None)
    assert not is_main_replica(shard.replica_id)
    assert shard.local_chunk_offset_in_global() == (1, 2)


def test_example_prepended_axis() -> None:
    shard = rank_offsets("layers.w", torch.ones(3, 4), (0, 5, 12), (1, 1, 2), prepend_axis_num=1)
    assert shard.global_shape == (12, 6, 4)
    assert shard.global_offset == (5, 3, 0)
    assert shard.axis_fragmentations == (12, 2, 1)
    assert shard.shard_id == ("layers.w", (5, 3, 0), None)
    assert shard.local_chunk_offset_in_global() == (5, 1, 0)


@pytest.mark.parametrize(
    ("replica_id", "is_main"),
    [
        (0, True),
        (1, False),
        ((), True),
        ((0,), True),
        ((0, 0, 0), True),
        ((0, 1), False),
        ([0, 0], True),
        (-1, False),
    ],
)
def test_example_main_replica(replica_id: int | tuple[int, ...], is_main: bool) -> None:
    assert is_main_replica(replica_id) is is_main


@pytest.mark.parametrize("triple", [(-1, 0, 1), (0, -1, 2), (0, 0, 0), (0, 2, 2)])
def test_a_bad_triple_is_refused(triple: tuple[int, int, int]) -> None:
    with pytest.raises(CheckpointingException, match="once per axis"):
        rank_offsets("w", torch.ones(3), triple)


def test_an_axis_that_is_cut_twice_is_refused() -> None:
    with pytest.raises(CheckpointingException, match="once per axis"):
        rank_offsets("w", torch.ones(3), (0, 0, 2), (0, 1, 2))


def test_an_axis_beyond_the_last_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        rank_offsets("w", torch.ones(3), (1, 0, 2))


def test_a_flattened_range_is_refused() -> None:
    with pytest.raises(ValueError, match="not supported"):
        rank_offsets("w", torch.ones(3), flattened_range=slice(0, 2))  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="not supported"):
        piece(flattened_range=slice(0, 2))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"data": torch.ones(3, 4, dtype=torch.float16)}, "expected torch.float32"),
        ({"data": torch.ones(4, 3)}, r"expected \(3, 4\)"),
        ({"global_shape": (6,)}, "expected 2 global axes"),
        ({"global_offset": (3, 8, 0)}, "expected 2 global axes"),
        ({"prepend_axis_num": 1}, "expected 3 global axes"),
        ({"global_offset": (2, 8)}, "no multiple"),
        ({"axis_fragmentations": (2,)}, "expected 2 counts"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(CheckpointingException, match=text):
        piece(**changes)


def test_an_irregular_grid_may_have_any_offset() -> None:
    shard = piece(global_offset=(2, 5), axis_fragmentations=None)
    assert not shard.has_regular_grid
    with pytest.raises(CheckpointingException, match="no regular grid"):
        shard.local_chunk_offset_in_global()


def test_empty_dims_divide_every_offset() -> None:
    shard = piece(local_shape=(0, 4), global_offset=(3, 8))
    assert shard.local_chunk_offset_in_global() == (0, 2)


def test_a_copy_without_data_leaves_the_original() -> None:
    shard = rank_offsets("w", torch.ones(3))
    assert shard.without_data().data is None
    assert shard.data is not None
    assert shard.without_data().shard_id == shard.shard_id


def test_init_data_keeps_what_is_there() -> None:
    data = torch.ones(3, 4)
    shard = piece(data=data)
    shard.init_data("meta")
    assert shard.data is data
    shard = piece()
    shard.init_data("cpu", torch.zeros)
    assert shard.data is not None
    assert shard.data.tolist() == [[0.0] * 4] * 3


def test_narrow_scales_the_global_tensor() -> None:
    shard = rank_offsets("w", torch.arange(12.0).view(3, 4), (1, 2, 4), prepend_axis_num=0)
    (cut,) = shard.narrow(1, 1, 2)
    assert (cut.local_shape, cut.global_shape, cut.global_offset) == ((3, 2), (3, 8), (0, 4))
    assert cut.data is not None
    assert cut.data.tolist() == [[1.0, 2.0], [5.0, 6.0], [9.0, 10.0]]
    with pytest.raises(CheckpointingException, match="no regular grid"):
        piece(axis_fragmentations=None).narrow(0, 0, 1)
    with pytest.raises(CheckpointingException, match="in proportion"):
        piece(local_shape=(0, 4)).narrow(0, 0, 1)


def test_example_objects() -> None:
    thing = ShardedObject("rng", {"state": 1}, (4,), (2,))
    assert thing.object_id == ("rng", (2,), (4,))
    assert thing.unique_key == "rng/shard_2_4"
    found = ShardedObject.empty_from_unique_key("rng/shard_2_4", replica_id=1)
    assert found == ShardedObject("rng", None, (4,), (2,), 1)
    assert thing.without_data().data is None
    deep = ShardedObject("a", None, (4, 8), (2, 0))
    assert ShardedObject.empty_from_unique_key(deep.unique_key) == deep
    flat = ShardedObject("a", None, (), ())
    assert ShardedObject.empty_from_unique_key(flat.unique_key) == flat


@pytest.mark.parametrize(
    "name", ["a/b/shard_2_4", "rng", "rng/part_2_4", "rng/shard_2_x", "r/shard_2.1_4"]
)
def test_a_name_that_no_object_has_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.split("/", maxsplit=1)[0]) as caught:
        ShardedObject.empty_from_unique_key(name)
    assert isinstance(caught.value, CheckpointingException)


def test_an_object_outside_its_grid_is_refused() -> None:
    with pytest.raises(CheckpointingException, match="differ"):
        ShardedObject("rng", None, (4,), (2, 0))
