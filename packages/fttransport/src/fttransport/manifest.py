"""Manifest: the JSON description of a state (format 1), and what proves that it is whole.

The bytes of a state are one stream: its blocks one after another, cut into chunks of equal size.
The content id is the digest of the description, which has the digest of every chunk in it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Final

from fttransport.codec import Node
from fttransport.collector import collector_paused
from fttransport.digests import ALGORITHMS, HEX_LENGTH, KEYED, Digester
from fttransport.errors import AuthError, IntegrityError
from fttransport.table import MAX_NBYTES, TensorTable, natural, naturals

FORMAT: Final = 1
CHUNK_NBYTES: Final = 4 << 20
MAX_MANIFEST_NBYTES: Final = 1 << 28
PARAMETER: Final = 1
REQUIRES_GRAD: Final = 2


@dataclass(frozen=True)
class Manifest:
    """What one snapshot holds. Immutable; `content_id` is the same wherever the content is.

    `algorithm` and `digests` are None and empty where nothing is verified; `nonce` then tells one
    snapshot from another.
    """

    step: int
    tree: Node
    tensors: TensorTable
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
            "tensors": self.tensors.to_json(),
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


def _checked(table: dict[str, Any]) -> Manifest:
    blocks = naturals(table["blocks"])
    if sum(blocks) > MAX_NBYTES:
        raise ValueError("more bytes than any memory has")
    algorithm, digests = table["algorithm"], table["digests"]
    if not isinstance(digests, list):
        raise TypeError("the digests are no list")
    if algorithm is not None and algorithm not in ALGORITHMS:
        raise ValueError(f"unknown algorithm {algorithm!r}")
    manifest = Manifest(
        step=natural(table["step"], low=-MAX_NBYTES),
        tree=table["tree"],
        tensors=TensorTable.from_json(table["tensors"], blocks),
        blocks=blocks,
        chunk_nbytes=natural(table["chunk_nbytes"], low=1024),
        algorithm=algorithm,
        digests=tuple(digests),
        nonce=str(table["nonce"]),
    )
    expected = 0 if algorithm is None else manifest.num_chunks
    if len(manifest.digests) != expected:
        raise ValueError(f"{len(manifest.digests)} digests for {expected} chunks")
    if any(not isinstance(d, str) or len(d) != HEX_LENGTH for d in manifest.digests):
        raise ValueError("a digest is not 32 hex digits")
    return manifest
