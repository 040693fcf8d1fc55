"""Destination: where a state that is received goes, checked whole before its first byte.

Bytes arrive straight in the receiver's own tensors wherever those lie as the source's do. Other
tensors of the receiver (small ones, and those strided otherwise, on a device, sharing memory
otherwise) get theirs through memory of the destination when all has come. What the receiver does
not have is made new.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from distcore.v1 import PlanError
from distcore.v1.runtime import is_dtensor, torch_dtype
from fttransport.codec import Codec, Paths, walk
from fttransport.collector import collector_paused
from fttransport.errors import LayoutMismatch, TransportError
from fttransport.manifest import PARAMETER, REQUIRES_GRAD, Manifest
from fttransport.memory import Spans, is_dense, new_bytes, storage_bytes, used_span
from fttransport.placements import make_dtensor, why_not_alike
from fttransport.snapshot import PLAIN, local_part
from fttransport.stream import Stream
from fttransport.table import Entry, Form
from fttransport.views import views_of


class Destination:
    """The memory that the stream of a manifest goes to.

    `target` is the tree whose tensors are filled in place, matched by key path, or None. Making a
    destination writes nothing. LayoutMismatch lists every key whose tensor cannot take what the
    source has; `in_place` says whether any of the target's own memory is written while bytes
    arrive.
    """

    def __init__(self, manifest: Manifest, codec: Codec, target: object | None = None) -> None:
        self.manifest = manifest
        self._codec = codec
        with collector_paused():
            self._prepare(target)

    def _prepare(self, target: object | None) -> None:
        manifest = self.manifest
        self._places = _Places(manifest, self._codec)
        self._own = _own_tensors(self._places, target)
        self._check()
        self._direct = self._direct_blocks()
        self._staged = self._staged_tensors()
        self.in_place = bool(self._direct)
        try:
            blocks = [
                self._direct[i] if i in self._direct else new_bytes(nbytes)
                for i, nbytes in enumerate(manifest.blocks)
            ]
        except (RuntimeError, MemoryError) as error:
            text = f"no memory for the {manifest.nbytes} bytes that the source announces"
            raise TransportError(text) from error
        self.stream = Stream(blocks)

    def load_own_bytes(self) -> None:
        """Put what the target's tensors hold now into the memory that stands in for them.

        After this the stream is the receiver's state as it was, as far as it has one.
        """
        raw = self._raw({own.number for own in self._staged})
        _copy_all([raw[own.number] for own in self._staged], [own.local for own in self._staged])

    def finish(self) -> object:
        """Hand over the state: the source's tree, with the target's own tensors in it.

        Called once, when every byte of the stream has arrived and been verified.
        """
        with collector_paused():
            return self._finish()

    def _finish(self) -> object:
        found: list[Tensor | None] = [None] * len(self._places.numbers)
        for own in self._own:
            found[own.place] = own.tensor
        fresh = {n for n, one in zip(self._places.numbers, found, strict=True) if one is None}
        raw = self._raw(fresh | {own.number for own in self._staged})
        _copy_all([own.local for own in self._staged], [raw[own.number] for own in self._staged])
        self._dress(raw, fresh)
        made = iter(
            raw[number] if one is None else one
            for number, one in zip(self._places.numbers, found, strict=True)
        )
        # A tree is decoded in the same order every time.
        return self._codec.decode(
            self.manifest.tree, lambda numbers, paths: list(islice(made, len(numbers)))
        )

    def _raw(self, numbers: set[int]) -> dict[int, Tensor]:
        return views_of(self.manifest.tensors, numbers, self.stream.blocks)

    def _dress(self, raw: dict[int, Tensor], fresh: set[int]) -> None:
        """Make the tensors of entries that are more than plain bytes what they are."""
        table = self.manifest.tensors
        special = {i for i, form in enumerate(table.forms) if form.flags or form.layout is not None}
        if not special:
            return
        for number, form in enumerate(table.form.tolist()):
            if form in special and number in fresh:
                raw[number] = self._dressed(table[number], raw[number], number)

    def _dressed(self, entry: Entry, raw: Tensor, number: int) -> Tensor:
        made = raw
        if entry.layout is not None:
            made = make_dtensor(entry, raw, self._places.path_of(number))
        needs_grad = bool(entry.flags & REQUIRES_GRAD)
        if entry.flags & PARAMETER:
            return Parameter(made, requires_grad=needs_grad)
        return made.requires_grad_() if needs_grad else made

    def _check(self) -> None:
        problems = []
        table = self.manifest.tensors
        for index, form in enumerate(table.forms):
            try:
                torch_dtype(form.dtype)
            except PlanError as error:
                numbers = np.flatnonzero(table.form == index).tolist()
                problems += [f"state{self._places.path_of(n)}: {error}" for n in numbers[:20]]
        if not problems:
            forms = [(form, torch_dtype(form.dtype)) for form in table.forms]
            column = table.form.tolist()
            for own in self._own:
                form, dtype = forms[column[own.number]]
                if not _fits_plainly(form, dtype, own.tensor):
                    why = _why_unfit(table[own.number], own.tensor, own.local)
                    problems += [] if why is None else [f"state{own.path}: {why}"]
        problems += self._shared_memory()
        if problems:
            raise LayoutMismatch("nothing was written: " + "; ".join(problems[:20]))

    def _shared_memory(self) -> list[str]:
        """Where two of the target's tensors share memory, and the source's do not."""
        locals_ = [own.local for own in self._own]
        spans = Spans.of(locals_)
        _, groups = spans.overlapping()
        problems = []
        for group in groups:
            for one, other in pairwise(group):
                reach = spans.start[one] + spans.nbytes[one]
                if spans.start[other] < reach and not self._overlap_at_source(one, other):
                    paths = f"state{self._own[one].path} and state{self._own[other].path}"
                    problems.append(f"{paths} share memory here, and not at the source")
        return problems

    def _overlap_at_source(self, one: int, other: int) -> bool:
        table = self.manifest.tensors
        first, second = self._own[one].number, self._own[other].number
        begin, end = (table.offset[n] + table.spans[table.form[n]] for n in (first, second))
        return bool(
            table.block[first] == table.block[second]
            and table.offset[first] < end
            and table.offset[second] < begin
        )

    def _direct_blocks(self) -> dict[int, Tensor]:
        """The target's own memory of each block that can arrive there."""
        if not self._own:
            return {}
        table = self.manifest.tensors
        used = np.array(self._places.numbers, dtype=np.int64)
        # A block with a tensor that begins further on has several, which lie elsewhere here.
        several = set(table.block[used[table.offset[used] != 0]].tolist()) | {-1}
        users: dict[int, set[tuple[object, ...]]] = {}
        blocks, forms = table.block.tolist(), table.form.tolist()
        for number in self._places.numbers:
            if blocks[number] not in several:
                form = table.forms[forms[number]]
                users.setdefault(blocks[number], set()).add((form.shape, form.stride))
        found: dict[int, Tensor] = {}
        for own in self._own:
            block = blocks[own.number]
            if block in several or block in found or len(users[block]) != 1:
                continue
            if self._lies_alike(table[own.number], own.local):
                found[block] = storage_bytes(own.local, *used_span(own.local))
        return found

    def _lies_alike(self, entry: Entry, local: Tensor) -> bool:
        start, stop = used_span(local)
        return (
            local.device.type == "cpu"
            and entry.offset == 0
            and stop - start == self.manifest.blocks[entry.block]
            and _same_order(entry, local)
            and is_dense(entry.shape, entry.stride)
            and not (local.is_conj() or local.is_neg())
        )

    def _staged_tensors(self) -> list[_Own]:
        """The target's tensors whose bytes do not arrive in themselves."""
        blocks = self.manifest.tensors.block.tolist()
        return [
            own
            for own in self._own
            if (block := blocks[own.number]) >= 0
            and (block not in self._direct or not self._is_direct(own, self._direct[block]))
        ]

    def _is_direct(self, own: _Own, direct: Tensor) -> bool:
        """Whether bytes that arrive in a block are those of the target's tensor."""
        if direct.data_ptr() != own.local.data_ptr():
            return False
        return _same_order(self.manifest.tensors[own.number], own.local)


class _Places:
    """The places of a tree at which tensors stand, in order, and which tensor stands at each.

    IntegrityError where the tree or a number in it is impossible.
    """

    def __init__(self, manifest: Manifest, codec: Codec) -> None:
        self.numbers: list[int] = []
        self._paths: list[Paths] = []
        table = manifest.tensors
        nothing = torch.empty(0)

        def note(numbers: list[Any], paths: Paths) -> Sequence[Tensor]:
            self.numbers += table.numbers(numbers)
            self._paths.append(paths)
            return [nothing] * len(numbers)

        codec.decode(manifest.tree, note)

    def paths(self) -> list[str]:
        """The key path of each place."""
        return [path for paths in self._paths for path in paths()]

    def path_of(self, number: int) -> str:
        """The first place of a tensor; empty where it has none."""
        return dict(zip(reversed(self.numbers), reversed(self.paths()), strict=True)).get(
            number, ""
        )


class _Own(NamedTuple):
    """A tensor of the target that stands at a place of the source's tree; `local` is its part."""

    place: int
    number: int
    path: str
    tensor: Tensor
    local: Tensor


def _own_tensors(places: _Places, target: object | None) -> list[_Own]:
    targets = {} if target is None else dict(walk(target))
    if not targets:
        return []
    found = []
    for place, (number, path) in enumerate(zip(places.numbers, places.paths(), strict=True)):
        tensor = targets.get(path)
        if tensor is not None:
            local = tensor if type(tensor) in PLAIN else local_part(tensor)
            found.append(_Own(place, number, path, tensor, local))
    return found


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


def _fits_plainly(form: Form, dtype: torch.dtype, target: Tensor) -> bool:
    """Whether a plain tensor can take a plain entry; where not, the reason is found elsewhere."""
    return (
        type(target) in PLAIN
        and form.layout is None
        and target.dtype is dtype
        and target.shape == form.shape
        and target.is_contiguous()
        and not target.is_meta
    )


def _why_unfit(entry: Entry, target: Tensor, local: Tensor) -> str | None:
    """Why a tensor of the receiver cannot take an entry; None where it can."""
    dtype = str(target.dtype).removeprefix("torch.")
    if dtype != entry.dtype:
        return f"the source has dtype {entry.dtype}, this side {dtype}"
    # Of DTensors the parts are compared by what they are parts of, before their shapes.
    why = why_not_alike(entry, target)
    if why is not None:
        return why
    if local.device.type == "meta":
        return "this side's tensor is on the meta device and has no memory"
    if is_dtensor(target) and target.device_mesh.get_coordinate() is None:
        return "this rank is not in the mesh of its DTensor"
    if tuple(local.shape) != entry.shape:
        return f"the source has shape {entry.shape}, this side {tuple(local.shape)}"
    if any(s == 0 and n > 1 for n, s in zip(local.shape, local.stride(), strict=True)):
        return "this side's tensor is expanded: several elements share one place"
    return None


def _same_order(entry: Entry, local: Tensor) -> bool:
    """Whether elements follow each other alike (a dim of length 1 may have any stride)."""
    if entry.stride == tuple(local.stride()):
        return True
    return all(
        n == 1 or one == other
        for n, one, other in zip(entry.shape, entry.stride, local.stride(), strict=True)
    )
