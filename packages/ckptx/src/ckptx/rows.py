"""Rows: what each rank says, of any length, brought to all ranks."""

from __future__ import annotations

from typing import Final

from distcore.v1 import Channel

_LENGTH_NBYTES: Final = 64


def gather_rows(
    data: bytes, channel: Channel, *, timeout_s: float | None = None
) -> tuple[bytes, ...]:
    """What every rank gave, in group order. Collective; two exchanges, the second one padded."""
    length = len(data).to_bytes(_LENGTH_NBYTES, "little")
    sizes = channel.all_gather(length, timeout_s=timeout_s)
    lengths = [int.from_bytes(size, "little") for size in sizes]
    if not any(lengths):
        return (b"",) * len(lengths)
    rows = channel.all_gather(data.ljust(max(lengths), b"\0"), timeout_s=timeout_s)
    return tuple(bytes(row[:size]) for row, size in zip(rows, lengths, strict=True))
