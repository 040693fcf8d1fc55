"""Records: what each rank tells the others of its tensors.

Ranks of one mesh tell the same, so each record is sent by one rank for all that have it: first
every rank shows the digest of its record, then the lowest rank of each digest sends it to those
that have another.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

import torch

from distcore.v1 import (
    Channel,
    ChannelError,
    Message,
)
from reshard.forms import Forms
from reshard.memory import is_same
from reshard.placed import Own

_ROW: Final = struct.Struct("<32sQ24x")
MAX_RECORD_NBYTES: Final = 1 << 30
UNKNOWN: Final = "?"
"""The alias of a tensor that has no memory on a rank."""


@dataclass(frozen=True, slots=True)
class Record:
    """What `ranks` tell alike: their terms, and a row per key for each side, in their order."""

    ranks: tuple[int, ...]
    terms: str
    src: tuple[Row, ...]
    dst: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of one side.

    `form` describes the layout, None for a plain tensor. `alias` is an earlier key of the same
    side and memory, or empty. `has_values` is false on the meta device.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    form: str | None
    partial: tuple[int, ...]
    op: str
    alias: str
    has_values: bool


def encode(src: Mapping[str, Own], dst: Mapping[str, Own], terms: str) -> bytes:
    """The record of this rank."""
    forms = Forms()
    sides = []
    for side in (src, dst):
        aliases = _aliases(side)
        rows: list[list[object]] = []
        for key, own in side.items():
            form = None if own.layout is None else forms.number(own.layout)
            has_values = not own.data.is_meta
            row: list[object] = [
                key,
                own.shape,
                own.dtype,
                form,
                own.partial,
                own.op,
                aliases[key],
                has_values,
            ]
            rows.append(row)
        sides.append(rows)
    table = {"terms": terms, "forms": forms.told(), "src": sides[0], "dst": sides[1]}
    return zlib.compress(json.dumps(table, separators=(",", ":")).encode(), level=1)


def exchange(
    record: bytes, channel: Channel, *, timeout_s: float | None = None
) -> tuple[Record, ...]:
    """The records of all ranks, by the lowest rank that has each. Collective, two exchanges."""
    digest = blake2b(record, digest_size=32).digest()
    rows = channel.all_gather(_ROW.pack(digest, len(record)), timeout_s=timeout_s)
    ranks_of: dict[tuple[bytes, int], list[int]] = {}
    for rank, row in zip(channel.ranks, rows, strict=True):
        found, nbytes = _ROW.unpack(row)
        if nbytes > MAX_RECORD_NBYTES:
            raise ChannelError(f"rank {rank} announced a record of {nbytes} bytes", peer=rank)
        ranks_of.setdefault((found, nbytes), []).append(rank)
    mine = ranks_of[digest, len(record)]
    texts = {mine[0]: record}
    sends, receives, buffers = [], [], {}
    if channel.rank == mine[0]:
        sent = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(channel.device)
        others = sorted(set(channel.ranks) - set(mine))
        sends = [Message(rank, (sent,)) for rank in others]
    for (_, nbytes), ranks in ranks_of.items():
        if ranks is not mine:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=channel.device)
            buffers[ranks[0]] = buffer
            receives.append(Message(ranks[0], (buffer,)))
    channel.start(sends, receives, timeout_s=timeout_s).wait()
    texts |= {rank: buffer.cpu().numpy().tobytes() for rank, buffer in buffers.items()}
    return tuple(_decode(tuple(ranks), texts[ranks[0]]) for ranks in ranks_of.values())


def _decode(ranks: tuple[int, ...], record: bytes) -> Record:
    table = json.loads(zlib.decompress(record))
    forms = [json.dumps(form, separators=(",", ":")) for form in table["forms"]]
    src, dst = (tuple(_row(row, forms) for row in table[side]) for side in ("src", "dst"))
    return Record(ranks, table["terms"], src, dst)


def _row(row: list[Any], forms: list[str]) -> Row:
    key, shape, dtype, form, partial, op, alias, has_values = row
    text = None if form is None else forms[form]
    return Row(key, tuple(shape), dtype, text, tuple(partial), op, alias, has_values)


def _aliases(side: Mapping[str, Own]) -> dict[str, str]:
    """For every key the first key that is the same memory, empty for that key itself."""
    first: dict[tuple[object, ...], str] = {}
    found = {}
    for key, own in side.items():
        data = own.data
        if data.is_meta or data.numel() == 0:
            found[key] = UNKNOWN
            continue
        place = data.device, data.data_ptr(), data.dtype, tuple(data.shape), data.stride()
        other = first.setdefault(place, key)
        found[key] = "" if other == key or not is_same(side[other].data, data) else other
    return found
