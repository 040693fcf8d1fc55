"""Values: entries of a state that are no tensors, read as data and written as data.

Numbers, strings, bytes, None, and lists, tuples, dicts and sets of them, tensors among them.
What an object of any other class was is kept as an inert `Record` with its name and state.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Final

import torch

from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.formats.archive import Archive
from ckptx.formats.pickled import Global, Persistent, Record, parse
from ckptx.formats.structure import TensorRecord, tensor_record
from ckptx.stored import StoredValue
from distcore.v1 import itemsize
from distcore.v1.runtime import torch_dtype

_TAG: Final = "__ckptx__"
_ARCHIVE: Final = b"PK\x03\x04"


def read_value(stored: StoredValue, reader: FileReader) -> object:
    """The value of an entry; FormatError where its bytes are damaged. Nothing is executed."""
    return value_of(stored, value_bytes(stored, reader))


def value_bytes(stored: StoredValue, reader: FileReader) -> bytes:
    """The bytes of an entry as they are stored."""
    if stored.form == "json":
        return stored.text.encode()
    size = reader.size(stored.file)
    if stored.offset + stored.nbytes > size:
        text = f"its item ends at byte {stored.offset + stored.nbytes}, the file at {size}"
        raise FormatError(text, file=stored.file, offset=stored.offset)
    return reader.read(stored.file, stored.offset, stored.nbytes)


def value_of(stored: StoredValue, data: bytes) -> object:
    """The value that the bytes of an entry are; FormatError where they are damaged."""
    if stored.form == "json":
        return from_json(data.decode(), stored.file)
    if not data.startswith(_ARCHIVE):
        # What torch saved before it wrote archives, or bytes of another kind.
        return _plain(parse(data, file=stored.file, offset=stored.offset), _no_tensor)
    memory = _Memory(data)
    try:
        archive = Archive.read(memory, stored.file, 0, len(data))
        found = parse(archive.contents(memory, "data.pkl"), file=stored.file)
        return _plain(found, lambda record: _tensor(record, archive, memory))
    except ValueError as error:
        text = f"a value is damaged: {error}"
        raise FormatError(text, file=stored.file, offset=stored.offset) from error


class _Memory:
    """Bytes in memory, read as a file is."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """A range of the bytes."""
        return self._data[offset : offset + nbytes]


def foreign_names(value: object) -> list[str]:
    """The classes and functions that a value would need, and that are not there."""
    if isinstance(value, Record):
        return [value.name]
    if isinstance(value, Global):
        return [str(value)]
    if isinstance(value, Mapping):
        return [name for item in value.items() for part in item for name in foreign_names(part)]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [name for part in value for name in foreign_names(part)]
    return []


def _plain(value: object, tensor: Callable[[TensorRecord], object]) -> object:
    """The value with what can be made of its records; tensors as `tensor` reads them."""
    if isinstance(value, Record):
        data = _buffer(value)
        if data is not None:
            return data
        found = tensor_record(value)
        return value if found is None else tensor(found)
    if isinstance(value, dict):
        return {_plain(key, tensor): _plain(item, tensor) for key, item in value.items()}
    if type(value) in {list, tuple}:
        parts = [_plain(part, tensor) for part in value]  # type: ignore[attr-defined]
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Global) and value.module == "torch":
        named = getattr(torch, value.name, None)
        return named if isinstance(named, torch.dtype) else value
    if isinstance(value, Persistent):
        raise ValueError("a storage without a tensor")
    return value


def _buffer(record: Record) -> object | None:
    """What a buffer of bytes holds, as Megatron-Core stores its objects: an archive, or bytes."""
    state = record.state
    if record.name != "_io.BytesIO" or not isinstance(state, tuple) or not state:
        return None
    data = state[0]
    if not isinstance(data, bytes) or not data.startswith(_ARCHIVE):
        return data if isinstance(data, bytes) else None
    return value_of(StoredValue("a buffer", 0, len(data), "torch"), data)


def _no_tensor(record: TensorRecord) -> object:
    raise ValueError(f"a tensor {record} without its bytes")


def _tensor(record: TensorRecord, archive: Archive, memory: _Memory) -> torch.Tensor:
    data = bytearray(archive.contents(memory, f"data/{record.storage}"))
    dtype = torch_dtype(record.dtype)
    if not all(record.shape):
        return torch.empty(record.shape, dtype=dtype)
    steps = zip(record.strides, record.shape, strict=True)
    last = record.begin + sum(step * (size - 1) for step, size in steps)
    if (last + 1) * itemsize(record.dtype) > len(data):
        raise FormatError("a tensor leads out of its storage", file=archive.file)
    flat = torch.frombuffer(data, dtype=torch.uint8)
    flat = flat[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
    return flat.as_strided(record.shape, record.strides, record.begin).clone()


def plain(value: object) -> object:
    """The value as it can be written: of Python's plain types all through, and dtypes.

    Numbers of numpy and of enumerations become plain ones. TypeError names the type of anything
    that cannot be written.
    """
    if value is None or type(value) in {bool, int, float, str, bytes}:
        return value
    if isinstance(value, Mapping):
        return {plain(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, set, frozenset)):
        parts = [plain(part) for part in value]
        return parts if isinstance(value, list) else type(value)(parts)
    if isinstance(value, tuple):
        return tuple(plain(part) for part in value)
    if isinstance(value, torch.dtype):
        return value
    if type(value).__module__ == "numpy" and not getattr(value, "ndim", 1):
        return plain(value.item())  # type: ignore[attr-defined]
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, (str, bytes)):
        return str.__str__(value) if isinstance(value, str) else bytes(value)
    raise TypeError(f"a {type(value).__name__} is no plain data: {value!r:.80}")


def as_named(value: object) -> object:
    """A plain value in which each dtype is the name that a pickle has for it."""
    if isinstance(value, torch.dtype):
        return Global("torch", str(value).removeprefix("torch."))
    if isinstance(value, dict):
        return {as_named(key): as_named(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value)(as_named(part) for part in value)
    return value


def to_json(value: object) -> str:
    """A plain value as text. TypeError names what cannot be written."""
    return json.dumps(_tagged(value), separators=(",", ":"))


def _tagged(value: object) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_tagged(part) for part in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [_tagged(part) for part in value]}
    if isinstance(value, (set, frozenset)):
        parts = [_tagged(part) for part in sorted(value, key=repr)]
        return {_TAG: type(value).__name__, "of": parts}
    if isinstance(value, bytes):
        return {_TAG: "bytes", "of": value.hex()}
    if isinstance(value, torch.dtype):
        return {_TAG: "dtype", "of": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: _tagged(part) for key, part in value.items()}
        pairs = [[_tagged(key), _tagged(part)] for key, part in value.items()]
        return {_TAG: "dict", "of": pairs}
    raise TypeError(f"a {type(value).__name__} is no plain data: {value!r:.80}")


def from_json(text: str, file: str) -> object:
    """The value that `to_json` wrote; FormatError where it did not."""
    try:
        return _untagged(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(f"a value is damaged: {error}", file=file) from error


def _untagged(value: object) -> object:
    if isinstance(value, list):
        return [_untagged(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: _untagged(part) for key, part in value.items()}
    return _MAKE[value[_TAG]](value["of"])


_MAKE: Final[dict[str, Callable[..., object]]] = {
    "tuple": lambda parts: tuple(map(_untagged, parts)),
    "set": lambda parts: set(map(_untagged, parts)),
    "frozenset": lambda parts: frozenset(map(_untagged, parts)),
    "bytes": bytes.fromhex,
    "dtype": torch_dtype,
    "dict": lambda pairs: {_untagged(key): _untagged(part) for key, part in pairs},
}
