"""Views: the tensors of a table over the memory of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from distcore.v1.runtime import torch_dtype
from fttransport.memory import view_bytes
from fttransport.table import Column, TensorTable


def views_of(
    table: TensorTable, numbers: Iterable[int], blocks: Sequence[Tensor]
) -> dict[int, Tensor]:
    """The tensors of some numbers, plain and without gradient, sharing the memory of the blocks.

    Tensors of one block share their memory's lifetime, and nothing else: a change of one is no
    change of another to autograd.
    """
    wanted = np.unique(np.fromiter(numbers, np.int64))
    found: dict[int, Tensor] = {}
    with torch.no_grad():
        for run in _by_block(table, wanted):
            pieces = _cut(table, run, blocks) if len(run) > 1 else None
            if pieces is None:
                found.update((number, _one(table, number, blocks)) for number in run.tolist())
            else:
                found.update(zip(run.tolist(), pieces, strict=True))
    return found


def _by_block(table: TensorTable, numbers: Column) -> Iterator[Column]:
    """The numbers, those of one block together, by their offsets."""
    if not len(numbers):
        return
    block = table.block[numbers]
    order = np.lexsort((numbers, table.offset[numbers], block))
    ends = np.flatnonzero(np.diff(block[order])) + 1
    yield from np.split(numbers[order], ends)


def _cut(table: TensorTable, run: Column, blocks: Sequence[Tensor]) -> list[Tensor] | None:
    """The tensors of one block in one go; None where they do not lie end to end and alike."""
    form = table.form[run]
    nbytes = table.spans[form]
    offset = table.offset[run]
    dtypes = {table.forms[i].dtype for i in set(form.tolist())}
    end_to_end = np.all(offset[1:] == offset[:-1] + nbytes[:-1])
    if len(dtypes) != 1 or not end_to_end or not np.all(table.row_major[form]):
        return None
    block = blocks[int(table.block[run[0]])]
    start, stop = int(offset[0]), int(offset[-1] + nbytes[-1])
    flat = block[start:stop].view(torch_dtype(dtypes.pop()))
    shapes = [table.forms[i].shape for i in form.tolist()]
    pieces = flat.split((nbytes // table.sizes[form]).tolist())
    # The data of a view is no view: it has a version of its own.
    return [
        piece.data if len(shape) == 1 else piece.view(shape).data
        for piece, shape in zip(pieces, shapes, strict=True)
    ]


def _one(table: TensorTable, number: int, blocks: Sequence[Tensor]) -> Tensor:
    entry = table[number]
    dtype = torch_dtype(entry.dtype)
    if entry.block < 0:
        return torch.empty(entry.shape, dtype=dtype)
    block = blocks[entry.block]
    at = entry.offset + int(block.storage_offset())
    return view_bytes(block, at, dtype, entry.shape, entry.stride)
