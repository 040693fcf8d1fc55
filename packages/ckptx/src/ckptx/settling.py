"""Settling: all ranks together judge the blocks of which each has read a part."""

from __future__ import annotations

import json

from ckptx.integrity import Inspector, Part
from ckptx.ways import Ways


def settle(inspector: Inspector, ways: Ways) -> None:
    """Judge everything that was read so far, on all ranks. Collective.

    Blocks that a rank has read whole are judged there; of the others the ranks tell each other
    their parts. Blocks that are still incomplete then are kept for the next time. Damage raises on
    every rank, with file, key and byte: FormatError where all ranks see it, else PeerError.
    """
    left = ways.together("verify the checkpoint", inspector.judge)
    data = [(part.file, part.block, part.begin, part.nbytes, part.crc) for part in left]
    rows = ways.rows(json.dumps(data).encode() if data else b"")

    def judged() -> list[Part]:
        for row in rows:
            inspector.add(Part(*entry) for entry in json.loads(row or b"[]"))
        return inspector.judge()

    inspector.add(ways.together("verify the checkpoint", judged))
