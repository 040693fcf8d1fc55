"""Structure: what `data.pkl` of an archive says, and how it is written for one tensor or value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

from ckptx.formats.pickled import Global, Persistent, Record
from ckptx.formats.pickling import Call, pickled
from distcore.v1 import itemsize

STORAGES: Final = MappingProxyType(
    {
        "BoolStorage": "bool",
        "ByteStorage": "uint8",
        "CharStorage": "int8",
        "ShortStorage": "int16",
        "IntStorage": "int32",
        "LongStorage": "int64",
        "HalfStorage": "float16",
        "BFloat16Storage": "bfloat16",
        "FloatStorage": "float32",
        "DoubleStorage": "float64",
        "ComplexFloatStorage": "complex64",
        "ComplexDoubleStorage": "complex128",
    }
)
"""The storages with a dtype of their own. All other dtypes are written with an untyped one."""

_STORAGE_OF: Final = MappingProxyType({dtype: name for name, dtype in STORAGES.items()})
_REBUILD: Final = "torch._utils._rebuild_tensor_v"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor as an archive describes it: `begin` and `strides` count elements of the storage."""

    storage: str
    dtype: str
    begin: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def order(self) -> tuple[int, ...]:
        """The dims from the slowest to the fastest in memory.

        ValueError where the elements do not lie one after the other in such an order.
        """
        strides = self.strides
        numel = prod(self.shape)
        order = sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))
        step: int = 1
        for dim in reversed(order):
            if self.shape[dim] == 1:
                continue
            if strides[dim] != step and numel:
                raise ValueError(f"strides {strides} for shape {self.shape} leave gaps or overlap")
            step *= self.shape[dim]
        plain = tuple(range(len(strides)))
        kept = [dim for dim in order if self.shape[dim] != 1]
        return plain if kept == sorted(kept) or not numel else tuple(order)


def tensor_record(value: object) -> TensorRecord | None:
    """The tensor that a Record makes, or None where it makes something else.

    ValueError where it makes a tensor in a way that is not known here.
    """
    while isinstance(value, Record) and value.name in {
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
    }:
        value = value.args[0] if isinstance(value.args, tuple) and value.args else None
    if not isinstance(value, Record) or not value.name.startswith(_REBUILD):
        return None
    args = value.args if isinstance(value.args, tuple) else ()
    if len(args) < 6 or not isinstance(args[0], Persistent):
        raise ValueError("a tensor is described in an unknown way")
    storage, begin, shape, strides = args[0].key, args[1], args[2], args[3]
    rest = args[6:]
    if value.name.endswith("v3"):
        dtype, rest = _dtype(rest[0] if rest else None), rest[1:]
    else:
        dtype = None
    if any(rest):
        raise ValueError(f"the tensor has properties that are not read: {rest}")
    name, stored = _storage(storage)
    if not (_are_sizes(shape) and _are_sizes(strides) and isinstance(begin, int) and begin >= 0):
        raise ValueError("the shape or strides of a tensor are no sizes")
    dtype = dtype or stored
    if dtype is None or len(shape) != len(strides):
        raise ValueError("a tensor has no dtype, or too few strides")
    itemsize(dtype)
    return TensorRecord(name, dtype, begin, tuple(shape), tuple(strides))


def _storage(key: object) -> tuple[str, str | None]:
    if not isinstance(key, tuple) or len(key) < 5 or key[0] != "storage":
        raise ValueError("the storage of a tensor is described in an unknown way")
    kind = key[1].name if isinstance(key[1], Global) else ""
    if not isinstance(key[2], str) or (kind not in STORAGES and kind != "UntypedStorage"):
        raise ValueError(f"a storage of kind {kind!r} is not known")
    return key[2], STORAGES.get(kind)


def _dtype(value: object) -> str:
    if isinstance(value, Global) and value.module == "torch":
        return value.name
    raise ValueError(f"{value} is no dtype")


def _are_sizes(values: object) -> bool:
    return isinstance(values, tuple) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def tensor_structure(dtype: str, shape: Sequence[int]) -> bytes:
    """`data.pkl` for a row-major tensor whose bytes are the storage `0`."""
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    hooks = Call(Global("collections", "OrderedDict"), ())
    name = _STORAGE_OF.get(dtype)
    count = prod(shape)
    if name is not None:
        storage = Persistent(("storage", Global("torch", name), "0", "cpu", count))
        args = (storage, 0, tuple(shape), strides, False, hooks)
        return pickled(Call(Global("torch._utils", "_rebuild_tensor_v2"), args))
    kind = Global("torch.storage", "UntypedStorage")
    raw = Persistent(("storage", kind, "0", "cpu", count * itemsize(dtype)))
    args3 = (raw, 0, tuple(shape), strides, False, hooks, Global("torch", dtype))
    return pickled(Call(Global("torch._utils", "_rebuild_tensor_v3"), args3))
