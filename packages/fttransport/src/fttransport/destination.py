"""Destination: where a state that is received goes, checked whole before its first byte.

Bytes arrive straight in the receiver's own tensors wherever those lie as the source's do. Other
tensors of the receiver (small ones, and those strided otherwise, on a device, sharing memory
otherwise) get theirs through memory of the destination when all has come. What the receiver does
not have is made new.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, starmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from distcore.v1 import PlanError
from distcore.v1.runtime import is_dtensor, torch_dtype
from fttransport.codec import Codec, Paths, walk
from fttransport.collector import collector_paused
from fttransport.errors import LayoutMismatch, TransportError
from fttransport.manifest import PARAMETER, REQUIRES_GRAD, Manifest
from fttransport.memory import Spans, is_dense, storage_bytes, used_span
from fttransport.placements import make_dtensor, why_not_alike
from fttransport.snapshot import PLAIN, local_part
from fttransport.stream import Stream
from fttransport.table import Column, Entry
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
        self._own = _Own.of(self._places, target)
        self._check()
        self._direct = self._direct_blocks()
        self._staged = self._staged_tensors()
        self.in_place = bool(self._direct)
        try:
            blocks = [
                self._direct[i] if i in self._direct else torch.empty(nbytes, dtype=torch.uint8)
                for i, nbytes in enumerate(manifest.blocks)
            ]
        except (RuntimeError, MemoryError) as error:
            text = f"no memory for the {manifest.nbytes} bytes that the source announces"
            raise TransportError(text) from error
        self.stream = Stream(blocks, new=set(range(len(blocks))) - set(self._direct))

    def load_own_bytes(self) -> None:
        """Put what the target's tensors hold now into the memory that stands in for them.

        After this the stream is the receiver's state as it was, as far as it has one.
        """
        own = self._own
        raw = self._raw({own.numbers[i] for i in self._staged})
        _copy_all(
            [raw[own.numbers[i]] for i in self._staged], [own.locals[i] for i in self._staged]
        )

    def keys_in(self, chunk: int) -> list[str]:
        """The key paths of the tensors that have bytes in a chunk."""
        table, (start, stop) = self.manifest.tensors, self.manifest.chunk(chunk)
        begins = np.array(self.manifest.starts, dtype=np.int64)[table.block] + table.offset
        ends = begins + table.spans[table.form]
        found = np.flatnonzero((table.block >= 0) & (begins < stop) & (ends > start))
        wanted = set(found.tolist())
        places = zip(self._places.numbers, self._places.paths(), strict=True)
        return [path for number, path in places if number in wanted]

    def finish(self) -> object:
        """Hand over the state: the source's tree, with the target's own tensors in it.

        Called once, when every byte of the stream has arrived and been verified.
        """
        with collector_paused():
            return self._finish()

    def _finish(self) -> object:
        own = self._own
        fresh = self._fresh_tensors()
        rest = self._move_bytes()
        raw = self._raw({own.numbers[i] for i in rest})
        _copy_all([own.locals[i] for i in rest], [raw[own.numbers[i]] for i in rest])
        made = iter(
            fresh[number] if one is None else one
            for number, one in zip(self._places.numbers, own.found, strict=True)
        )
        # A tree is decoded in the same order every time.
        return self._codec.decode(
            self.manifest.tree, lambda numbers, paths: list(islice(made, len(numbers)))
        )

    def _fresh_tensors(self) -> dict[int, Tensor]:
        """The tensors that the target does not have."""
        places = zip(self._places.numbers, self._own.found, strict=True)
        fresh = self._raw({number for number, one in places if one is None})
        self._dress(fresh)
        return fresh

    def _move_bytes(self) -> list[int]:
        """Move the bytes of staged tensors that lie alike on both sides; give the other tensors.

        Moved by address, for a tensor made of each one's bytes would cost more than the move.
        """
        table, own = self.manifest.tensors, self._own
        staged = np.array(self._staged, dtype=np.int64)
        numbers = np.array(own.numbers, dtype=np.int64)[staged]
        locals_ = [own.locals[i] for i in self._staged]
        start = np.fromiter(map(Tensor.data_ptr, locals_), np.int64, len(locals_))
        nbytes = table.spans[table.form[numbers]]
        # A tensor may have been given other memory since.
        alike = self._alike(numbers, staged) & (start == own.spans.start[staged])
        base = np.array([block.data_ptr() for block in self.stream.blocks], dtype=np.int64)
        source = (base[table.block[numbers]] + table.offset[numbers])[alike]
        moves = zip(start[alike].tolist(), source.tolist(), nbytes[alike].tolist(), strict=True)
        deque(starmap(ctypes.memmove, moves), maxlen=0)
        return list(staged[~alike].tolist())

    def _alike(self, numbers: Column, staged: Column) -> NDArray[np.bool_]:
        """Which of the staged tensors have their bytes in the same order as their entries."""
        table, own = self.manifest.tensors, self._own
        simple = np.array(["complex" not in form.dtype for form in table.forms], dtype=np.bool_)
        alike: NDArray[np.bool_] = (table.row_major & simple)[table.form[numbers]]
        alike &= np.array(own.spans.contiguous, dtype=np.bool_)[staged]
        alike &= ~np.fromiter(map(Tensor.is_neg, own.locals), np.bool_, len(own.locals))[staged]
        if any(device.type != "cpu" for device in set(own.spans.devices)):
            on_cpu = [device.type == "cpu" for device in own.spans.devices]
            alike &= np.array(on_cpu, dtype=np.bool_)[staged]
        return alike

    def _raw(self, numbers: set[int]) -> dict[int, Tensor]:
        return views_of(self.manifest.tensors, numbers, self.stream.blocks)

    def _dress(self, fresh: dict[int, Tensor]) -> None:
        """Make the tensors of entries that are more than plain bytes what they are."""
        table = self.manifest.tensors
        special = {i for i, form in enumerate(table.forms) if form.flags or form.layout is not None}
        if not special:
            return
        for number, form in enumerate(table.form.tolist()):
            if form in special and number in fresh:
                fresh[number] = self._dressed(table[number], fresh[number], number)

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
        problems += [] if problems else self._misfits()
        problems += self._shared_memory()
        if problems:
            raise LayoutMismatch("nothing was written: " + "; ".join(problems[:20]))

    def _misfits(self) -> list[str]:
        """Which of the target's tensors cannot take their entries, and why."""
        table, own = self.manifest.tensors, self._own
        forms = [table.forms[i] for i in table.form[own.numbers].tolist()]
        dtypes = {form.dtype: torch_dtype(form.dtype) for form in table.forms}
        if (
            set(map(type, own.tensors)) <= PLAIN
            and own.spans.dtypes == [dtypes[form.dtype] for form in forms]
            and [tensor.shape for tensor in own.tensors] == [form.shape for form in forms]
            and not any(form.layout for form in table.forms)
            and all(own.spans.contiguous)
            and not any(device.type == "meta" for device in set(own.spans.devices))
        ):
            # All are plain and alike, as mostly.
            return []
        problems = []
        for number, path, tensor, local in own.rows():
            why = _why_unfit(table[number], tensor, local)
            problems += [] if why is None else [f"state{path}: {why}"]
        return problems

    def _shared_memory(self) -> list[str]:
        """Where two of the target's tensors share memory, and the source's do not."""
        own = self._own
        _, groups = own.spans.overlapping()
        problems = []
        for group in groups:
            for one, other in pairwise(group):
                reach = own.spans.start[one] + own.spans.nbytes[one]
                if own.spans.start[other] < reach and not self._overlap_at_source(one, other):
                    paths = f"state{own.paths[one]} and state{own.paths[other]}"
                    problems.append(f"{paths} share memory here, and not at the source")
        return problems

    def _overlap_at_source(self, one: int, other: int) -> bool:
        table = self.manifest.tensors
        first, second = self._own.numbers[one], self._own.numbers[other]
        begin, end = (table.offset[n] + table.spans[table.form[n]] for n in (first, second))
        return bool(
            table.block[first] == table.block[second]
            and table.offset[first] < end
            and table.offset[second] < begin
        )

    def _direct_blocks(self) -> dict[int, Tensor]:
        """The target's own memory of each block that can arrive there."""
        table, own = self.manifest.tensors, self._own
        if not own.numbers:
            return {}
        used = np.array(self._places.numbers, dtype=np.int64)
        # A block with a tensor that begins further on has several, which lie elsewhere here.
        several = np.union1d(table.block[used[table.offset[used] != 0]], [-1])
        users: dict[int, set[tuple[object, ...]]] = {}
        for number in used[~np.isin(table.block[used], several)].tolist():
            entry = table[number]
            users.setdefault(entry.block, set()).add((entry.shape, entry.stride))
        found: dict[int, Tensor] = {}
        wanted = ~np.isin(table.block[own.numbers], several)
        for index in np.flatnonzero(wanted).tolist():
            entry, local = table[own.numbers[index]], own.locals[index]
            alone = entry.block not in found and len(users[entry.block]) == 1
            if alone and self._lies_alike(entry, local):
                found[entry.block] = storage_bytes(local, *used_span(local))
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

    def _staged_tensors(self) -> list[int]:
        """The indices of the target's tensors whose bytes do not arrive in themselves."""
        table, own = self.manifest.tensors, self._own
        return [
            index
            for index, block in enumerate(table.block[own.numbers].tolist())
            if block >= 0
            and (block not in self._direct or not self._is_direct(index, self._direct[block]))
        ]

    def _is_direct(self, index: int, direct: Tensor) -> bool:
        """Whether bytes that arrive in a block are those of the target's tensor."""
        local = self._own.locals[index]
        if direct.data_ptr() != local.data_ptr():
            return False
        return _same_order(self.manifest.tensors[self._own.numbers[index]], local)


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


@dataclass(frozen=True, slots=True, eq=False)
class _Own:
    """The tensors of the target that stand at places of the source's tree.

    `found` has for each place the target's tensor or None; the others an element for each that
    there is: the number of its entry, its key path, itself, the receiver's own part of it.
    """

    found: list[Tensor | None]
    numbers: list[int]
    paths: list[str]
    tensors: list[Tensor]
    locals: list[Tensor]
    spans: Spans

    @classmethod
    def of(cls, places: _Places, target: object | None) -> _Own:
        targets = {} if target is None else dict(walk(target))
        if not targets:
            return cls([None] * len(places.numbers), [], [], [], [], Spans.of([]))
        paths = places.paths()
        found = list(map(targets.get, paths))
        tensors = [one for one in found if one is not None]
        numbers = places.numbers
        if len(tensors) < len(found):
            there = [index for index, one in enumerate(found) if one is not None]
            numbers = [numbers[index] for index in there]
            paths = [paths[index] for index in there]
        locals_ = tensors
        if not set(map(type, tensors)) <= PLAIN:
            locals_ = [local_part(tensor) for tensor in tensors]
        return cls(found, numbers, paths, tensors, locals_, Spans.of(locals_))

    def rows(self) -> Iterator[tuple[int, str, Tensor, Tensor]]:
        """Number, path, tensor and part of each."""
        return zip(self.numbers, self.paths, self.tensors, self.locals, strict=True)


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)


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
