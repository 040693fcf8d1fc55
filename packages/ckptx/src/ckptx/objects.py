"""Objects: values other than shards, told to all ranks as data and never as code.

JSON carries the structure and raw bytes the arrays. Each type that may travel stands in a table
here, with how it is taken apart and put together; everything else is refused by name.
"""

from __future__ import annotations

import argparse
import io
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import torch

from ckptx.errors import CheckpointPlanError
from ckptx.shard_table import gather_bytes
from distcore.v1 import Channel, Problem
from distcore.v1.runtime import dtype_name, run_together, torch_dtype

_LENGTH_NBYTES: Final = 8
_SIMPLE: Final = (type(None), bool, int, float, str)
_TENSORS: Final = (torch.Tensor, torch.nn.Parameter)


def gather_objects(
    objects: Mapping[tuple[Any, ...], Any], channel: Channel, *, timeout_s: float | None = None
) -> dict[tuple[Any, ...], Any]:
    """Return the objects of all ranks by id, by rank, each rank's in its own order. Collective.

    The own objects are returned as they are, those of others as equal copies (tensors on the
    CPU). Raises, on every rank, PeerError where one has an object of a type that does not travel,
    and CheckpointPlanError where two have objects under one id.
    """
    if channel.size == 1:
        return dict(objects)
    data = run_together(
        "describe objects", lambda: encode(dict(objects)), channel, timeout_s=timeout_s
    )
    rows = gather_bytes(data, channel, timeout_s=timeout_s)
    found: dict[tuple[Any, ...], Any] = {}
    problems = []
    for index, row in enumerate(rows):
        known = objects if index == channel.index else decode(row)
        twice = [name for name in known if name in found]
        text = f"Duplicate shard ids: rank {channel.ranks[index]} has it, and one before it"
        problems += [Problem(f"{name}", "duplicate", text) for name in twice]
        found.update(known)
    if problems:
        raise CheckpointPlanError(problems)
    return found


def encode(value: object) -> bytes:
    """A value as bytes; CheckpointPlanError names the place of what does not travel."""
    blobs: list[bytes] = []
    text = json.dumps([_take_apart(value, blobs, ""), [len(blob) for blob in blobs]]).encode()
    return b"".join([len(text).to_bytes(_LENGTH_NBYTES, "little"), text, *blobs])


def decode(data: bytes) -> Any:
    """The value that `encode` was given."""
    at = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES], "little")
    tree, lengths = json.loads(data[_LENGTH_NBYTES:at])
    blobs = []
    for length in lengths:
        blobs.append(data[at : at + length])
        at += length
    return _put_together(tree, blobs)


def _take_apart(value: object, blobs: list[bytes], where: str) -> object:
    kind = type(value)
    if kind in _SIMPLE:
        return value
    if kind is list:
        return [_take_apart(item, blobs, f"{where}[{i}]") for i, item in enumerate(value)]  # type: ignore[var-annotated, arg-type]
    name = _NAMES.get(kind) or ("scalar" if isinstance(value, np.generic) else None)
    if name is None:
        text = f"a {kind.__module__}.{kind.__qualname__} does not travel between ranks"
        raise CheckpointPlanError(Problem(where or "object", "type", text))
    parts, blob = _FORMS[name][0](value)
    if name in {"dict", "ordered", "namespace"}:
        pairs = [
            [_take_apart(key, blobs, where), _take_apart(item, blobs, f"{where}[{key!r}]")]
            for key, item in parts
        ]
        return {"is": name, "of": pairs}
    found: dict[str, object] = {"is": name}
    if blob is not None:
        found["blob"] = len(blobs)
        blobs.append(blob)
    found["of"] = _take_apart(parts, blobs, where)
    return found


def _put_together(tree: Any, blobs: list[bytes]) -> Any:
    if isinstance(tree, list):
        return [_put_together(item, blobs) for item in tree]
    if not isinstance(tree, dict):
        return tree
    parts = _put_together(tree["of"], blobs)
    return _FORMS[tree["is"]][1](parts, blobs[tree["blob"]] if "blob" in tree else b"")


Parts = tuple[list[Any], bytes | None]
Form = tuple[Callable[[Any], Parts], Callable[[list[Any], bytes], Any]]


def _tensor_parts(value: torch.Tensor) -> Parts:
    if value.is_quantized or value.layout is not torch.strided:
        raise CheckpointPlanError(Problem("tensor", "layout", f"a {value.layout} does not travel"))
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return [dtype_name(plain.dtype), list(plain.shape)], flat.numpy().tobytes()


def _tensor_from(parts: list[Any], blob: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(blob), dtype=torch.uint8) if blob else torch.empty(0).byte()
    return flat.view(torch_dtype(parts[0])).view(parts[1])


def _array_parts(value: np.ndarray[Any, Any]) -> Parts:
    if value.dtype.hasobject or value.dtype.names:
        text = f"an array of {value.dtype} does not travel"
        raise CheckpointPlanError(Problem("array", "dtype", text))
    return [value.dtype.str, list(value.shape)], value.tobytes()


def _array_from(parts: list[Any], blob: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(blob), dtype=np.dtype(parts[0])).reshape(parts[1])


def _pairs(value: Mapping[Any, Any]) -> Parts:
    return [[key, item] for key, item in value.items()], None


def _items(value: Any) -> Parts:
    return list(value), None


_FORMS: Final[dict[str, Form]] = {
    "tuple": (_items, lambda parts, _: tuple(parts)),
    "set": (_items, lambda parts, _: set(parts)),
    "frozenset": (_items, lambda parts, _: frozenset(parts)),
    "dict": (_pairs, lambda parts, _: dict(parts)),
    "ordered": (_pairs, lambda parts, _: OrderedDict(parts)),
    "bytes": (lambda v: ([], v), lambda _, blob: blob),
    "bytearray": (lambda v: ([], bytes(v)), lambda _, blob: bytearray(blob)),
    "stream": (lambda v: ([], v.getvalue()), lambda _, blob: io.BytesIO(blob)),
    "complex": (lambda v: ([v.real, v.imag], None), lambda parts, _: complex(*parts)),
    "slice": (lambda v: ([v.start, v.stop, v.step], None), lambda parts, _: slice(*parts)),
    "range": (lambda v: ([v.start, v.stop, v.step], None), lambda parts, _: range(*parts)),
    "size": (_items, lambda parts, _: torch.Size(parts)),
    "dtype": (lambda v: ([dtype_name(v)], None), lambda parts, _: torch_dtype(parts[0])),
    "device": (lambda v: ([str(v)], None), lambda parts, _: torch.device(parts[0])),
    "namespace": (lambda v: _pairs(vars(v)), lambda parts, _: argparse.Namespace(**dict(parts))),
    "path": (lambda v: ([str(v)], None), lambda parts, _: PurePosixPath(parts[0])),
    "tensor": (_tensor_parts, _tensor_from),
    "array": (_array_parts, _array_from),
    "scalar": (lambda v: _array_parts(np.asarray(v)), lambda p, b: _array_from(p, b)[()]),
}
_NAMES: Final[dict[type, str]] = {
    tuple: "tuple",
    set: "set",
    frozenset: "frozenset",
    dict: "dict",
    OrderedDict: "ordered",
    bytes: "bytes",
    bytearray: "bytearray",
    io.BytesIO: "stream",
    complex: "complex",
    slice: "slice",
    range: "range",
    torch.Size: "size",
    torch.dtype: "dtype",
    torch.device: "device",
    argparse.Namespace: "namespace",
    PurePosixPath: "path",
    **dict.fromkeys(_TENSORS, "tensor"),
    np.ndarray: "array",
}
