"""Codec: how a value becomes bytes for the peers, and a value again.

The safe codec writes the structure as JSON and the bytes of tensors and arrays behind it. It runs
no code that comes from a peer, whatever the bytes are, and equal values have equal digests on all
ranks. A view is sent as what it shows, without the rest of its storage.
"""

from __future__ import annotations

import io
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from distcore.v1.errors import PlanError, Problem
from distcore.v1.runtime.layouts import dtype_name, torch_dtype

# A scalar is itself, a list is a JSON array, and anything else an object with one tag.
Tree: TypeAlias = Any
Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_HEADER: Final = Struct("<4sI")
_MAGIC: Final = b"dcv1"  # the last character is the number of the form
ALIGNMENT: Final = 16
_SCALARS: Final = frozenset({bool, int, float, str, type(None)})
_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", torch.Size: "shape"}
_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "ordered"}
_SETS: Final[dict[type, str]] = {set: "set", frozenset: "frozenset"}
_BYTES: Final[dict[type, str]] = {bytes: "bytes", bytearray: "bytearray"}
_MANY: Final = 64  # numbers in a list, from where on bytes are quicker than digits
_NUMERIC: Final = "biufc"


@dataclass(frozen=True, slots=True)
class Codec:
    """A way to write values as bytes. `encode` raises PlanError for what it cannot write."""

    name: str
    encode: Callable[[object], bytearray]
    decode: Callable[[memoryview], Any]


def codec_named(name: str) -> Codec:
    """The codec `"safe"` or `"pickle"`; PlanError for any other name."""
    if name not in _CODECS:
        text = f"expected one of {sorted(_CODECS)}, got {name!r}"
        raise PlanError(Problem("codec", "unknown", text))
    return _CODECS[name]


def encode(value: object) -> bytearray:
    """Write a value with the safe codec.

    It takes None, bool, int, float, complex, str, bytes, bytearray, list, tuple, dict,
    OrderedDict, set, frozenset, torch.Size, torch.dtype, torch.device, dense tensors and
    parameters of every dtype and device, and numeric numpy scalars and arrays, nested at will.
    Raises PlanError that names the place of anything else.
    """
    writer = _Writer()
    structure = _text(writer.tree, value)
    form = bytearray(_HEADER.pack(_MAGIC, len(structure)))
    form += structure
    form += bytes(-len(form) % ALIGNMENT)
    for buffer in writer.buffers:
        form += buffer.data
        form += bytes(-len(form) % ALIGNMENT)
    return form


def decode(data: memoryview) -> Any:
    """Read what `encode` wrote; tensors are on the CPU and own their memory.

    ValueError where the bytes are none of its.
    """
    if len(data) < _HEADER.size or bytes(data[: len(_MAGIC)]) != _MAGIC:
        raise ValueError(f"the bytes are of no value: they begin with {bytes(data[:8])!r}")
    _, nbytes = _HEADER.unpack_from(data)
    end = _HEADER.size + nbytes
    tree = json.loads(bytes(data[_HEADER.size : end]))
    return _Reader(data, end + -end % ALIGNMENT).value(tree)


def digest(value: object) -> bytes:
    """Sixteen bytes that are equal for equal values on all ranks; zeros where none can be made.

    A mapping counts without its order, as it does in Python's comparison.
    """
    try:
        structure = _text(_Writer(hashing=True).tree, value)
    except PlanError:
        return bytes(16)
    return xxh3_128_digest(structure)


def is_plain(value: object) -> bool:
    """Whether a value is a scalar or a list of scalars, of Python's own types."""
    if type(value) is list:
        return _SCALARS.issuperset(map(type, value))
    return type(value) in _SCALARS


@dataclass(slots=True)
class _Writer:
    """Turns a value into a JSON tree, in which a buffer is its place behind the tree.

    For a digest a buffer is its own digest, and the order of a mapping does not count.
    """

    hashing: bool = False
    buffers: list[Bytes] = field(default_factory=list)
    end: int = 0

    def tree(self, value: Any, where: str) -> Tree:
        """The tree of a value; `where` names its place in an error."""
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind is list:
            return self._items(value, where)
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._items(value, where)}
        if kind in _MAPPINGS:
            return {_MAPPINGS[kind]: self._pairs(value, where)}
        if kind in _SETS:
            trees = [self.tree(item, f"an item of {where}") for item in value]
            return {_SETS[kind]: sorted(trees, key=json.dumps)}
        return self._leaf(value, where)

    def _leaf(self, value: Any, where: str) -> Tree:
        kind = type(value)
        if kind in _BYTES:
            return {_BYTES[kind]: self._buffer(np.frombuffer(value, dtype=np.uint8))}
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value, where)
        if kind is complex:
            return {"complex": [value.real, value.imag]}
        if kind is torch.dtype:
            return {"dtype": dtype_name(value)}
        if kind is torch.device:
            return {"device": str(value)}
        if isinstance(value, np.generic) and value.dtype.kind in _NUMERIC:
            return {"number": [self._array(np.asarray(value)), value.dtype.str]}
        if kind is np.ndarray and value.dtype.kind in _NUMERIC:
            return {"array": [self._array(value), value.dtype.str, list(value.shape)]}
        raise _refused(where, f"a {kind.__module__}.{kind.__qualname__} cannot be sent safely")

    def _items(self, values: Iterable[Any], where: str) -> list[Tree]:
        if not isinstance(values, list):
            values = list(values)
        kinds = set(map(type, values))
        if kinds <= _SCALARS:  # the common case, at C speed
            return self._numbers(values, kinds) if len(values) >= _MANY else values
        return [self.tree(value, f"{where}[{at}]") for at, value in enumerate(values)]

    def _numbers(self, values: list[Any], kinds: set[type]) -> Tree:
        """Many numbers of one type as bytes, which takes a tenth of the time of digits."""
        for code in "iq" if kinds == {int} else "d" if kinds == {float} else "":
            try:
                numbers = array(code, values)
            except OverflowError:
                continue
            return {"numbers": [self._buffer(np.frombuffer(numbers, dtype=np.uint8)), code]}
        return values

    def _pairs(self, value: dict[Any, Any], where: str) -> list[Tree]:
        pairs = [
            [self.tree(key, f"a key of {where}"), self.tree(item, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return sorted(pairs, key=lambda pair: json.dumps(pair[0])) if self.hashing else pairs

    def _tensor(self, value: torch.Tensor, where: str) -> Tree:
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            kind = f"{value.layout}, device {value.device}"
            raise _refused(where, f"a tensor that is not dense cannot be sent safely ({kind})")
        held = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        flat = held.reshape(-1).view(torch.uint8) if held.numel() else torch.empty(0).byte()
        at = self._buffer(flat.numpy())
        form = [at, dtype_name(value.dtype), list(value.shape)]
        if type(value) is torch.nn.Parameter:
            return {"parameter": [*form, value.requires_grad]}
        return {"tensor": form}

    def _array(self, value: np.ndarray[Any, Any]) -> Tree:
        return self._buffer(np.ascontiguousarray(value).reshape(-1).view(np.uint8))

    def _buffer(self, buffer: Bytes) -> Tree:
        if self.hashing:
            return xxh3_128_hexdigest(buffer.data)
        at = [self.end, len(buffer)]
        self.buffers.append(buffer)
        self.end += len(buffer) + -len(buffer) % ALIGNMENT
        return at


@dataclass(frozen=True, slots=True)
class _Reader:
    """Turns a tree back into the value; the buffers begin at `start` in `data`."""

    data: memoryview
    start: int

    def value(self, tree: Tree) -> Any:
        """The value of a tree."""
        if isinstance(tree, list):
            return tree if is_plain(tree) else [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, form),) = tree.items()
        if tag in _MAKERS:
            return _MAKERS[tag](self.value(form))
        if tag in _PAIR_MAKERS:
            return _PAIR_MAKERS[tag]((self.value(key), self.value(item)) for key, item in form)
        return self._leaf(tag, form)

    def _leaf(self, tag: str, form: Any) -> Any:
        if tag == "complex":
            return complex(*form)
        if tag == "dtype":
            return torch_dtype(form)
        if tag == "device":
            return torch.device(form)
        if tag in _BYTE_MAKERS:
            return _BYTE_MAKERS[tag](self._bytes(form))
        at, dtype, *rest = form
        if tag == "numbers":
            return array(dtype, self._bytes(at).tobytes()).tolist()
        if tag == "number":
            return self._array(at, dtype)[0]
        if tag == "array":
            return self._array(at, dtype).reshape(rest[0]).copy()
        tensor = torch.empty(rest[0], dtype=torch_dtype(dtype))
        if tensor.numel():
            np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), self._array(at, "|u1"))
        return torch.nn.Parameter(tensor, rest[1]) if tag == "parameter" else tensor

    def _bytes(self, at: list[int]) -> memoryview:
        start = self.start + at[0]
        return self.data[start : start + at[1]]

    def _array(self, at: list[int], dtype: str) -> np.ndarray[Any, Any]:
        return np.frombuffer(self._bytes(at), dtype=dtype)


def _text(tree: Callable[[object, str], Tree], value: object) -> bytes:
    try:
        return json.dumps(tree(value, "value")).encode()
    except RecursionError:
        raise _refused("value", "is nested too deeply, or holds itself") from None
    except ValueError as error:
        if isinstance(error, PlanError):
            raise
        raise _refused("value", f"cannot be written: {error}") from error  # a giant int


def _refused(where: str, text: str) -> PlanError:
    hint = "send plain values and tensors, or choose codec='pickle' on every rank"
    return PlanError(Problem(where, "type", f"{text}; {hint}"))


def _encode_pickled(value: object) -> bytearray:
    file = io.BytesIO()
    try:
        torch.save(value, file)
    except Exception as error:
        raise PlanError(Problem("value", "type", f"cannot be pickled: {error}")) from error
    return bytearray(file.getbuffer())


def _decode_pickled(data: memoryview) -> Any:
    # The caller chose to trust the peers' code with codec="pickle".
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "tuple": tuple,
    "shape": torch.Size,
    "set": set,
    "frozenset": frozenset,
}
_PAIR_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {"dict": dict, "ordered": OrderedDict}
_BYTE_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {"bytes": bytes, "bytearray": bytearray}
_CODECS: Final = {
    "safe": Codec("safe", encode, decode),
    "pickle": Codec("pickle", _encode_pickled, _decode_pickled),
}
