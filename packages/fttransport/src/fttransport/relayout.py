"""Relayout: a state whose tensors lie otherwise at the source than at the receiver.

Each source rank serves its own parts. A resharder (the role `distcore.v1.resharder`) plans which
Region comes from which of them, and only chunks that have some of it are fetched. Nothing of the
receiver's is written before everything has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from distcore.v1 import Layout, Piece, Plan, PlanError, Region, Resharder, Transfer, providers
from distcore.v1.runtime import is_dtensor, layout_of, torch_dtype
from fttransport.codec import Codec, Paths, walk
from fttransport.digests import Digester
from fttransport.errors import LayoutMismatch
from fttransport.manifest import Manifest
from fttransport.memory import buffer_of, contiguous_stride
from fttransport.placements import source_layout
from fttransport.snapshot import local_part
from fttransport.table import Entry


class ChunkStream:
    """The part of a stream that some chunks make up, each chunk in memory of its own."""

    def __init__(self, manifest: Manifest, chunks: set[int]) -> None:
        self._nbytes = manifest.chunk_nbytes
        self._buffers = {
            chunk: buffer_of(torch.empty(stop - start, dtype=torch.uint8))
            for chunk in sorted(chunks)
            for start, stop in (manifest.chunk(chunk),)
        }

    def part(self, start: int, stop: int) -> list[memoryview]:
        """The buffers that make up bytes `start` to `stop` of the whole stream."""
        found = []
        while start < stop:
            chunk, at = divmod(start, self._nbytes)
            end = min(stop - start + at, self._nbytes)
            found.append(self._buffers[chunk][at:end])
            start += end - at
        return found

    def touch(self, start: int, stop: int) -> None:
        """Do nothing: chunks apart from each other are not read ahead of."""

    def digest(self, manifest: Manifest, chunk: int, digester: Digester) -> str:
        """The digest of a chunk as it is in memory now."""
        return digester.digest(self.part(*manifest.chunk(chunk)))


@dataclass(frozen=True, slots=True)
class Origin:
    """What one rank of the source has: its manifest, its tensors by key path, and its rank."""

    manifest: Manifest
    entries: Mapping[str, Entry]
    rank: int

    @classmethod
    def of(cls, manifest: Manifest, codec: Codec) -> Origin:
        """The origin that a manifest describes; a state without DTensors counts as of rank 0."""
        entries: dict[str, Entry] = {}
        nothing = torch.empty(0)

        def note(numbers: list[Any], paths: Paths) -> Sequence[Tensor]:
            for number, path in zip(manifest.tensors.numbers(numbers), paths(), strict=True):
                entries[path] = manifest.tensors[number]
            return [nothing] * len(numbers)

        codec.decode(manifest.tree, note)
        ranks = {source_layout(e)[1] for e in entries.values() if e.layout is not None} or {0}
        if len(ranks) > 1:
            raise LayoutMismatch(f"one source has parts of several ranks, {sorted(ranks)}")
        return cls(manifest, entries, ranks.pop())


class Relayout:
    """The plan of one receive, and the memory that it goes through.

    LayoutMismatch where no resharder is installed, or where the sources together do not have
    what the target needs; the text names the keys.
    """

    def __init__(self, manifests: list[Manifest], codec: Codec, target: object) -> None:
        origins = [Origin.of(manifest, codec) for manifest in manifests]
        self._origins = {origin.rank: origin for origin in reversed(origins)}
        self._first = origins[0]
        self._codec = codec
        self._targets = dict(walk(target))
        self._rank = _own_rank(self._targets.values())
        self._plan = self._planned()
        self.streams = {
            rank: ChunkStream(origin.manifest, self._chunks(origin))
            for rank, origin in self._origins.items()
        }

    def rank_of(self, manifest: Manifest) -> int | None:
        """The rank whose parts a manifest describes; None where another is used for that rank."""
        for rank, origin in self._origins.items():
            if origin.manifest is manifest:
                return rank
        return None

    def done_marks(self, rank: int) -> bytearray:
        """For each chunk of a rank's stream 1 where it is not needed."""
        origin = self._origins[rank]
        needed = self._chunks(origin)
        return bytearray(c not in needed for c in range(origin.manifest.num_chunks))

    def finish(self) -> object:
        """Bring every Region to its place; give the source's tree with the target's tensors."""
        for transfer in self._plan:
            origin = self._origins[transfer.src]
            entry, piece = self._source(origin, transfer)
            staged = self._staged(origin, entry, piece, transfer.region)
            local = local_part(self._targets[transfer.key])
            with torch.no_grad():
                for here in self._layout(transfer.key).pieces(self._rank):
                    common = here.region.intersect(transfer.region)
                    if common is not None and not common.is_empty:
                        into = local[_slices(common, here.region, here.place)]
                        into.copy_(staged[_slices(common, transfer.region)])

        return self._codec.decode(
            self._first.manifest.tree,
            lambda numbers, paths: [self._targets[path] for path in paths()],
        )

    def _planned(self) -> Plan:
        found = providers("resharder")
        if not found:
            raise LayoutMismatch("no resharder is installed; run: pip install reshard")
        missing = sorted(set(self._first.entries) - set(self._targets))
        if missing:
            raise LayoutMismatch(f"this side has no tensor for {missing[:10]}")
        resharder = cast("Callable[[], Resharder]", next(iter(found.values())).load())()
        try:
            sources = {path: self._sources(path) for path in self._first.entries}
            wanted = {path: self._layout(path) for path in self._first.entries}
            mine = {
                path: Layout(
                    shape=layout.shape,
                    dtype=layout.dtype,
                    pieces={self._rank: layout.pieces(self._rank)},
                )
                for path, layout in wanted.items()
            }
            return resharder.plan(sources, mine)
        except PlanError as error:
            raise LayoutMismatch(f"nothing was written: {error}") from error

    def _sources(self, path: str) -> Layout:
        """Which of the ranks that are served hold which Regions of a tensor."""
        first = self._first.entries[path]
        held: dict[int, tuple[Piece, ...]] = {}
        for rank, origin in self._origins.items():
            entry = origin.entries.get(path)
            if entry is None:
                continue
            if entry.stride != contiguous_stride(entry.shape):
                raise LayoutMismatch(f"state{path}: the source's part is not contiguous")
            held[rank] = _whole_of(entry).pieces(rank) if entry.layout else _all_of(entry)
        return Layout(shape=_whole_of(first).shape, dtype=first.dtype, pieces=held)

    def _layout(self, path: str) -> Layout:
        target = self._targets[path]
        return layout_of(target, ranks=(self._rank,))

    def _source(self, origin: Origin, transfer: Transfer) -> tuple[Entry, Piece]:
        """The entry of a rank, and the piece of it that has the Region of a transfer."""
        entry = origin.entries[transfer.key]
        pieces = _whole_of(entry).pieces(origin.rank) if entry.layout else _all_of(entry)
        for piece in pieces:
            if piece.region.intersect(transfer.region) == transfer.region:
                return entry, piece
        raise LayoutMismatch(f"state{transfer.key}: no piece of rank {origin.rank} has a Region")

    def _chunks(self, origin: Origin) -> set[int]:
        """The chunks of a rank's stream that have something of what is needed."""
        size = origin.manifest.chunk_nbytes
        needed: set[int] = set()
        for transfer in self._plan:
            if transfer.src == origin.rank:
                entry, piece = self._source(origin, transfer)
                for start, stop in _runs(origin.manifest, entry, piece, transfer.region):
                    needed.update(range(start // size, -(-stop // size)))
        return needed

    def _staged(self, origin: Origin, entry: Entry, piece: Piece, region: Region) -> Tensor:
        """A Region of a rank's part as a tensor of its own."""
        made = torch.empty(region.shape, dtype=torch_dtype(entry.dtype))
        if made.numel():
            flat = buffer_of(made.flatten().view(torch.uint8))
            at = 0
            for start, stop in _runs(origin.manifest, entry, piece, region):
                for part in self.streams[origin.rank].part(start, stop):
                    flat[at : at + len(part)] = part
                    at += len(part)
        return made


def _whole_of(entry: Entry) -> Layout:
    """The layout of an entry; a plain tensor is whole on rank 0."""
    if entry.layout is not None:
        return source_layout(entry)[0]
    return Layout.replicated(shape=entry.shape, dtype=entry.dtype, ranks=[0])


def _all_of(entry: Entry) -> tuple[Piece, ...]:
    return (Piece(Region.of_shape(entry.shape), (0,) * len(entry.shape)),)


def _runs(
    manifest: Manifest, entry: Entry, piece: Piece, region: Region
) -> Iterator[tuple[int, int]]:
    """Where in the stream the rows of a Region of a part lie, in row-major order."""
    if entry.block < 0 or region.is_empty:
        return
    size = torch_dtype(entry.dtype).itemsize
    base = manifest.starts[entry.block] + entry.offset
    box = [
        (place + low - origin, place + high - origin)
        for place, low, high, origin in zip(
            piece.place, region.start, region.stop, piece.region.start, strict=True
        )
    ]
    # Dims that are taken whole, from the last on, lie in one run with the one before them.
    inner = len(box)
    while inner and box[inner - 1] == (0, entry.shape[inner - 1]):
        inner -= 1
    outer = max(0, inner - 1)
    first = sum(low * s for (low, _), s in zip(box[outer:], entry.stride[outer:], strict=True))
    count = 1
    for low, high in box[outer:]:
        count *= high - low
    for index in product(*(range(low, high) for low, high in box[:outer])):
        at = first + sum(i * s for i, s in zip(index, entry.stride, strict=False))
        yield base + at * size, base + (at + count) * size


def _slices(common: Region, within: Region, place: tuple[int, ...] | None = None) -> Any:
    """Where a Region lies in the tensor of a larger one, which begins at `place`."""
    shift = place or (0,) * common.ndim
    return tuple(
        slice(low - origin + p, high - origin + p)
        for low, high, origin, p in zip(common.start, common.stop, within.start, shift, strict=True)
    )


def _own_rank(targets: Any) -> int:
    """The receiver's rank in its own meshes; 0 where it has plain tensors only."""
    for target in targets:
        if is_dtensor(target):
            return int(target.device_mesh.get_rank())
    return 0
