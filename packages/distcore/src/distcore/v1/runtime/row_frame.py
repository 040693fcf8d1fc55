"""The form of a row on its way: a header that tells rows of different lengths apart."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from distcore.v1.errors import ChannelError, DisagreementError

_HEADER = struct.Struct("<4sI")
_MAGIC = b"dcr1"  # the last character is the number of the form
HEADER_NBYTES = _HEADER.size

# A receiver leaves this much room behind its row: carriers take a message that is shorter than
# its buffer, so a row of another length arrives whole and is told apart by its header.
_ROOM_NBYTES = 16 * 1024


def slot_nbytes(row_nbytes: int) -> int:
    """Return the size of the buffer into which a peer's row is received."""
    return HEADER_NBYTES + row_nbytes + _ROOM_NBYTES


def frame_row(row: bytes) -> bytes:
    """Return `row` behind its header."""
    return _HEADER.pack(_MAGIC, len(row)) + row


def read_rows(slots: Sequence[bytes], row_nbytes: int, ranks: Sequence[int]) -> tuple[bytes, ...]:
    """Return the rows in `slots`, by index.

    Raises DisagreementError where the lengths differ, ChannelError where something else than a
    row arrived.
    """
    lengths: dict[int, int] = {}
    for rank, slot in zip(ranks, slots, strict=True):
        magic, lengths[rank] = _HEADER.unpack_from(slot)
        if magic != _MAGIC:
            raise ChannelError(
                f"rank {rank} sent {magic!r} where a row was expected", peer=rank, usable=False
            )
    if set(lengths.values()) != {row_nbytes}:
        raise DisagreementError(
            "the length of the rows",
            {rank: f"{nbytes} bytes" for rank, nbytes in lengths.items()},
            "all ranks must be in the same exchange",
        )
    return tuple(slot[HEADER_NBYTES : HEADER_NBYTES + row_nbytes] for slot in slots)
