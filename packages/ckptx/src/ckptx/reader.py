"""Reading with a plan: boxes of tensors go from files into their places, or into staging."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import torch

from ckptx.errors import CheckpointPlanError
from ckptx.files import FileReader
from ckptx.plan import Read, plan_load
from ckptx.stored import StoredTensor, run_positions, runs
from ckptx.unit import cut_box
from distcore.v1 import Layout, Packing, Piece, Problem, Region
from distcore.v1.runtime import Shard, scratch, torch_dtype

COPY_NBYTES: Final = 8 << 20
"""The staging through which boxes go that do not lie in order in CPU memory."""


def memory_of(flat: torch.Tensor) -> memoryview:
    """The bytes of a flat contiguous uint8 CPU tensor, writable; the tensor must stay alive."""
    nbytes = flat.numel()
    return memoryview((ctypes.c_ubyte * nbytes).from_address(flat.data_ptr())).cast("B")


def staging_for(device_type: str, nbytes: int) -> torch.Tensor:
    """Return flat CPU memory through which bytes come from a device, or go to it."""
    if device_type == "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    return scratch(nbytes)


def read_into_places(
    reads: Iterable[Read],
    places: Mapping[str, Shard],
    files: FileReader,
    *,
    copy_nbytes: int = COPY_NBYTES,
) -> None:
    """Read each box into its place. Ranges that follow each other in a file are read as one.

    A box that lies in order in CPU memory is read straight into it, any other through staging of
    `copy_nbytes` bytes. Raises ReadError or FormatError; the places are incomplete then.
    """
    line = _Line(files)
    staging: torch.Tensor | None = None
    for read in reads:
        place = places[read.key]
        flat = place.box(read.region).flat("cpu")
        if flat is not None:
            for offset, begin, nbytes in _ranges(read):
                line.add(read.chunk.file, offset, flat[begin : begin + nbytes])
            continue
        if staging is None:
            staging = staging_for(place.data.device.type, copy_nbytes)
        _read_by_copy(read, place, files, staging)
    line.read()


def staging_nbytes(reads: Iterable[Read]) -> int:
    """The memory that `read_into_staging` takes for some reads."""
    return Packing.of([read.nbytes for read in reads]).nbytes


def read_into_staging(
    reads: Iterable[Read],
    dtypes: Mapping[str, torch.dtype],
    files: FileReader,
    *,
    memory: torch.Tensor | None = None,
) -> dict[str, Shard]:
    """Read each box whole into staging, and return the boxes as Shards by the reads' keys.

    The staging is `memory` (flat uint8, large enough), or new.
    """
    chosen = tuple(reads)
    packing = Packing.of([read.nbytes for read in chosen])
    staging = scratch(packing.nbytes) if memory is None else memory
    line = _Line(files)
    found = {}
    for number, read in enumerate(chosen):
        flat = staging[packing.slice_of(number)]
        for offset, begin, nbytes in _ranges(read):
            line.add(read.chunk.file, offset, flat[begin : begin + nbytes])
        dense = flat.view(dtypes[read.key]).view(read.chunk.in_file(read.region).shape)
        if read.chunk.order:
            dense = dense.permute(read.chunk.dims_in_file())
        found[read.key] = Shard(dense, (Piece(read.region, (0,) * read.region.ndim),))
    line.read()
    return found


def read_region(key: str, stored: StoredTensor, region: Region, files: FileReader) -> torch.Tensor:
    """Return one box of a stored tensor in new CPU memory."""
    whole = Region.of_shape(stored.shape)
    if region.ndim != whole.ndim or not whole.contains(region):
        raise CheckpointPlanError(Problem(key, "bounds", f"{region} lies outside {whole}"))
    layout = Layout(
        shape=stored.shape,
        dtype=stored.dtype,
        pieces={0: (Piece(region, (0,) * region.ndim),)},
    )
    plan = plan_load({key: layout}, {key: stored}, (0,))
    found = torch.empty(region.shape, dtype=torch_dtype(stored.dtype))
    place = Shard(found, layout.pieces(0))
    read_into_places(plan.reads.get(0, ()), {key: place}, files)
    for step in plan.rounds:
        staged = read_into_staging(step.reads[0], dict.fromkeys(step.keys, found.dtype), files)
        for transfer in step.exchange:
            source = staged[transfer.key].box(transfer.region)
            place.box(transfer.region).copy_from(source)
    return found


def _ranges(read: Read) -> Iterator[tuple[int, int, int]]:
    """The runs of a box: (byte of the file, byte of the dense box as it is stored, bytes)."""
    region, around = read.chunk.in_file(read.region), read.chunk.in_file(read.chunk.region)
    _, length = runs(region, around)
    itemsize = read.nbytes // region.numel
    nbytes = length * itemsize
    for number, at in enumerate(run_positions(region, around)):
        yield read.chunk.offset + at * itemsize, number * nbytes, nbytes


def _read_by_copy(read: Read, place: Shard, files: FileReader, staging: torch.Tensor) -> None:
    itemsize = read.nbytes // read.region.numel
    left = [read.region]
    while left:
        region = left.pop()
        nbytes = region.numel * itemsize
        if nbytes > staging.numel():
            before, behind = cut_box(region, staging.numel() // itemsize, 1)
            left.extend(reversed(before + behind))
            continue
        part = Read(read.key, region, read.chunk, nbytes)
        memory = memory_of(staging[:nbytes])
        for offset, begin, length in _ranges(part):
            files.read_into(read.chunk.file, offset, [memory[begin : begin + length]])
        place.box(region).write_from(staging[:nbytes])


class _Line:
    """Collects ranges as long as each begins in the file where the last one ended."""

    def __init__(self, files: FileReader) -> None:
        self._files = files
        self._file = ""
        self._begin = self._end = 0
        self._targets: list[torch.Tensor] = []

    def add(self, file: str, offset: int, target: torch.Tensor) -> None:
        """Take in a range; what was collected is read first where this one does not follow it."""
        if file != self._file or offset != self._end:
            self.read()
            self._file, self._begin = file, offset
        self._targets.append(target)
        self._end = offset + target.numel()

    def read(self) -> None:
        """Read what was collected."""
        if self._targets:
            memories = [memory_of(target) for target in self._targets]
            self._files.read_into(self._file, self._begin, memories)
        self._targets = []
