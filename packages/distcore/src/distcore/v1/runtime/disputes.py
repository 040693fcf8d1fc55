"""Disputes: what all ranks are shown where their plans, options or dtypes differ."""

from __future__ import annotations

import json
from array import array
from hashlib import blake2b
from typing import Final

from distcore.v1.channel import Channel
from distcore.v1.dtypes import ITEMSIZES
from distcore.v1.errors import DisagreementError
from distcore.v1.plan import Plan

_SHOWN_KEYS: Final = 4
_SHOWN_TRANSFERS: Final = 3
_DTYPES: Final = ("", *sorted(ITEMSIZES))
DTYPE_CODES: Final = {name: code for code, name in enumerate(_DTYPES)}
"""A number below 256 for each dtype, and 0 for none."""


def describe_plan(plan: Plan, options: str) -> str:
    """A JSON object by key: how many transfers, the first of them, and a digest of all.

    It has two entries more, for the options and for the order in which the keys take turns.
    """
    columns = plan.columns
    texts: list[list[str]] = [[] for _ in plan.keys]
    states = [blake2b(digest_size=4) for _ in plan.keys]
    counts = [0] * len(plan.keys)
    for row, number in enumerate(columns.key):
        src, dst = columns.src[row], columns.dst[row]
        corner = columns.coords[columns.at[row] : columns.at[row + 1]]
        states[number].update((array("q", (src, dst)) + corner).tobytes())
        counts[number] += 1
        if counts[number] <= _SHOWN_TRANSFERS:
            middle = len(corner) // 2
            texts[number].append(
                f"{src}>{dst} {corner[:middle].tolist()}-{corner[middle:].tolist()}"
            )
        elif counts[number] == _SHOWN_TRANSFERS + 1:
            texts[number].append("...")
    table = {
        key: f"{counts[n]} transfers ({', '.join(texts[n])}; {states[n].hexdigest()})"
        for n, key in enumerate(plan.keys)
    }
    order = blake2b(columns.key.tobytes() + "\0".join(plan.keys).encode(errors="replace"))
    return json.dumps(
        {"(options)": options, **table, "(order of the transfers)": order.hexdigest()[:8]}
    )


def dtype_dispute(
    plan: Plan, dtypes: bytes, channel: Channel, *, timeout_s: float | None = None
) -> DisagreementError:
    """The error that names the keys whose two ends differ in dtype. Collective.

    `dtypes` has two codes per key of the plan: this rank's dtype as a source and as a
    destination, 0 where it has no part in it.
    """
    rows = dict(zip(channel.ranks, channel.all_gather(dtypes, timeout_s=timeout_s), strict=True))
    columns = plan.columns
    disputed = dict.fromkeys(
        number
        for number, src, dst in zip(columns.key, columns.src, columns.dst, strict=True)
        if src != dst and rows[src][2 * number] != rows[dst][2 * number + 1]
    )
    shown = [
        (number, name, side)
        for number in list(disputed)[:_SHOWN_KEYS]
        for side, name in enumerate(("source", "destination"))
    ]
    values = {
        rank: ", ".join(
            f"{plan.keys[number]!r} is {_DTYPES[row[2 * number + side]]} as a {name}"
            for number, name, side in shown
            if row[2 * number + side]
        )
        or "no part in it"
        for rank, row in rows.items()
    }
    return DisagreementError("dtypes", values, "source and destination must have one dtype")
