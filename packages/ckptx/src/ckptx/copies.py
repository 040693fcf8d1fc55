"""Copies: proof that several ranks hold the same of one tensor, before one copy is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import xxhash

from ckptx.cell import Cell
from ckptx.errors import CheckpointDisagreement
from ckptx.ways import Ways
from ckptx.writer import pieces_of
from distcore.v1.runtime import Shard

DIGEST_NBYTES: Final = 8


def prove_equal(
    copies: Iterable[tuple[str, Cell]],
    shards: Mapping[str, Shard],
    ways: Ways,
    *,
    copy_nbytes: int,
) -> None:
    """Raise CheckpointDisagreement on every rank where two ranks hold different bytes of one box.

    Collective; each rank reads its copies once, and sends 8 bytes for each. Only the first tensor
    that differs is named.
    """
    rank = ways.channel.rank
    found = list(copies)

    def digests() -> bytes:
        return b"".join(
            _digest(shards[key], cell, copy_nbytes) for key, cell in found if rank in cell.ranks
        )

    rows = dict(
        zip(ways.channel.ranks, ways.rows(ways.together("compare copies", digests)), strict=True)
    )
    at = dict.fromkeys(rows, 0)
    for key, cell in found:
        values = {}
        for holder in cell.ranks:
            values[holder] = rows[holder][at[holder] : at[holder] + DIGEST_NBYTES].hex()
            at[holder] += DIGEST_NBYTES
        if len(set(values.values())) > 1:
            label = f"the copies of {key!r} in {cell.region}"
            raise CheckpointDisagreement(label, values)


def _digest(shard: Shard, cell: Cell, copy_nbytes: int) -> bytes:
    state = xxhash.xxh3_64()
    for piece in pieces_of(shard, cell.region, copy_nbytes):
        state.update(piece)
    return state.digest()
