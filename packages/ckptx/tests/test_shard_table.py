"""Shard tables: data that says all of a shard but its values."""

from __future__ import annotations

import json

import pytest
import torch

from ckptx.shard_table import (
    decode_shard,
    decode_table,
    encode_shard,
    encode_table,
    sharded_tensors_in,
    table_digest,
)
from ckptx.sharded import ShardedTensor

rank_offsets = ShardedTensor.from_rank_offsets
SHARDS = [
    rank_offsets("a", torch.zeros(2, 3), (1, 1, 4), replica_id=(0, 2)),
    rank_offsets("b", torch.zeros((), dtype=torch.float8_e5m2), (0, 2, 5), prepend_axis_num=1),
    ShardedTensor("c", None, torch.int8, (3,), (9,), (4,), None, 7, allow_shape_mismatch=True),
]


def test_a_table_comes_back_without_the_values() -> None:
    assert decode_table(encode_table(SHARDS)) == [shard.without_data() for shard in SHARDS]


def test_nested_dicts_and_lists_are_entered_and_nothing_else() -> None:
    a, b, c = SHARDS
    state = {"x": [a, {"y": b}], "z": (c,), "n": 3, "s": "text", "t": torch.zeros(1)}
    assert [shard.key for shard in sharded_tensors_in(state)] == ["a", "b"]


def test_a_digest_knows_every_field_and_no_order() -> None:
    digest = table_digest(SHARDS)
    assert len(digest) == 16
    assert table_digest(SHARDS[::-1]) == digest
    for field, value in {
        "key": "A",
        "dtype": torch.float16,
        "local_shape": (3, 2),
        "global_shape": (2, 13),
        "global_offset": (0, 0),
        "axis_fragmentations": None,
        "replica_id": 0,
        "allow_shape_mismatch": True,
    }.items():
        changed = SHARDS[0].without_data()
        setattr(changed, field, value)
        assert table_digest([changed, *SHARDS[1:]]) != digest, field


@pytest.mark.parametrize("at", range(9))
def test_a_row_that_is_no_shard_is_refused(at: int) -> None:
    row = encode_shard(SHARDS[0])
    assert decode_shard(row) == SHARDS[0].without_data()
    row[at] = {"some": "thing"}
    with pytest.raises((ValueError, TypeError)):
        decode_shard(json.loads(json.dumps(row)))
    with pytest.raises(ValueError, match="9 fields"):
        decode_shard(row[:at])
