"""Checkpoint: what a stored state holds, and ranged reads from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from ckptx.errors import FormatError, ReadError
from ckptx.files import FileReader
from ckptx.formats import safetensors
from ckptx.stored import StoredTensor
from distcore.v1 import Region

if TYPE_CHECKING:
    import torch

Path: TypeAlias = str | os.PathLike[str]
Source: TypeAlias = Path | Mapping[str, Path]


@dataclass(frozen=True, slots=True)
class Checkpoint(Mapping[str, StoredTensor]):
    """The tensors of a checkpoint by key: shapes, dtypes and places, checked; no tensor is loaded.

    A mapping in the order in which the files name the keys. It holds no open file, so it may be
    kept, shared between threads and dropped at will. `header_nbytes` is what was read to make it.
    """

    name: str
    format: str
    tensors: Mapping[str, StoredTensor]
    header_nbytes: int

    def __getitem__(self, key: str) -> StoredTensor:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

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
        return state.hexdigest()

    def meta(self, key: str) -> StoredTensor:
        """The shape, dtype, bytes and places of a tensor; KeyError for a key it has not."""
        try:
            return self.tensors[key]
        except KeyError:
            raise KeyError(f"{key!r} is not in {self.name}") from None

    def read(self, key: str, region: Region | None = None) -> torch.Tensor:
        """Return a Region of a tensor (all of it by default) in new CPU memory.

        Only the bytes needed are read, or little more where they lie in many short runs.
        """
        from ckptx.reader import read_region

        stored = self.meta(key)
        return read_region(key, stored, Region.of_shape(stored.shape) if region is None else region)


def open_checkpoint(source: Source) -> Checkpoint:
    """Read and check the description of a checkpoint of safetensors files; no tensor is read.

    `source` is a file, an index (`*.index.json`), a directory, or a mapping key -> file such as an
    index holds. In a directory `model.safetensors.index.json` decides which files count, else
    `model.safetensors`, else the only index or file there is; other files are ignored.

    FormatError names file, key and offset of what is damaged; ReadError what cannot be read.
    """
    with FileReader() as reader:
        if isinstance(source, Mapping):
            files = {key: os.fspath(file) for key, file in source.items()}
            return _from_files("a mapping of files", files, reader)
        name = os.fspath(source)
        index, single = _entry(name)
        if index is not None:
            return _from_files(name, safetensors.read_index(reader, index), reader)
        header = safetensors.read_header(reader, single or name)
        _refuse_pieces(header)
        return Checkpoint(name, "safetensors", header.tensors, reader.nbytes)


def _entry(name: str) -> tuple[str | None, str | None]:
    """The index or the single file at `name`, whichever there is."""
    try:
        if os.path.isdir(name):
            return safetensors.files_of_directory(name)
    except OSError as error:
        raise ReadError(error.errno, error.strerror, name) from error
    return (name, None) if name.endswith(".index.json") else (None, name)


def _from_files(name: str, files: Mapping[str, str], reader: FileReader) -> Checkpoint:
    headers: dict[str, safetensors.Header] = {}
    for file in sorted(set(files.values())):
        headers[file] = safetensors.read_header(reader, file)
        _refuse_pieces(headers[file])
    for key, file in files.items():
        if key not in headers[file].tensors:
            raise FormatError(
                "the index names it here, but the file has it not", file=file, key=key
            )
    tensors = {key: headers[file].tensors[key] for key, file in files.items()}
    return Checkpoint(name, "safetensors", MappingProxyType(tensors), reader.nbytes)


def _refuse_pieces(header: safetensors.Header) -> None:
    """A file of pieces of tensors must not be taken for one of whole tensors."""
    if "DCP_SHARDING_INFO" in header.metadata:
        text = "it holds pieces of tensors (DCP_SHARDING_INFO), which are not read yet"
        raise FormatError(text, file=header.file)
