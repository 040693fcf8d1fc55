"""Table: the tensors of a state in columns, so that thousands of them are read and checked at once.

Most tensors of a state are alike but for where they lie. What they have in common is a form,
which is told once; of each tensor the table has the number of its form, its block and its offset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from distcore.v1 import ITEMSIZES
from fttransport.memory import contiguous_stride

Column: TypeAlias = NDArray[np.int64]

MAX_NBYTES: Final = 1 << 62
_MAX_NDIM: Final = 64


class Form(NamedTuple):
    """What a tensor is, but for where it lies. `stride` counts elements.

    `flags` is of the manifest. `layout` is None, or for a DTensor the description of its layout
    and the source's rank in it; the rest then describes the source's own part.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    flags: int
    layout: Mapping[str, object] | None

    @property
    def is_row_major(self) -> bool:
        """Whether its elements lie without gaps in the order of their indices."""
        return self.stride == contiguous_stride(self.shape)

    @property
    def span_nbytes(self) -> int:
        """The bytes from its first element to its last."""
        if not prod(self.shape):
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        return (last + 1) * ITEMSIZES[self.dtype]


class Entry(NamedTuple):
    """One tensor: `offset` bytes into block number `block` (-1 without elements); see Form."""

    block: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    flags: int
    layout: Mapping[str, object] | None


class TensorTable(Sequence[Entry]):  # noqa: PLW1641 - layouts have no hash
    """Tensors by number. Immutable; equal where every entry is.

    `form`, `block` and `offset` have an element for each tensor.
    """

    def __init__(self, forms: Iterable[Form], form: Column, block: Column, offset: Column) -> None:
        self.forms = tuple(forms)
        self.form = form
        self.block = block
        self.offset = offset

    def __len__(self) -> int:
        return len(self.form)

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | Sequence[Entry]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        form = self.forms[self.form[number]]
        place = int(self.block[number]), int(self.offset[number])
        return Entry(*place, form.shape, form.stride, form.dtype, form.flags, form.layout)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorTable) and list(self) == list(other)

    @cached_property
    def sizes(self) -> Column:
        """For each form the bytes of an element."""
        return np.array([ITEMSIZES[form.dtype] for form in self.forms], dtype=np.int64)

    @cached_property
    def spans(self) -> Column:
        """For each form the bytes from its first element to its last."""
        return np.array([form.span_nbytes for form in self.forms], dtype=np.int64)

    @cached_property
    def row_major(self) -> NDArray[np.bool_]:
        """For each form whether it is row-major."""
        return np.array([form.is_row_major for form in self.forms], dtype=np.bool_)

    def numbers(self, data: object) -> list[int]:
        """A list of numbers of tensors that came from outside; ValueError where one has none."""
        column = _column(data)
        wrong = column[(column < 0) | (column >= len(self))]
        if len(wrong):
            raise ValueError(f"there is no tensor number {wrong[0]}")
        return list(column.tolist())

    def to_json(self) -> dict[str, object]:
        """The table as JSON data."""
        return {
            "forms": [
                [f.dtype, f.shape, None if f.is_row_major else f.stride, f.flags, f.layout]
                for f in self.forms
            ],
            "form": self.form.tolist(),
            "block": self.block.tolist(),
            "offset": self.offset.tolist(),
        }

    @classmethod
    def from_json(cls, data: Any, blocks: Sequence[int]) -> TensorTable:
        """The table of data from outside, over blocks of so many bytes.

        KeyError, TypeError or ValueError where they describe no possible tensors. What is
        accepted lies within its blocks, on multiples of its element's size.
        """
        table = cls(
            [_form(row) for row in _list(data["forms"])],
            _column(data["form"]),
            _column(data["block"]),
            _column(data["offset"]),
        )
        if not len(table.form) == len(table.block) == len(table.offset):
            raise ValueError("the columns differ in length")
        if np.any((table.form < 0) | (table.form >= len(table.forms))):
            raise ValueError(f"the number of a form is not below {len(table.forms)}")
        if np.any(table.offset < 0):
            raise ValueError("an offset is negative")
        _check_places(table, np.array(blocks, dtype=np.int64))
        return table


def _check_places(table: TensorTable, nbytes: Column) -> None:
    spans = table.spans[table.form] if len(table) else table.form
    empty = spans == 0
    if np.any(table.block[empty] != -1):
        raise ValueError("a tensor without bytes lies in a block")
    block, offset, form = table.block[~empty], table.offset[~empty], table.form[~empty]
    if np.any((block < 0) | (block >= len(nbytes))):
        raise ValueError(f"the number of a block is not below {len(nbytes)}")
    if not len(form):
        return
    # Subtracted, not added: the sum might not fit.
    outside = (offset > nbytes[block] - spans[~empty]) | (offset % table.sizes[form] != 0)
    if np.any(outside):
        shape = table.forms[form[outside][0]].shape
        raise ValueError(f"a tensor of shape {shape} does not lie in its block")


def _form(row: Any) -> Form:
    dtype, raw_shape, raw_stride, flags, layout = row
    shape = naturals(raw_shape)
    stride = contiguous_stride(shape) if raw_stride is None else naturals(raw_stride)
    if len(stride) != len(shape) or len(shape) > _MAX_NDIM or dtype not in ITEMSIZES:
        raise ValueError(f"dtype {dtype!r}, shape {shape} with strides {stride}")
    if layout is not None and not isinstance(layout, dict):
        raise TypeError("a layout is not an object")
    form = Form(dtype, shape, stride, natural(flags), layout)
    if max(prod(shape), form.span_nbytes) > MAX_NBYTES:
        raise ValueError(f"shape {shape} with strides {stride} is too large")
    return form


def _list(data: object) -> list[Any]:
    if not isinstance(data, list):
        raise TypeError(f"expected a list, got {type(data).__name__}")
    return data


def _column(data: object) -> Column:
    if not set(map(type, _list(data))) <= {int}:
        raise TypeError("a column has something else than whole numbers")
    try:
        return np.array(data, dtype=np.int64)
    except OverflowError as error:
        raise ValueError("a column has a number that is too large") from error


def naturals(data: object) -> tuple[int, ...]:
    """Numbers from 0 to MAX_NBYTES that came from outside; TypeError or ValueError for others."""
    return tuple(map(natural, _list(data)))


def natural(value: object, low: int = 0) -> int:
    """A number from `low` to MAX_NBYTES that came from outside; ValueError for another."""
    if type(value) is not int or not low <= value <= MAX_NBYTES:
        raise ValueError(f"{value!r} is not a number from {low}")
    return value
