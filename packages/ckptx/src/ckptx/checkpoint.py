"""Checkpoint: what a stored state holds, and ranged reads from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ckptx.files import FileReader
from ckptx.formats import source as sources
from ckptx.integrity import Integrity, read_integrity
from ckptx.stored import StoredTensor, StoredValue
from distcore.v1 import Region

if TYPE_CHECKING:
    import torch

Path: TypeAlias = str | os.PathLike[str]
Source: TypeAlias = Path | Mapping[str, Path]
Entry: TypeAlias = StoredTensor | StoredValue


@dataclass(frozen=True, slots=True)
class Checkpoint(Mapping[str, Entry]):
    """The entries of a checkpoint by key: shapes, dtypes and places, checked; nothing is loaded.

    A mapping of `tensors`, in the order in which the files name the keys, and then `objects`, the
    entries that are no tensors. It holds no open file, so it may be kept, shared between threads
    and dropped at will. `header_nbytes` is what was read to make it. `paths` are the names and
    positions of a key in the nested state dict that was saved, where the files tell. `integrity`
    are the digests that were written with it, if any.
    """

    name: str
    format: str
    tensors: Mapping[str, StoredTensor]
    header_nbytes: int
    objects: Mapping[str, StoredValue] = field(default_factory=dict)
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict, repr=False)
    integrity: Integrity | None = field(default=None, repr=False)

    def __getitem__(self, key: str) -> Entry:
        return self.tensors[key] if key in self.tensors else self.objects[key]

    def __iter__(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.objects

    def __len__(self) -> int:
        return len(self.tensors) + len(self.objects)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(stored.nbytes for stored in self.tensors.values())

    @property
    def digest(self) -> str:
        """32 hex digits, equal where keys, shapes, dtypes and places in the files are.

        Directories do not count: each host may have the files at another path.
        """
        state = blake2b(digest_size=16)
        for key in sorted(self.tensors):
            stored = self.tensors[key]
            places = [
                (chunk.region.start, chunk.region.stop, os.path.basename(chunk.file), chunk.offset)
                for chunk in stored.chunks
            ]
            state.update(repr((key, stored.shape, stored.dtype, places)).encode())
        for key in sorted(self.objects):
            value = self.objects[key]
            place = (os.path.basename(value.file), value.offset, value.nbytes, value.text)
            state.update(repr((key, place)).encode())
        return state.hexdigest()

    def meta(self, key: str) -> StoredTensor:
        """The shape, dtype, bytes and places of a tensor; KeyError for a key it has not."""
        try:
            return self.tensors[key]
        except KeyError:
            raise KeyError(f"{key!r} is not a tensor in {self.name}") from None

    def value(self, key: str) -> object:
        """Read an entry that is no tensor, as data; KeyError for a key it has not.

        Objects of other classes than Python's plain ones are left as inert records.
        """
        from ckptx.values import read_value

        if key not in self.objects:
            raise KeyError(f"{key!r} is not a value in {self.name}")
        with FileReader() as reader:
            return read_value(self.objects[key], reader)

    def read(self, key: str, region: Region | None = None) -> torch.Tensor:
        """Return a Region of a tensor (all of it by default) in new CPU memory.

        Only the bytes needed are read, or little more where they lie in many short runs.
        """
        from ckptx.reader import read_region

        stored = self.meta(key)
        box = Region.of_shape(stored.shape) if region is None else region
        with FileReader() as reader:
            return read_region(key, stored, box, reader)


def open_checkpoint(source: Source) -> Checkpoint:
    """Read and check the description of a checkpoint; no tensor is read and no code executed.

    `source` is a directory that torch's distributed checkpoint or Megatron-Core's `torch_dist`
    wrote; a directory of safetensors files, one such file, or an index of them (`*.index.json`);
    or a mapping key -> safetensors file such as an index holds. In a directory of safetensors
    `model.safetensors.index.json` decides which files count, else `model.safetensors`, else the
    only index or file there is, else all files of parts; other files are ignored.

    FormatError names file, key and offset of what is damaged, and a directory whose writer did
    not come to the end; ReadError what cannot be read.
    """
    with FileReader() as reader:
        if isinstance(source, Mapping):
            name, kind = "a mapping of files", "safetensors"
            files = {key: os.fspath(file) for key, file in source.items()}
            contents = sources.read_mapping(reader, files)
            integrity = None
        else:
            name = os.fspath(source)
            kind, contents = sources.read_source(reader, name)
            integrity = read_integrity(reader, name)
        return Checkpoint(
            name=name,
            format=kind,
            tensors=MappingProxyType(contents.tensors),
            header_nbytes=reader.nbytes,
            objects=MappingProxyType(contents.values),
            paths=MappingProxyType(contents.paths),
            integrity=integrity,
        )
