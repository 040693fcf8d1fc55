"""shared_values: entries that are no tensors, read by one rank and put in place by all."""

from __future__ import annotations

import struct
from typing import Final

from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.loadjob import LoadJob
from ckptx.values import foreign_names, value_bytes, value_of
from ckptx.ways import Ways

_LENGTH: Final = struct.Struct("<Q")


def replace_values(job: LoadJob, ways: Ways) -> None:
    """Replace the values of the state dict by the stored ones. Collective.

    FormatError (as a PeerError on every rank) where a value needs a class that is not loaded.
    """
    if not job.wanted:
        return
    stored = job.checkpoint.objects

    def read() -> bytes:
        if ways.channel.index:
            return b""
        with FileReader() as reader:
            found = [value_bytes(stored[key], reader) for key in sorted(job.wanted)]
        return b"".join(_LENGTH.pack(len(data)) + data for data in found)

    row = ways.rows(ways.together("read values of the checkpoint", read))[0]

    def put() -> None:
        at = 0
        for key in sorted(job.wanted):
            (length,) = _LENGTH.unpack_from(row, at)
            at += _LENGTH.size + length
            value = value_of(stored[key], row[at - length : at])
            names = foreign_names(value)
            if names:
                text = f"its value needs {', '.join(sorted(set(names)))}, which is not loaded"
                raise FormatError(text, file=stored[key].file, key=key)
            job.leaves.slots[key].put(value)

    ways.together("replace values", put)
