"""Shard tables: what one rank's state dict holds, as data that ranks gather and files keep.

A table is JSON: a list per shard, without data and without anything that could run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final

from ckptx.sharded import ShardedTensor
from distcore.v1 import Channel
from distcore.v1.runtime import dtype_name, run_together, torch_dtype

_SIZE_NBYTES: Final = 64
DIGEST_NBYTES: Final = 16


def sharded_tensors_in(state: object) -> Iterator[ShardedTensor]:
    """The ShardedTensors in nested dicts and lists, in their order; other leaves are passed by."""
    if isinstance(state, ShardedTensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from sharded_tensors_in(value)
    elif isinstance(state, list):
        for value in state:
            yield from sharded_tensors_in(value)


def encode_shard(shard: ShardedTensor) -> list[object]:
    """A shard without its data, as JSON."""
    replica = shard.replica_id
    pieces = shard.axis_fragmentations
    return [
        shard.key,
        dtype_name(shard.dtype),
        list(shard.local_shape),
        list(shard.global_shape),
        list(shard.global_offset),
        None if pieces is None else list(pieces),
        replica if isinstance(replica, int) else list(replica),
        shard.prepend_axis_num,
        shard.allow_shape_mismatch,
    ]


def decode_shard(row: object) -> ShardedTensor:
    """What `encode_shard` wrote; ValueError or TypeError where it is anything else."""
    key, dtype, local, shape, offset, pieces, replica, prepended, mismatch = _fields(row, 9)
    if not isinstance(key, str) or type(prepended) is not int or type(mismatch) is not bool:
        raise TypeError(f"{row!r} is no description of a shard")
    return ShardedTensor(
        key,
        None,
        torch_dtype(str(dtype)),
        _ints(local),
        _ints(shape),
        _ints(offset),
        None if pieces is None else _ints(pieces),
        replica if type(replica) is int else _ints(replica),
        prepended,
        mismatch,
    )


def encode_table(shards: Iterable[ShardedTensor]) -> bytes:
    """The table of one rank."""
    return json.dumps([encode_shard(shard) for shard in shards], separators=(",", ":")).encode()


def decode_table(data: bytes) -> list[ShardedTensor]:
    """The shards of a table."""
    return [decode_shard(row) for row in json.loads(data)]


def table_digest(shards: Iterable[ShardedTensor]) -> bytes:
    """16 bytes that differ where the shards do, in whatever order they come."""
    rows = sorted(json.dumps(encode_shard(shard), separators=(",", ":")) for shard in shards)
    return blake2b("\n".join(rows).encode(), digest_size=DIGEST_NBYTES).digest()


def gather_tables(
    state: object, channel: Channel, *, timeout_s: float | None = None
) -> list[list[ShardedTensor]]:
    """Every rank's shards, without data, by index. Collective; where it fails, it does on all."""

    def describe() -> bytes:
        return encode_table(sharded_tensors_in(state))

    data = run_together("describe the shards", describe, channel, timeout_s=timeout_s)
    rows = gather_bytes(data, channel, timeout_s=timeout_s)
    decoded = {row: decode_table(row) for row in dict.fromkeys(rows)}
    return [list(decoded[row]) for row in rows]


def gather_bytes(
    data: bytes, channel: Channel, *, timeout_s: float | None = None
) -> tuple[bytes, ...]:
    """Every rank's bytes, by index, of whatever length. Collective, two exchanges."""
    sizes = channel.all_gather(len(data).to_bytes(_SIZE_NBYTES, "little"), timeout_s=timeout_s)
    lengths = [int.from_bytes(size, "little") for size in sizes]
    if not max(lengths):
        return (b"",) * len(lengths)
    rows = channel.all_gather(data.ljust(max(lengths), b"\0"), timeout_s=timeout_s)
    return tuple(row[:length] for row, length in zip(rows, lengths, strict=True))


def _fields(row: object, count: int) -> list[Any]:
    if not isinstance(row, list) or len(row) != count:
        raise ValueError(f"{row!r} does not have {count} fields")
    return row


def _ints(values: object) -> tuple[int, ...]:
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise TypeError(f"{values!r} is no list of ints")
    return tuple(values)
