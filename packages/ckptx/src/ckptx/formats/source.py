"""Source: which files at a path make up a checkpoint, and of what format they are."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

from ckptx.errors import FormatError, ReadError
from ckptx.files import FileReader
from ckptx.formats import dcp, megatron, pieces, safetensors
from ckptx.formats.contents import Contents
from ckptx.formats.safetensors import Header
from ckptx.stored import StoredValue

INCOMPLETE: Final = "ckptx.incomplete"
"""A file that a directory has for as long as it is being written."""

VALUES: Final = "ckptx.values"
"""Where in the free text of a safetensors file entries stand that are no tensors."""


def read_source(reader: FileReader, name: str) -> tuple[str, Contents]:
    """The format of what lies at a path, and what it holds; no tensor is read."""
    try:
        if not os.path.isdir(name):
            return "safetensors", _of_file(reader, name)
        names = sorted(os.listdir(name))
    except OSError as error:
        raise ReadError(error.errno, error.strerror, name) from error
    if INCOMPLETE in names:
        text = f"it is incomplete: its writer did not come to the end (it has {INCOMPLETE})"
        raise FormatError(text, file=name)
    files = dcp.metadata_files(name)
    if files:
        return _of_dcp(reader, name, names, files)
    if any(entry.endswith(".distcp") for entry in names):
        text = f"it is incomplete: it has .distcp files, but no {dcp.METADATA}"
        raise FormatError(text, file=name)
    return "safetensors", _of_directory(reader, name, names)


def read_mapping(reader: FileReader, files: Mapping[str, str]) -> Contents:
    """What files hold of the keys that each is named for."""
    headers = {}
    for file in sorted(set(files.values())):
        headers[file] = safetensors.read_header(reader, file)
    for key, file in files.items():
        if key not in headers[file].tensors:
            raise FormatError(
                "the index names it here, but the file has it not", file=file, key=key
            )
    chosen = [
        replace(
            header,
            tensors={key: header.tensors[key] for key in files if files[key] == header.file},
        )
        for header in headers.values()
    ]
    found = pieces.joined(chosen)
    return Contents({key: found[key] for key in files}, _values(headers.values()))


def _of_dcp(
    reader: FileReader, name: str, names: list[str], files: list[str]
) -> tuple[str, Contents]:
    is_megatron = megatron.is_megatron(reader, name, names)
    contents = dcp.read_directory(reader, name, files)
    if is_megatron:
        megatron.add_common(reader, name, names, contents)
    return "megatron" if is_megatron else "dcp", contents


def _of_file(reader: FileReader, name: str) -> Contents:
    if name.endswith(".index.json"):
        return read_mapping(reader, safetensors.read_index(reader, name))
    return _of_headers([safetensors.read_header(reader, name)])


def _of_directory(reader: FileReader, directory: str, names: list[str]) -> Contents:
    """An index decides, then `model.safetensors`, then parts; other files are left alone."""
    files = [os.path.join(directory, name) for name in names if name.endswith(".safetensors")]
    has_one = safetensors.INDEX in names or safetensors.MODEL in names
    if not has_one and len(files) > 1 and not _has_index(names):
        headers = [safetensors.read_header(reader, file) for file in files]
        parts = [header for header in headers if pieces.has_pieces(header)]
        if parts:
            return _of_headers(parts)
    index, single = safetensors.files_of_directory(directory)
    return _of_file(reader, index or single or directory)


def _has_index(names: Iterable[str]) -> bool:
    return any(name.endswith(".safetensors.index.json") for name in names)


def _of_headers(headers: list[Header]) -> Contents:
    return Contents(pieces.joined(headers), _values(headers))


def _values(headers: Iterable[Header]) -> dict[str, StoredValue]:
    found: dict[str, StoredValue] = {}
    for header in headers:
        if VALUES not in header.metadata:
            continue
        text = header.metadata[VALUES]
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"{VALUES} is not JSON: {error}", file=header.file) from error
        if not isinstance(table, dict):
            raise FormatError(f"{VALUES} is no table", file=header.file)
        for key, entry in table.items():
            value = json.dumps(entry, separators=(",", ":"))
            found[key] = StoredValue(header.file, 0, len(value), "json", value)
    return found
