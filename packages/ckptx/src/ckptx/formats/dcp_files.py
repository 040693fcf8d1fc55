"""dcp_files: the files of a checkpoint as torch's distributed checkpoint reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from ckptx.formats.archive import Frame, archive_of
from ckptx.formats.pickled import Global
from ckptx.formats.pickling import Call, New, pickled
from ckptx.formats.structure import tensor_structure
from ckptx.outfile import OutFile, OutFormat, Part
from ckptx.placing import SavePlan, Write
from ckptx.unit import cut_box
from distcore.v1 import Layout, Region, itemsize

MAX_ITEM_NBYTES: Final = 1 << 30
"""Larger boxes are written as several items, so that no archive needs sizes of 64 bits."""

VERSION: Final = "1.0.0"
_METADATA: Final = "torch.distributed.checkpoint.metadata"
_STORAGE: Final = "torch.distributed.checkpoint.filesystem"

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an item lies."""

    name: str
    offset: int
    nbytes: int


def dcp_format(
    plan: SavePlan,
    layouts: Mapping[str, Layout],
    values: Mapping[str, object],
    *,
    ranks: Sequence[int],
    paths: Mapping[str, Path],
) -> OutFormat:
    """One file for each rank that writes something, and `.metadata` last.

    `values` are plain data as `pickled` takes it; `paths` are the keys' names in the nested dict.
    """
    files: list[OutFile] = []
    places: dict[str, list[tuple[Region, _Place]]] = {key: [] for key in layouts}
    value_places: dict[str, _Place] = {}
    for index, rank in enumerate(ranks):
        name = f"__{index}_0.distcp"
        head = b""
        for key, value in values.items() if index == 0 else ():
            archive = archive_of(pickled(value))
            value_places[key] = _Place(name, len(head), len(archive))
            head += archive
        writes = plan.writes.get(rank, ())
        parts = tuple(_parts(writes, layouts, len(head)))
        end = len(head)
        for part in parts:
            place = _placed(part, name)
            places[part.key].append((part.region, place))
            end = place.offset + place.nbytes
        if end:
            files.append(OutFile(name, rank, head, parts, end))
    metadata = _metadata(layouts, places, value_places, paths)
    return OutFormat(tuple(files), {".metadata": metadata})


def _parts(writes: Iterable[Write], layouts: Mapping[str, Layout], begin: int) -> Iterator[Part]:
    for write in writes:
        dtype = layouts[write.key].dtype
        size = itemsize(dtype)
        for region in _small(write.region, MAX_ITEM_NBYTES // size):
            nbytes = region.numel * size
            frame = Frame(tensor_structure(dtype, region.shape), nbytes)
            yield Part(write.key, region, begin + frame.head_nbytes, nbytes, frame)
            begin += frame.total_nbytes


def _small(region: Region, max_numel: int) -> Iterator[Region]:
    left = [region]
    while left:
        box = left.pop()
        if box.numel <= max_numel:
            yield box
            continue
        before, behind = cut_box(box, max_numel, max(1, max_numel // 8))
        left += reversed(before + behind)


def _placed(part: Part, name: str) -> _Place:
    if part.frame is None:
        raise ValueError(f"the part of {part.key!r} has no frame")
    return _Place(name, part.begin - part.frame.head_nbytes, part.frame.total_nbytes)


def _metadata(
    layouts: Mapping[str, Layout],
    places: Mapping[str, list[tuple[Region, _Place]]],
    value_places: Mapping[str, _Place],
    paths: Mapping[str, Path],
) -> bytes:
    entries: dict[str, object] = {
        key: New(Global(_METADATA, "BytesStorageMetadata"), {}) for key in value_places
    }
    storage: dict[object, object] = {
        _index(key, None, None): _info(place) for key, place in value_places.items()
    }
    for key, layout in layouts.items():
        found = sorted(places[key], key=lambda pair: pair[0])
        entries[key] = _tensor(layout, [region for region, _ in found])
        for number, (region, place) in zip(count(), found, strict=False):
            storage[_index(key, region.start, number)] = _info(place)
    state = {
        "state_dict_metadata": entries,
        "planner_data": {key: tuple(paths.get(key, (key,))) for key in entries},
        "storage_data": storage,
        "storage_meta": New(Global(_METADATA, "StorageMeta"), _STORAGE_META),
        "version": VERSION,
    }
    return pickled(New(Global(_METADATA, "Metadata"), state))


_STORAGE_META: Final[dict[str, object]] = {
    "checkpoint_id": None,
    "save_id": None,
    "load_id": None,
    "modules": [],
}


def _size(shape: Sequence[int]) -> Call:
    return Call(Global("torch", "Size"), (tuple(shape),))


def _index(key: str, offset: tuple[int, ...] | None, number: int | None) -> New:
    place = None if offset is None else _size(offset)
    state = _Frozen({"fqn": key, "offset": place, "index": number})
    return New(Global(_METADATA, "MetadataIndex"), state)


class _Frozen(dict[str, object]):
    """A dict that may be part of a key, as it is never changed. Two are equal if they are one."""

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _info(place: _Place) -> New:
    state = {"relative_path": place.name, "offset": place.offset, "length": place.nbytes}
    return New(Global(_STORAGE, "_StorageInfo"), state)


def _tensor(layout: Layout, regions: Iterable[Region]) -> New:
    strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Call(Global(_METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    properties = (Global("torch", layout.dtype), strided, False, contiguous, False)
    chunks = [
        New(
            Global(_METADATA, "ChunkStorageMetadata"),
            {"offsets": _size(region.start), "sizes": _size(region.shape)},
        )
        for region in regions
    ]
    state = {
        "properties": New(Global(_METADATA, "TensorProperties"), properties),
        "size": _size(layout.shape),
        "chunks": chunks,
    }
    return New(Global(_METADATA, "TensorStorageMetadata"), state)
