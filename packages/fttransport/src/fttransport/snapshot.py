"""Snapshot: a state of one step, staged to be read: its manifest and its bytes.

An alias snapshot shares the memory of CPU tensors, but for small ones; whoever sends it keeps the
state unchanged until the snapshot is no longer read. Tensors of a device are always copied to the
CPU.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import TYPE_CHECKING, Final, Literal, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from distcore.v1 import PlanError
from distcore.v1.runtime import dtype_name, is_dtensor
from fttransport.blocks import Blocks, find_blocks, on_host
from fttransport.codec import Codec, walk
from fttransport.collector import collector_paused
from fttransport.digests import Digester
from fttransport.errors import CodecRefused
from fttransport.manifest import (
    CHUNK_NBYTES,
    PARAMETER,
    REQUIRES_GRAD,
    Manifest,
    content_id,
)
from fttransport.memory import Spans, contiguous_stride
from fttransport.placements import note_layout
from fttransport.stream import Stream
from fttransport.table import Form, TensorTable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor  # noqa: TID251 - a type

Staging = Literal["alias", "copy"]

PLAIN: Final = {Tensor, Parameter}
"""The types of tensors that are nothing but their bytes."""
_QUANTIZED: Final = {
    dtype
    for name, dtype in vars(torch).items()
    if name.startswith(("qint", "quint")) and isinstance(dtype, torch.dtype)
}


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
    kept = _Kept()
    node = codec.encode(tree, kept.keep)
    parts, layouts, spans = _parts(tree, kept.tensors)
    found = find_blocks(parts, spans)
    stream = Stream(on_host(found.blocks, copied=staging == "copy"))
    bare = Manifest(
        step=step,
        tree=node,
        tensors=_table(kept.tensors, parts, layouts, spans, found),
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
    found = stream.digests(bare, digester)
    return replace(bare, algorithm=digester.algorithm, digests=found)


class _Kept:
    """The tensors of a tree, each object once. They stay alive, so that an id is of one alone."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def keep(self, tensors: Sequence[Tensor]) -> list[int]:
        """The numbers of tensors; new ones are added."""
        numbers = []
        for tensor in tensors:
            number = self._numbers.setdefault(id(tensor), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(tensor)
            numbers.append(number)
        return numbers


def _parts(
    tree: object, tensors: list[Tensor]
) -> tuple[list[Tensor], dict[int, Mapping[str, object]], Spans]:
    """Of each tensor the caller's own part as plain bytes, the layouts of DTensors, and the spans.

    CodecRefused for the first that has no plain bytes.
    """
    parts = list(tensors)
    layouts: dict[int, Mapping[str, object]] = {}
    if not set(map(type, tensors)) <= PLAIN:
        for number, tensor in enumerate(tensors):
            if is_dtensor(tensor):
                layouts[number] = _layout_note(tensor, tree)
                parts[number] = local_part(tensor)
            elif type(tensor) not in PLAIN:
                kind = type(tensor).__qualname__
                raise CodecRefused(f"{_where(tensor, tree)}: tensors of type {kind} are not sent")
    if {part.layout for part in parts} - {torch.strided}:
        _refuse(parts, tensors, tree)
    spans = Spans.of(parts)
    dtypes = set(spans.dtypes)
    if dtypes & _QUANTIZED or any(device.type == "meta" for device in set(spans.devices)):
        _refuse(parts, tensors, tree)
    if any(dtype.is_complex for dtype in dtypes) or any(map(Tensor.is_neg, parts)):
        parts = [part.detach().resolve_conj().resolve_neg() for part in parts]
        spans = Spans.of(parts)
    return parts, layouts, spans


def _refuse(parts: list[Tensor], tensors: list[Tensor], tree: object) -> NoReturn:
    """Name the first part that has no plain bytes."""
    for part, tensor in zip(parts, tensors, strict=True):
        if part.layout is not torch.strided or part.is_quantized or part.is_meta:
            kind = "quantized" if part.is_quantized else f"{part.layout} on {part.device}"
            raise CodecRefused(f"{_where(tensor, tree)}: a tensor that is {kind} is not sent")
    raise CodecRefused("state: a tensor without plain bytes is not sent")


def _table(
    tensors: Sequence[Tensor],
    parts: Sequence[Tensor],
    layouts: Mapping[int, Mapping[str, object]],
    spans: Spans,
    found: Blocks,
) -> TensorTable:
    shapes = [part.shape for part in parts]
    grads = [tensor.requires_grad for tensor in tensors]
    # What few tensors have; layouts have no hash, their texts have.
    more: Iterable[tuple[tuple[int, ...] | None, str | None] | None] = repeat(None, len(parts))
    texts = {number: json.dumps(layout) for number, layout in layouts.items()}
    by_text = {texts[number]: layout for number, layout in layouts.items()}
    if found.strides or layouts:
        more = [(found.strides.get(i), texts.get(i)) for i in range(len(parts))]
    keys = list(zip(spans.dtypes, shapes, grads, map(type, tensors), more, strict=True))
    order = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    forms = []
    for dtype, shape, grad, kind, (stride, text) in (
        (*key[:4], key[4] or (None, None)) for key in order
    ):
        flags = REQUIRES_GRAD * grad | PARAMETER * (kind is Parameter)
        layout = None if text is None else by_text[text]
        strides = contiguous_stride(shape) if stride is None else stride
        forms.append(Form(dtype_name(dtype), tuple(shape), strides, flags, layout))
    column = np.fromiter(map(order.__getitem__, keys), np.int64, len(keys))
    return TensorTable(forms, column, found.block, found.offset)


def _where(tensor: Tensor, tree: object) -> str:
    """The key path of a tensor in a tree, for an error."""
    return f"state{next((path for path, one in walk(tree) if one is tensor), '')}"


def local_part(tensor: Tensor) -> Tensor:
    """The caller's own part of a tensor, detached, sharing its memory."""
    if not is_dtensor(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local().detach()


def _layout_note(tensor: DTensor, tree: object) -> Mapping[str, object]:
    try:
        return note_layout(tensor)
    except PlanError as error:
        raise CodecRefused(f"{_where(tensor, tree)}: {error}") from error
