"""Snapshot: a state of one step, staged to be read: its manifest and its bytes.

An alias snapshot shares the memory of CPU tensors; whoever sends it keeps the state unchanged
until the snapshot is no longer read. Tensors of a device are always copied to the CPU.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from distcore.v1 import PlanError
from distcore.v1.runtime import dtype_name, is_dtensor
from fttransport.blocks import find_blocks, on_host
from fttransport.codec import Codec
from fttransport.collector import collector_paused
from fttransport.digests import Digester
from fttransport.errors import CodecRefused
from fttransport.manifest import (
    CHUNK_NBYTES,
    PARAMETER,
    REQUIRES_GRAD,
    Entry,
    Manifest,
    content_id,
)
from fttransport.placements import note_layout
from fttransport.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.tensor import DTensor  # noqa: TID251 - a type

Staging = Literal["alias", "copy"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A manifest, its text, its content id and the bytes that it describes."""

    manifest: Manifest
    text: bytes
    content_id: str
    stream: Stream

    @classmethod
    def of(cls, manifest: Manifest, stream: Stream, digester: Digester | None) -> Snapshot:
        """The snapshot of a manifest whose bytes are in `stream`."""
        text = manifest.to_bytes()
        return cls(manifest, text, content_id(text, digester), stream)

    def at_step(self, step: int, digester: Digester | None) -> Snapshot:
        """The same bytes under another step."""
        return Snapshot.of(self.manifest.at_step(step), self.stream, digester)


def take_snapshot(
    state: object,
    step: int,
    *,
    codec: Codec,
    digester: Digester | None,
    staging: Staging = "alias",
    chunk_nbytes: int = CHUNK_NBYTES,
) -> Snapshot:
    """Stage a state, or what a callable of no arguments returns.

    CodecRefused, with the key path, where the state has something that is not sent.
    """
    tree = cast("Callable[[], object]", state)() if callable(state) else state
    with collector_paused():
        return _taken(tree, step, codec, digester, staging=staging, chunk_nbytes=chunk_nbytes)


def _taken(
    tree: object,
    step: int,
    codec: Codec,
    digester: Digester | None,
    *,
    staging: Staging,
    chunk_nbytes: int,
) -> Snapshot:
    kept = _Kept(codec)
    node = codec.encode(tree, kept.keep)
    blocks, places = find_blocks(kept.locals)
    stream = Stream(on_host(blocks, copied=staging == "copy"))
    entries = tuple(
        Entry(place.block, place.offset, tuple(local.shape), place.stride, dtype, flags, layout)
        for place, local, (dtype, flags, layout) in zip(
            places, kept.locals, kept.notes, strict=True
        )
    )
    bare = Manifest(
        step=step,
        tree=node,
        tensors=entries,
        blocks=tuple(block.numel() for block in stream.blocks),
        chunk_nbytes=chunk_nbytes,
        algorithm=None,
        digests=(),
        nonce=uuid.uuid4().hex if digester is None else "",
    )
    return Snapshot.of(_digested(bare, stream, digester), stream, digester)


def _digested(bare: Manifest, stream: Stream, digester: Digester | None) -> Manifest:
    if digester is None:
        return bare
    found = tuple(stream.digest(bare, i, digester) for i in range(bare.num_chunks))
    return Manifest(
        step=bare.step,
        tree=bare.tree,
        tensors=bare.tensors,
        blocks=bare.blocks,
        chunk_nbytes=bare.chunk_nbytes,
        algorithm=digester.algorithm,
        digests=found,
        nonce=bare.nonce,
    )


class _Kept:
    """The tensors of a tree, each object once, with what is noted of each."""

    def __init__(self, codec: Codec) -> None:
        self.locals: list[Tensor] = []
        self.notes: list[tuple[str, int, Mapping[str, object] | None]] = []
        self._codec = codec
        self._numbers: dict[int, int] = {}
        # An id is only good while its object lives.
        self._alive: list[Tensor] = []

    def keep(self, tensor: Tensor, path: str) -> int:
        number = self._numbers.get(id(tensor))
        if number is None:
            local, note = _described(tensor, path)
            number = self._numbers[id(tensor)] = len(self.locals)
            self.locals.append(local)
            self.notes.append(note)
            self._alive.append(tensor)
        return number


def _described(
    tensor: Tensor, path: str
) -> tuple[Tensor, tuple[str, int, Mapping[str, object] | None]]:
    layout = None
    local = tensor.detach()
    flags = REQUIRES_GRAD if tensor.requires_grad else 0
    if is_dtensor(tensor):
        layout = _layout_note(tensor, path)
        local = local_part(tensor)
    elif type(tensor) is torch.nn.Parameter:
        flags |= PARAMETER
    elif type(tensor) is not Tensor:
        raise CodecRefused(f"state{path}: tensors of type {type(tensor).__qualname__} are not sent")
    if local.layout is not torch.strided or local.is_quantized or local.device.type == "meta":
        kind = "quantized" if local.is_quantized else f"{local.layout} on {local.device}"
        raise CodecRefused(f"state{path}: a tensor that is {kind} is not sent")
    plain = local.resolve_conj().resolve_neg()
    return plain, (dtype_name(plain.dtype), flags, layout)


def local_part(tensor: Tensor) -> Tensor:
    """The caller's own part of a tensor, detached, sharing its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def _layout_note(tensor: DTensor, path: str) -> Mapping[str, object]:
    try:
        return note_layout(tensor)
    except PlanError as error:
        raise CodecRefused(f"state{path}: {error}") from error
