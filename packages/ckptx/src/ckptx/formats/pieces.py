"""pieces: safetensors files that hold parts of tensors, as torch's distributed checkpoint writes.

Each file says in its free text (`DCP_SHARDING_INFO`) at which offset of the whole tensor each of
its parts begins. The whole is as large as its parts reach; whether they leave a hole, the load
finds out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from ckptx.errors import FormatError
from ckptx.formats.safetensors import Header
from ckptx.stored import Chunk, StoredTensor
from distcore.v1 import Region

INFO: Final = "DCP_SHARDING_INFO"
OFFSETS: Final = "saved_offsets"


def has_pieces(header: Header) -> bool:
    """Whether a file holds parts of tensors rather than whole ones."""
    return INFO in header.metadata


def joined(headers: Iterable[Header]) -> dict[str, StoredTensor]:
    """The tensors whose parts lie in the files. FormatError where the files contradict."""
    chunks: dict[str, dict[Region, Chunk]] = {}
    dtypes: dict[str, str] = {}
    for header in headers:
        offsets = _offsets(header)
        for key, stored in header.tensors.items():
            if dtypes.setdefault(key, stored.dtype) != stored.dtype:
                text = f"{stored.dtype} here, {dtypes[key]} in another file"
                raise FormatError(text, file=header.file, key=key)
            region = Region.of_shape(stored.shape).translate(_offset(offsets, key, stored, header))
            found = chunks.setdefault(key, {})
            if next(iter(found), region).ndim != region.ndim:
                text = "its parts differ in the number of dims"
                raise FormatError(text, file=header.file, key=key)
            found.setdefault(region, Chunk(region, header.file, stored.chunks[0].offset))
    return {key: _whole(found, dtypes[key]) for key, found in chunks.items()}


def _whole(chunks: dict[Region, Chunk], dtype: str) -> StoredTensor:
    regions = sorted(chunks)
    shape = tuple(map(max, zip(*(region.stop for region in regions), strict=True)))
    filled = tuple(chunks[region] for region in regions if not region.is_empty)
    return StoredTensor(shape, dtype, filled)


def _offsets(header: Header) -> dict[str, object]:
    if not has_pieces(header):
        return {}
    try:
        found = json.loads(header.metadata[INFO])
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{INFO} is not JSON: {error}", file=header.file) from error
    if not isinstance(found, dict):
        raise FormatError(f"{INFO} is no table", file=header.file)
    return found


def _offset(
    offsets: dict[str, object], key: str, stored: StoredTensor, header: Header
) -> tuple[int, ...]:
    """Where in the whole tensor the part begins. A file without such words has whole tensors."""
    if not has_pieces(header):
        return (0,) * len(stored.shape)
    entry = offsets.get(key)
    found = entry.get(OFFSETS) if isinstance(entry, dict) else None
    fits = isinstance(found, list) and len(found) == len(stored.shape)
    if not fits or not all(type(low) is int and 0 <= low < 2**63 for low in found or ()):
        text = f"{INFO} does not say where in the whole tensor it begins"
        raise FormatError(text, file=header.file, key=key)
    return tuple(found or ())
