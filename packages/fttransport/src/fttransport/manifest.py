"""Manifest: the JSON description of a state (format 1), and what proves that it is whole.

The bytes of a state are one stream: its blocks one after another, cut into chunks of equal size.
The content id is the digest of the description, which has the digest of every chunk in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, Final, NamedTuple

from distcore.v1 import ITEMSIZES
from fttransport.codec import Node
from fttransport.collector import collector_paused
from fttransport.digests import ALGORITHMS, HEX_LENGTH, KEYED, Digester
from fttransport.errors import AuthError, IntegrityError
from fttransport.memory import contiguous_stride

FORMAT: Final = 1
CHUNK_NBYTES: Final = 4 << 20
MAX_MANIFEST_NBYTES: Final = 1 << 28
PARAMETER: Final = 1
REQUIRES_GRAD: Final = 2
_MAX_NBYTES: Final = 1 << 62


class Entry(NamedTuple):
    """One tensor: `offset` bytes into block number `block` (-1 without elements).

    `stride` counts elements. `flags` adds PARAMETER and REQUIRES_GRAD. `layout` is None, or for a
    DTensor the description of its layout and the source's rank in it; the rest then describes the
    source's own part.
    """

    block: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    flags: int
    layout: Mapping[str, object] | None


@dataclass(frozen=True)
class Manifest:
    """What one snapshot holds. Immutable; `content_id` is the same wherever the content is.

    `algorithm` and `digests` are None and empty where nothing is verified; `nonce` then tells one
    snapshot from another.
    """

    step: int
    tree: Node
    tensors: tuple[Entry, ...]
    blocks: tuple[int, ...]
    chunk_nbytes: int
    algorithm: str | None
    digests: tuple[str, ...]
    nonce: str = ""

    @cached_property
    def nbytes(self) -> int:
        """The length of the stream."""
        return sum(self.blocks)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where in the stream each block begins, and the end of the last."""
        return tuple(accumulate(self.blocks, initial=0))

    @property
    def num_chunks(self) -> int:
        """How many chunks the stream has."""
        return -(-self.nbytes // self.chunk_nbytes)

    def chunk(self, index: int) -> tuple[int, int]:
        """Where in the stream a chunk begins and ends."""
        start = index * self.chunk_nbytes
        return start, min(start + self.chunk_nbytes, self.nbytes)

    def at_step(self, step: int) -> Manifest:
        """The same content under another step."""
        return replace(self, step=step)

    def to_bytes(self) -> bytes:
        """The description; equal for equal manifests."""
        table = {
            "format": FORMAT,
            "step": self.step,
            "tree": self.tree,
            "tensors": [
                [e.block, e.offset, e.shape, _short_stride(e), e.dtype, e.flags, e.layout]
                for e in self.tensors
            ],
            "blocks": self.blocks,
            "chunk_nbytes": self.chunk_nbytes,
            "algorithm": self.algorithm,
            "digests": self.digests,
            "nonce": self.nonce,
        }
        return json.dumps(table, separators=(",", ":"), allow_nan=False).encode("ascii")


def content_id(text: bytes, digester: Digester | None) -> str:
    """The content id of a description."""
    return (digester or Digester(ALGORITHMS[0])).digest([text])


def read_manifest(text: bytes, claimed_id: str, key: bytes) -> Manifest:
    """The manifest of a description that came from outside, checked in every respect.

    AuthError where there is a `key` and the description was not made with it, or the other way
    round; IntegrityError where it is not what its id says, or describes no possible state.
    """
    with collector_paused():
        return _read(text, claimed_id, key)


def _read(text: bytes, claimed_id: str, key: bytes) -> Manifest:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"the description of the state is no JSON: {error}") from None
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise IntegrityError(f"the description of the state is not of format {FORMAT}")
    try:
        manifest = _checked(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"the description of the state is malformed: {error}") from error
    if (manifest.algorithm == KEYED) != bool(key):
        has = "is" if manifest.algorithm == KEYED else "is not"
        raise AuthError(f"the state {has} authenticated with a key; give both sides the same mac=")
    found = content_id(text, digester_of(manifest, key))
    if found != claimed_id:
        if key:
            raise AuthError("the state was authenticated with another key, or was changed")
        raise IntegrityError(f"the description of the state has id {found}, not {claimed_id}")
    return manifest


def digester_of(manifest: Manifest, key: bytes) -> Digester | None:
    """What the chunks of a manifest were digested with."""
    return None if manifest.algorithm is None else Digester(manifest.algorithm, key)


def _short_stride(entry: Entry) -> tuple[int, ...] | None:
    return None if entry.stride == contiguous_stride(entry.shape) else entry.stride


def _checked(table: dict[str, Any]) -> Manifest:
    blocks = _naturals(table["blocks"])
    if sum(blocks) > _MAX_NBYTES:
        raise ValueError("more bytes than any memory has")
    algorithm = table["algorithm"]
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}")
    manifest = Manifest(
        step=_natural(table["step"], low=-_MAX_NBYTES),
        tree=table["tree"],
        tensors=tuple(_entry(row, blocks) for row in _rows(table["tensors"])),
        blocks=blocks,
        chunk_nbytes=_natural(table["chunk_nbytes"], low=1024),
        algorithm=algorithm,
        digests=tuple(_rows(table["digests"])),
        nonce=str(table["nonce"]),
    )
    expected = 0 if algorithm is None else manifest.num_chunks
    if len(manifest.digests) != expected:
        raise ValueError(f"{len(manifest.digests)} digests for {expected} chunks")
    if any(not isinstance(d, str) or len(d) != HEX_LENGTH for d in manifest.digests):
        raise ValueError("a digest is not 32 hex digits")
    return manifest


def _entry(row: Any, blocks: tuple[int, ...]) -> Entry:
    block, offset, raw_shape, raw_stride, dtype, flags, layout = row
    shape = _naturals(raw_shape)
    stride = contiguous_stride(shape) if raw_stride is None else _naturals(raw_stride)
    size = ITEMSIZES[dtype]
    if len(stride) != len(shape) or len(shape) > 64:
        raise ValueError(f"shape {shape} with strides {stride}")
    if layout is not None and not isinstance(layout, dict):
        raise TypeError("a layout is not an object")
    if _natural(block, low=-1) < 0:
        if prod(shape):
            raise ValueError(f"a tensor of shape {shape} without bytes")
    elif block >= len(blocks):
        raise ValueError(f"block {block} of {len(blocks)}")
    else:
        last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        end = _natural(offset) + (last + 1) * size
        if offset % size or not all(shape) or end > blocks[block]:
            raise ValueError(f"a tensor of shape {shape} does not lie in its block")
        if prod(shape) > _MAX_NBYTES:
            raise ValueError(f"shape {shape} is too large")
    return Entry(block, offset, shape, stride, dtype, _natural(flags), layout)


def _rows(data: object) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"expected a list, got {type(data).__name__}")
    return data


def _naturals(data: object) -> tuple[int, ...]:
    return tuple(map(_natural, _rows(data)))


def _natural(value: object, low: int = 0) -> int:
    if type(value) is not int or not low <= value <= _MAX_NBYTES:
        raise ValueError(f"{value!r} is not a number from {low}")
    return value
