"""Destination: where a state that is received goes, checked whole before its first byte.

Bytes arrive straight in the receiver's own tensors wherever those lie as the source's do. Other
tensors of the receiver (strided otherwise, on a device, sharing memory otherwise) get theirs
through memory of the destination when all has come. What the receiver does not have is made new.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from distcore.v1 import PlanError
from distcore.v1.runtime import is_dtensor, torch_dtype
from fttransport.codec import Codec, walk
from fttransport.collector import collector_paused
from fttransport.errors import IntegrityError, LayoutMismatch, TransportError
from fttransport.manifest import PARAMETER, REQUIRES_GRAD, Entry, Manifest
from fttransport.memory import is_dense, storage_bytes, used_span, view_bytes
from fttransport.placements import make_dtensor, why_not_alike
from fttransport.snapshot import local_part
from fttransport.stream import Stream


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
        self._targets = {} if target is None else dict(walk(target))
        self._paths = self._paths_of_tensors()
        self._pairs = [(number, path) for number, paths in self._paths.items() for path in paths]
        self._locals = {
            path: local_part(self._targets[path])
            for _, path in self._pairs
            if path in self._targets
        }
        self._check()
        direct = self._direct_blocks()
        self.in_place = bool(direct)
        self._direct = direct
        try:
            blocks = [
                direct[i] if i in direct else torch.empty(nbytes, dtype=torch.uint8)
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
        for number, path in self._pairs:
            local = self._locals.get(path)
            block = self.manifest.tensors[number].block
            if local is not None and block >= 0 and block not in self._direct:
                self._raw(number).copy_(local)

    def finish(self) -> object:
        """Hand over the state: the source's tree, with the target's own tensors in it.

        Called once, when every byte of the stream has arrived and been verified.
        """
        with collector_paused():
            return self._finish()

    def _finish(self) -> object:
        made: dict[int, Tensor] = {}
        with torch.no_grad():
            for number, path in self._pairs:
                local = self._locals.get(path)
                if local is not None and not self._is_direct(number, local):
                    local.copy_(self._raw(number))

        def tensor(number: int, path: str) -> Tensor:
            target = self._targets.get(path)
            if target is not None:
                return target
            if number not in made:
                made[number] = self._fresh(number, path)
            return made[number]

        return self._codec.decode(self.manifest.tree, tensor)

    def _paths_of_tensors(self) -> dict[int, list[str]]:
        """For each tensor the key paths at which it stands."""
        found: dict[int, list[str]] = {}
        nothing = torch.empty(0)

        def note(number: int, path: str) -> Tensor:
            if type(number) is not int or not 0 <= number < len(self.manifest.tensors):
                raise IntegrityError(f"state{path}: there is no tensor number {number!r}")
            found.setdefault(number, []).append(path)
            return nothing

        self._codec.decode(self.manifest.tree, note)
        return found

    def _check(self) -> None:
        problems = []
        known: set[str] = set()
        for number, path in self._pairs:
            entry = self.manifest.tensors[number]
            try:
                if entry.dtype not in known:
                    torch_dtype(entry.dtype)
                    known.add(entry.dtype)
            except PlanError as error:
                problems.append(f"state{path}: {error}")
                continue
            target = self._targets.get(path)
            why = None if target is None else _why_unfit(entry, target, self._locals[path])
            if why is not None:
                problems.append(f"state{path}: {why}")
        problems += self._shared_memory()
        if problems:
            raise LayoutMismatch("nothing was written: " + "; ".join(problems[:20]))

    def _shared_memory(self) -> list[str]:
        """Where two of the target's tensors share memory, and the source's do not."""
        spans = []
        for number, path in self._pairs:
            block = self.manifest.tensors[number].block
            local = self._locals.get(path)
            if local is not None and block >= 0:
                start, stop = used_span(local)
                base = local.untyped_storage().data_ptr()
                spans.append((base + start, base + stop, block, path))
        spans.sort()
        return [
            f"state{path} and state{other} share memory here, and not at the source"
            for (_, stop, block, path), (start, _, other_block, other) in pairwise(spans)
            if start < stop and block != other_block
        ]

    def _direct_blocks(self) -> dict[int, Tensor]:
        """The target's own memory of each block that can arrive there."""
        users: dict[int, set[tuple[object, ...]]] = {}
        found: dict[int, Tensor] = {}
        for number in self._paths:
            entry = self.manifest.tensors[number]
            users.setdefault(entry.block, set()).add((entry.offset, entry.shape, entry.stride))
        for number, path in self._pairs:
            entry = self.manifest.tensors[number]
            local = self._locals.get(path)
            if local is None or entry.block in found or entry.block < 0:
                continue
            if len(users[entry.block]) == 1 and self._lies_alike(entry, local):
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

    def _is_direct(self, number: int, local: Tensor) -> bool:
        entry = self.manifest.tensors[number]
        if entry.block < 0:
            return True
        own = self._direct.get(entry.block)
        return own is not None and own.data_ptr() == local.data_ptr() and _same_order(entry, local)

    def _raw(self, number: int) -> Tensor:
        """The tensor of an entry over the stream's memory."""
        entry = self.manifest.tensors[number]
        dtype = torch_dtype(entry.dtype)
        if entry.block < 0:
            return torch.empty(entry.shape, dtype=dtype)
        block = self.stream.blocks[entry.block]
        at = entry.offset + int(block.storage_offset())
        return view_bytes(block, at, dtype, entry.shape, entry.stride)

    def _fresh(self, number: int, path: str) -> Tensor:
        entry = self.manifest.tensors[number]
        raw = self._raw(number)
        made = raw if entry.layout is None else make_dtensor(entry, raw, path)
        needs_grad = bool(entry.flags & REQUIRES_GRAD)
        if entry.flags & PARAMETER:
            return torch.nn.Parameter(made, requires_grad=needs_grad)
        return made.requires_grad_() if needs_grad else made


def _why_unfit(entry: Entry, target: Tensor, local: Tensor) -> str | None:
    """Why a tensor of the receiver cannot take an entry; None where it can."""
    dtype = str(target.dtype).removeprefix("torch.")
    if dtype != entry.dtype:
        return f"the source has dtype {entry.dtype}, this side {dtype}"
    # Of DTensors the parts are compared by what they are parts of, before their shapes.
    why = why_not_alike(entry, target)
    if why is not None:
        return why
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
