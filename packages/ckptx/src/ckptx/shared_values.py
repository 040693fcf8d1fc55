"""shared_values: entries that are no tensors, read by one rank and put in place by all."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from ckptx.checkpoint import Checkpoint
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
    stored = job.checkpoint.objects
    found = shared_bytes(job.checkpoint, sorted(job.wanted), ways)

    def put() -> None:
        for key, data in found.items():
            value = value_of(stored[key], data)
            names = foreign_names(value)
            if names:
                text = f"its value needs {', '.join(sorted(set(names)))}, which is not loaded"
                raise FormatError(text, file=stored[key].file, key=key)
            job.leaves.slots[key].put(value)

    if found:
        ways.together("replace values", put)


def shared_bytes(checkpoint: Checkpoint, keys: Sequence[str], ways: Ways) -> dict[str, bytes]:
    """The bytes of values by key, read by the first rank for all. Collective, the same `keys`."""
    if not keys:
        return {}

    def read() -> bytes:
        if ways.channel.index:
            return b""
        with FileReader() as reader:
            found = [value_bytes(checkpoint.objects[key], reader) for key in keys]
        return b"".join(_LENGTH.pack(len(data)) + data for data in found)

    row = ways.rows(ways.together("read values of the checkpoint", read))[0]
    found, at = {}, 0
    for key in keys:
        (length,) = _LENGTH.unpack_from(row, at)
        at += _LENGTH.size + length
        found[key] = row[at - length : at]
    return found
