"""safetensors_files: the files of a checkpoint as the safetensors library reads them.

Where every tensor is written whole, the files are those of a Hugging Face model: one, or several
with an index. Otherwise they hold parts, and say where each begins in the words that torch's own
reader of such files understands.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from ckptx.errors import CheckpointPlanError
from ckptx.formats.pieces import INFO, OFFSETS
from ckptx.formats.safetensors import DTYPES, INDEX, MODEL
from ckptx.formats.source import VALUES
from ckptx.outfile import OutFile, OutFormat, Part
from ckptx.placing import SavePlan, Write
from distcore.v1 import Layout, Problem, Region, itemsize

_WORDS: Final = {dtype: word for word, dtype in DTYPES.items()}
_ALIGNMENT: Final = 8


def safetensors_format(
    plan: SavePlan, layouts: Mapping[str, Layout], values: str, *, ranks: Sequence[int]
) -> OutFormat:
    """One file for each rank that writes something.

    Where it has several parts of one tensor, it writes several files. `values` is the text of a
    JSON object: entries that are no tensors.
    CheckpointPlanError names the tensors whose dtype the format has no word for.
    """
    problems = [
        Problem(key, "dtype", f"safetensors has no {layout.dtype}; use format='dcp'")
        for key, layout in layouts.items()
        if layout.dtype not in _WORDS
    ]
    if problems:
        raise CheckpointPlanError(problems)
    groups = [
        (index, group)
        for index, rank in enumerate(ranks)
        for group in _groups(plan.writes.get(rank, ()))
    ] or [(0, [])]
    is_whole = all(
        write.region == Region.of_shape(layouts[write.key].shape)
        for _, group in groups
        for write in group
    )
    names = _names([index for index, _ in groups], is_whole=is_whole)
    files = tuple(
        _file(name, ranks[index], group, layouts, values if not number else "{}")
        for number, (name, (index, group)) in enumerate(zip(names, groups, strict=True))
    )
    last = {INDEX: _index(files)} if is_whole and len(files) > 1 else {}
    return OutFormat(files, last)


def _groups(writes: Sequence[Write]) -> list[list[Write]]:
    """The writes of one rank, so that no tensor is twice in a file."""
    found: list[list[Write]] = []
    seen: dict[str, int] = {}
    for write in writes:
        number = seen.get(write.key, 0)
        seen[write.key] = number + 1
        if number == len(found):
            found.append([])
        found[number].append(write)
    return found


def _names(indexes: Sequence[int], *, is_whole: bool) -> list[str]:
    count = len(indexes)
    if is_whole:
        if count == 1:
            return [MODEL]
        return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    numbers = [indexes[:i].count(index) + 1 for i, index in enumerate(indexes)]
    most = max(numbers)
    return [
        f"shard-{index + 1:05}-model-{number:05}-of-{most:05}.safetensors"
        for index, number in zip(indexes, numbers, strict=True)
    ]


def _file(
    name: str, rank: int, writes: Sequence[Write], layouts: Mapping[str, Layout], values: str
) -> OutFile:
    # Wide elements first: so each tensor begins at a multiple of its element's size.
    ordered = sorted(writes, key=lambda w: (-itemsize(layouts[w.key].dtype), w.key))
    offsets = {write.key: {OFFSETS: list(write.region.start)} for write in ordered}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", INFO: json.dumps(offsets)}
    if values != "{}":
        metadata[VALUES] = values
    table: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for write in ordered:
        table[write.key] = {
            "dtype": _WORDS[layouts[write.key].dtype],
            "shape": list(write.region.shape),
            "data_offsets": [end, end + write.nbytes],
        }
        end += write.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    at = len(head)
    parts = []
    for write in ordered:
        parts.append(Part(write.key, write.region, at, write.nbytes))
        at += write.nbytes
    return OutFile(name, rank, head, tuple(parts), at)


def _index(files: Sequence[OutFile]) -> bytes:
    weights = {part.key: file.name for file in files for part in file.parts}
    size = sum(part.nbytes for file in files for part in file.parts)
    table = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weights.items()))}
    return json.dumps(table, indent=2).encode()
