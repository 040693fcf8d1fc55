"""dcp: directories that torch's distributed checkpoint writes, one process or many.

`.metadata` (or `__0.metadata`, ... where each rank wrote its own) is a pickle; it is read as data.
It names, for each chunk of each tensor, a range of a `.distcp` file, which is an archive with the
chunk's bytes. So any box of a chunk can be read by itself.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.formats.archive import Archive
from ckptx.formats.contents import Contents
from ckptx.formats.pickled import Global, Record, parse
from ckptx.formats.structure import TensorRecord, tensor_record
from ckptx.stored import Chunk, StoredTensor, StoredValue
from distcore.v1 import PlanError, Region, itemsize

METADATA: Final = ".metadata"
MAX_METADATA_NBYTES: Final = 4 << 30
_OWN_METADATA: Final = re.compile(r"__(\d+)\.metadata")
_MODULE: Final = "torch.distributed.checkpoint.metadata"

Index = tuple[str, tuple[int, ...] | None]


def metadata_files(directory: str) -> list[str]:
    """The metadata of a directory: one for all ranks, or one of each rank.

    There is none where it is no such directory, or where its writer did not come to the end.
    """
    names = sorted(os.listdir(directory))
    if METADATA in names:
        return [os.path.join(directory, METADATA)]
    own = [(int(found[1]), name) for name in names if (found := _OWN_METADATA.fullmatch(name))]
    return [os.path.join(directory, name) for _, name in sorted(own)]


def read_directory(reader: FileReader, directory: str, files: Iterable[str]) -> Contents:
    """Read and check what the metadata files say, and where the bytes of each chunk lie."""
    contents = Contents()
    items: dict[tuple[str, Region], _Item] = {}
    for file in files:
        metadata = _metadata(reader, file)
        places = dict(_places(metadata, file))
        for key, record in _dict(metadata.get("state_dict_metadata"), file).items():
            if not isinstance(key, str) or not isinstance(record, Record):
                raise FormatError(f"entry {key!r} is described in an unknown way", file=file)
            if record.name == f"{_MODULE}.BytesStorageMetadata":
                place = _place(places.get((key, None)), directory, key, file)
                contents.values[key] = StoredValue(*place, "torch")
                continue
            shape, dtype, regions = _described(record, key, file)
            _add(contents.tensors, key, StoredTensor(shape, dtype, ()), file)
            for region in regions:
                found = places.get((key, region.start)) or places.get((key, None))
                place = _place(found, directory, key, file)
                # Ranks that write alone write their copies of one chunk each; one is enough.
                items.setdefault((key, region), _Item(*place, key, dtype, region))
        contents.paths.update(_paths(metadata.get("planner_data")))
    chunks: dict[str, list[Chunk]] = {key: [] for key in contents.tensors}
    for item in sorted(items.values(), key=lambda item: (item.file, item.offset)):
        chunks[item.key] += item.chunks(reader)
    for key, stored in contents.tensors.items():
        ordered = tuple(sorted(chunks[key], key=lambda chunk: chunk.region))
        contents.tensors[key] = StoredTensor(stored.shape, stored.dtype, ordered)
    return contents


def _metadata(reader: FileReader, file: str) -> Record:
    size = reader.size(file)
    if size > MAX_METADATA_NBYTES:
        raise FormatError(f"{size} bytes are too many for metadata", file=file)
    found = parse(reader.read(file, 0, size), file=file)
    if isinstance(found, Record) and found.name == f"{_MODULE}.Metadata":
        return found
    raise FormatError("it does not hold the metadata of a checkpoint", file=file)


def _dict(value: object, file: str) -> dict[object, object]:
    if isinstance(value, dict):
        return value
    raise FormatError("its tables are not where they are expected", file=file)


def _places(metadata: Record, file: str) -> Iterator[tuple[Index, Record]]:
    """Where each item lies, by key and offset."""
    for index, place in _dict(metadata.get("storage_data"), file).items():
        if not isinstance(index, Record) or not isinstance(place, Record):
            raise FormatError("its storage table is not one of files", file=file)
        key, offset = index.get("fqn"), index.get("offset")
        if isinstance(key, str) and (offset is None or isinstance(offset, tuple)):
            yield (key, offset), place


def _described(record: Record, key: str, file: str) -> tuple[tuple[int, ...], str, list[Region]]:
    """The shape, the dtype and the chunks of a tensor."""
    properties, shape, chunks = (record.get(name) for name in ("properties", "size", "chunks"))
    state = properties.state if isinstance(properties, Record) else None
    first = state.get("dtype") if isinstance(state, dict) else state
    dtype = first[0] if isinstance(first, tuple) and first else first
    if (
        not isinstance(dtype, Global)
        or not isinstance(shape, tuple)
        or not isinstance(chunks, list)
    ):
        raise FormatError(f"a {record.name} is no tensor that is read here", file=file, key=key)
    try:
        itemsize(dtype.name)
        regions = [_region(chunk) for chunk in chunks]
        whole = Region.of_shape(shape)
        fits = all(box.ndim == whole.ndim and whole.contains(box) for box in regions)
    except (PlanError, TypeError) as error:
        raise FormatError(f"its shape or dtype is none: {error}", file=file, key=key) from error
    if not fits:
        raise FormatError(f"a chunk lies outside the shape {shape}", file=file, key=key)
    return shape, dtype.name, regions


def _region(chunk: object) -> Region:
    offsets = chunk.get("offsets") if isinstance(chunk, Record) else None
    sizes = chunk.get("sizes") if isinstance(chunk, Record) else None
    if not (isinstance(offsets, tuple) and isinstance(sizes, tuple) and len(offsets) == len(sizes)):
        raise TypeError("a chunk has no offsets and sizes")
    if not all(type(value) is int and value >= 0 for value in offsets + sizes):
        raise TypeError(f"{offsets} and {sizes} are no sizes")
    return Region(offsets, tuple(low + size for low, size in zip(offsets, sizes, strict=True)))


def _place(place: Record | None, directory: str, key: str, file: str) -> tuple[str, int, int]:
    """The file, the first byte and the number of bytes of an item."""
    if place is None:
        raise FormatError("the storage table does not say where it lies", file=file, key=key)
    name, offset, nbytes = (place.get(part) for part in ("relative_path", "offset", "length"))
    if place.get("transform_descriptors"):
        text = f"it is stored transformed ({place.get('transform_descriptors')}), not as it is"
        raise FormatError(text, file=file, key=key)
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+", name) or name in {".", ".."}:
        raise FormatError(f"{name!r} is not the name of a file beside it", file=file, key=key)
    if not isinstance(offset, int) or not isinstance(nbytes, int) or offset < 0 or nbytes < 0:
        raise FormatError(f"{offset!r} and {nbytes!r} are no range of {name}", file=file, key=key)
    return os.path.join(directory, name), offset, nbytes


@dataclass(frozen=True, slots=True)
class _Item:
    """One chunk as the metadata has it: an archive in a range of a file."""

    file: str
    offset: int
    nbytes: int
    key: str
    dtype: str
    region: Region

    def chunks(self, reader: FileReader) -> list[Chunk]:
        """Where the bytes of the chunk lie; nothing for one that has none."""
        size = reader.size(self.file)
        if self.offset + self.nbytes > size:
            text = f"its item ends at byte {self.offset + self.nbytes}, the file at {size}"
            raise self._error(text)
        if self.region.is_empty:
            return []
        archive = Archive.read(reader, self.file, self.offset, self.nbytes)
        structure = parse(archive.contents(reader, "data.pkl"), file=self.file, offset=self.offset)
        try:
            record = tensor_record(structure)
            order = record.order() if record is not None else ()
        except ValueError as error:
            raise self._error(str(error)) from error
        found = (record.dtype, record.shape) if record is not None else None
        if record is None or found != (self.dtype, self.region.shape):
            text = f"expected {self.dtype} {self.region.shape}, the item holds {found}"
            raise self._error(text)
        return [self._chunk(record, order, archive, reader)]

    def _chunk(
        self, record: TensorRecord, order: tuple[int, ...], archive: Archive, reader: FileReader
    ) -> Chunk:
        name = f"data/{record.storage}"
        begin, nbytes = archive.place(reader, name)
        wanted = self.region.numel * itemsize(self.dtype)
        first = record.begin * itemsize(self.dtype)
        if first + wanted > nbytes:
            raise self._error(f"it takes {first + wanted} bytes of a storage of {nbytes}")
        crc = archive.members[name].crc if wanted == nbytes else None
        plain = order == tuple(range(self.region.ndim))
        return Chunk(self.region, self.file, begin + first, () if plain else order, crc)

    def _error(self, text: str) -> FormatError:
        return FormatError(text, file=self.file, key=self.key, offset=self.offset)


def _add(tensors: dict[str, StoredTensor], key: str, stored: StoredTensor, file: str) -> None:
    known = tensors.setdefault(key, stored)
    if (known.shape, known.dtype) != (stored.shape, stored.dtype):
        text = f"{stored.dtype} {stored.shape} here, {known.dtype} {known.shape} before"
        raise FormatError(text, file=file, key=key)


def _paths(data: object) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    for key, path in data.items() if isinstance(data, dict) else ():
        if isinstance(key, str) and isinstance(path, tuple):
            yield key, tuple(part for part in path if isinstance(part, (str, int)))
