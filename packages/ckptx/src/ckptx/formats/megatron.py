"""megatron: directories of Megatron-Core's `torch_dist` format, a dcp directory and a bit more.

`metadata.json` names the format. What all ranks have in common lies in `common.pt`, or among the
other objects as `common_state/shard_0_1`. The value of any other object is a list: the objects
that one rank had under that key. `integrity.json`, where there is one, has the SHA-256
of every file.
"""

from __future__ import annotations

import json
import os
from typing import Final

from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.formats.contents import Contents
from ckptx.stored import StoredValue

CONFIG: Final = "metadata.json"
COMMON: Final = "common.pt"
COMMON_KEY: Final = "common_state/shard_0_1"
HASHES: Final = "integrity.json"
MAX_CONFIG_NBYTES: Final = 16 << 20


def is_megatron(reader: FileReader, directory: str, names: list[str]) -> bool:
    """Whether the directory says it is of this format. FormatError for a format beside it."""
    if CONFIG not in names:
        return False
    file = os.path.join(directory, CONFIG)
    backend = _object(reader, file).get("sharded_backend")
    if backend not in {None, "torch_dist"}:
        raise FormatError(f"the sharded_backend {backend!r} is not read here", file=file)
    return backend is not None


def add_common(reader: FileReader, directory: str, names: list[str], contents: Contents) -> None:
    """Add the common state under its key, where it has a file of its own."""
    if COMMON in names and COMMON_KEY not in contents.values:
        file = os.path.join(directory, COMMON)
        contents.values[COMMON_KEY] = StoredValue(file, 0, reader.size(file), "torch")


def hashes(reader: FileReader, directory: str) -> dict[str, str]:
    """The SHA-256 of each file, by name; empty where the directory has no such list."""
    file = os.path.join(directory, HASHES)
    if not os.path.exists(file):
        return {}
    table = _object(reader, file)
    nested = table.get("files", table)
    found = nested if isinstance(nested, dict) else {}
    return {
        name: text
        for name, text in found.items()
        if isinstance(name, str) and isinstance(text, str) and len(text) == 64
    }


def _object(reader: FileReader, file: str) -> dict[str, object]:
    size = reader.size(file)
    if size > MAX_CONFIG_NBYTES:
        raise FormatError(f"{size} bytes are too many", file=file)
    try:
        found = json.loads(reader.read(file, 0, size).decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}", file=file) from error
    if not isinstance(found, dict):
        raise FormatError("not a JSON object", file=file)
    return found
