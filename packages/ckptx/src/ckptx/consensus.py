"""Consensus: the ranks agree on what is to be loaded or saved, and learn each other's layouts.

Layouts that come from a mesh tell what every rank holds, so a digest of 16 bytes per rank is all
that is exchanged. Where the digests differ, as they do where each rank knows only a mesh of its
own (the shards of one replica, say), every rank tells its own pieces.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Final

import torch

from ckptx.rows import gather_rows
from distcore.v1 import Channel, Layout, Piece, Region
from distcore.v1.runtime import agree, layouts_of

_DIGEST_NBYTES: Final = 16
_ROW_NBYTES: Final = 64


def agree_on_layouts(
    terms: Mapping[str, str | int],
    layouts: Mapping[str, Layout],
    tensors: Mapping[str, torch.Tensor],
    channel: Channel,
    *,
    given: Mapping[str, Layout],
    timeout_s: float | None,
    label: str = "load",
) -> dict[str, Layout]:
    """Return layouts by key that say, for every rank of the channel, what it holds.

    Collective. `terms` are further things that must be the same everywhere. Raises
    DisagreementError on every rank, with what differs, where keys, shapes, dtypes or terms do.
    """
    table = {key: f"{layout.dtype} {list(layout.shape)}" for key, layout in layouts.items()}
    agree(label, {**table, **terms}, channel, timeout_s=timeout_s)
    placed = {key: tensor for key, tensor in tensors.items() if key not in given}
    strided = any(_is_strided(layouts[key]) for key in placed)
    found = dict(layouts)
    rows = channel.all_gather(_row(found, strided=strided), timeout_s=timeout_s)
    if any(row[_DIGEST_NBYTES] for row in rows):
        # A strided placement can be read in two ways; only all ranks together can tell.
        found.update(layouts_of(placed, channel))
        rows = channel.all_gather(_row(found, strided=strided), timeout_s=timeout_s)
    return found if len(set(rows)) == 1 else _gathered(found, channel, timeout_s)


def _is_strided(layout: Layout) -> bool:
    return layout.form is not None and any(
        placement.split_factor > 1 for placement in layout.form.placements
    )


def _row(layouts: Mapping[str, Layout], *, strided: bool) -> bytes:
    state = blake2b(digest_size=_DIGEST_NBYTES)
    for key in sorted(layouts):
        layout = layouts[key]
        held = layout.form or [(rank, layout.pieces(rank)) for rank in layout.ranks]
        state.update(repr((key, held)).encode())
    return (state.digest() + bytes([strided])).ljust(_ROW_NBYTES, b"\0")


def _gathered(
    layouts: Mapping[str, Layout], channel: Channel, timeout_s: float | None
) -> dict[str, Layout]:
    """The layouts made of what each rank says of itself. Two exchanges."""
    own = [
        [[p.region.start, p.region.stop, p.place] for p in layouts[key].pieces(channel.rank)]
        for key in sorted(layouts)
    ]
    data = json.dumps(own, separators=(",", ":")).encode()
    tables = [json.loads(row) for row in gather_rows(data, channel, timeout_s=timeout_s)]
    found = {}
    for number, key in enumerate(sorted(layouts)):
        pieces = {
            rank: tuple(
                Piece(Region(tuple(start), tuple(stop)), tuple(place))
                for start, stop, place in table[number]
            )
            for rank, table in zip(channel.ranks, tables, strict=True)
            if table[number]
        }
        layout = layouts[key]
        found[key] = Layout(shape=layout.shape, dtype=layout.dtype, pieces=pieces)
    return found
