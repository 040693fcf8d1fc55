"""safetensors: the header of a file, and the index of a directory of them.

A file is 8 bytes (the header's length, little-endian), the header (a JSON object: key -> dtype,
shape and the begin and end of its bytes, counted from the end of the header) and the bytes. A
header is checked whole before anything is believed, so that no offset outside the file and no
shape that does not fit its bytes gets any further. Nothing in a file is ever executed.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.stored import Chunk, StoredTensor
from distcore.v1 import Region, itemsize

LENGTH_NBYTES: Final = 8
MAX_HEADER_NBYTES: Final = 100_000_000
"""The longest header that is read, as in the safetensors library itself."""

MAX_NUMEL: Final = 2**63 - 1

INDEX: Final = "model.safetensors.index.json"
MODEL: Final = "model.safetensors"

DTYPES: Final = MappingProxyType(
    {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2": "float8_e5m2",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F8_E8M0": "float8_e8m0fnu",
        "U16": "uint16",
        "I16": "int16",
        "F16": "float16",
        "BF16": "bfloat16",
        "U32": "uint32",
        "I32": "int32",
        "F32": "float32",
        "U64": "uint64",
        "I64": "int64",
        "F64": "float64",
        "C64": "complex64",
    }
)
"""The dtype words of the format, and the same dtypes as torch names them."""


@dataclass(frozen=True, slots=True)
class Header:
    """The checked header of one file.

    `nbytes` counts what precedes the tensors' bytes, `metadata` is the free text table that a
    file may carry.
    """

    file: str
    nbytes: int
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(reader: FileReader, file: str) -> Header:
    """Read and check the header of a file; FormatError names what is wrong and where."""
    size = reader.size(file)
    if size < LENGTH_NBYTES:
        raise FormatError(f"{size} bytes are too few for a safetensors file", file=file, offset=0)
    length = int.from_bytes(reader.read(file, 0, LENGTH_NBYTES), "little")
    begin = LENGTH_NBYTES + length
    if length > MAX_HEADER_NBYTES or begin > size:
        text = f"the header would have {length} bytes; the file has {size}"
        raise FormatError(text + ", and 100 MB is the limit", file=file, offset=0)
    table = _table(reader.read(file, LENGTH_NBYTES, length), file)
    metadata = _metadata(table.pop("__metadata__", {}), file)
    spans: list[tuple[int, int, str]] = []
    tensors = {}
    for key, entry in table.items():
        tensors[key], span = _tensor(key, entry, file, begin)
        spans.append((*span, key))
    _check_spans(spans, file, begin, size)
    return Header(file, begin, MappingProxyType(tensors), MappingProxyType(metadata))


def _table(raw: bytes, file: str) -> dict[str, object]:
    try:
        table = json.loads(raw.decode(), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        text = f"the header is not JSON: {error}"
        raise FormatError(text, file=file, offset=LENGTH_NBYTES) from error
    if not isinstance(table, dict) or not raw.startswith(b"{"):
        raise FormatError("the header is not a JSON object", file=file, offset=LENGTH_NBYTES)
    return table


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} stands in it twice")
        found[name] = value
    return found


def _no_constant(word: str) -> object:
    raise ValueError(f"{word} is no JSON")


def _metadata(entry: object, file: str) -> dict[str, str]:
    if isinstance(entry, dict) and all(isinstance(text, str) for text in entry.values()):
        return entry
    raise FormatError("__metadata__ is not a table of strings", file=file, offset=LENGTH_NBYTES)


def _tensor(key: str, entry: object, file: str, begin: int) -> tuple[StoredTensor, tuple[int, int]]:
    """The tensor that one entry describes, and the begin and end of its bytes in the file."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError("its entry is not dtype, shape and data_offsets", file=file, key=key)
    word, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    dtype = DTYPES.get(word) if isinstance(word, str) else None
    if dtype is None:
        known = ", ".join(sorted(DTYPES))
        raise FormatError(f"unknown dtype {word!r}; known are {known}", file=file, key=key)
    if not _are_sizes(shape):
        raise FormatError(f"shape {shape!r} is not a list of sizes", file=file, key=key)
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        text = f"data_offsets {offsets!r} are not a begin and an end"
        raise FormatError(text, file=file, key=key)
    first, last = begin + offsets[0], begin + offsets[1]
    nbytes = prod(shape) * itemsize(dtype)
    if last - first != nbytes:
        text = f"{last - first} bytes for shape {shape} of {word}, which takes {nbytes}"
        raise FormatError(text, file=file, key=key, offset=first)
    chunk = Chunk(Region.of_shape(tuple(shape)), file, first)
    return StoredTensor(tuple(shape), dtype, (chunk,)), (first, last)


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value <= MAX_NUMEL for value in values
    )


def _check_spans(spans: list[tuple[int, int, str]], file: str, begin: int, size: int) -> None:
    """Refuse bytes that belong to two tensors, to none, or lie behind the end of the file."""
    end = begin
    for first, last, key in sorted(spans):
        if last > size:
            text = f"its bytes end at {last}, the file at {size}"
            raise FormatError(text, file=file, key=key, offset=first)
        if first < end:
            text = "its bytes overlap those of the tensor before it"
            raise FormatError(text, file=file, key=key, offset=first)
        if first > end:
            text = f"{first - end} bytes before it belong to no tensor"
            raise FormatError(text, file=file, key=key, offset=end)
        end = last
    if end != size:
        raise FormatError(f"the last {size - end} bytes belong to no tensor", file=file, offset=end)


def files_of_directory(directory: str) -> tuple[str | None, str | None]:
    """What a directory offers: (index, None) where it has an index, else (None, single file).

    `model.safetensors.index.json` decides, then `model.safetensors`, then an index or a file that
    is the only one of its kind. Every other file in the directory is left alone.
    """
    names = sorted(os.listdir(directory))
    for name in (INDEX, MODEL):
        if name in names:
            found = os.path.join(directory, name)
            return (found, None) if name == INDEX else (None, found)
    for ending in (".safetensors.index.json", ".safetensors"):
        fitting = [name for name in names if name.endswith(ending)]
        if len(fitting) == 1:
            found = os.path.join(directory, fitting[0])
            return (None, found) if ending == ".safetensors" else (found, None)
        if fitting:
            text = f"no {INDEX} and no {MODEL}, and more than one {ending}: {', '.join(fitting)}"
            raise FormatError(text, file=directory)
    raise FormatError("no safetensors file and no index of them in it", file=directory)


def read_index(reader: FileReader, file: str) -> dict[str, str]:
    """The `weight_map` of an index: key -> path of the file that holds it.

    A name that is absolute, or leads out of the index's own directory, is refused.
    """
    size = reader.size(file)
    if size > MAX_HEADER_NBYTES:
        raise FormatError(f"{size} bytes are too many for an index", file=file)
    try:
        table = json.loads(reader.read(file, 0, size).decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}", file=file) from error
    names = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(names, dict):
        raise FormatError("it has no weight_map", file=file)
    directory = os.path.dirname(file)
    found = {}
    for key, name in names.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+", name) or name in {".", ".."}:
            text = f"{name!r} is not the name of a file beside the index"
            raise FormatError(text, file=file, key=key)
        found[key] = os.path.join(directory, name)
    return found
