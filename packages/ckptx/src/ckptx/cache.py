"""Plan cache: the distributions of a group on disk, as data, and never obeyed once stale.

One JSON file per group holds several layouts; each is the table of the group's shards from which
its distributions follow, and a digest of every rank's own table. So a rank can tell from its own
shards alone whether a layout may be the present one, and all ranks together, by showing 32 bytes
each, whether it is. A shard that the file does not know can thus never be dropped.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from ckptx.distribution import ShardDistribution, ShardRow, distribution_of, shard_rows
from ckptx.errors import CheckpointPlanError, FormatError
from ckptx.shard_table import DIGEST_NBYTES, decode_shard, encode_shard, table_digest
from ckptx.sharded import ShardedTensor

KIND: Final = "ckptx.plan_cache"
FORMAT: Final = 1
MAX_LAYOUTS: Final = 16
"""How many layouts a file keeps; the one that was written first goes first."""


class StalePlanError(CheckpointPlanError):
    """The plan cache does not know the present shards."""


class GroupPlans(dict[bool, ShardDistribution]):
    """Both distributions of one layout, by `ignore_groups`.

    `tables` is the digest of each rank's own shard table, by index.
    """

    __slots__ = ("tables",)

    def __init__(self, rows: Iterable[ShardRow], tables: Sequence[bytes]) -> None:
        rows = tuple(rows)
        num_ranks = len(tables)
        super().__init__(
            {mode: distribution_of(rows, num_ranks, ignore_groups=mode) for mode in (False, True)}
        )
        self.tables = tuple(tables)


@dataclass(frozen=True, slots=True)
class CachedLayout:
    """The shards of one group as a file keeps them."""

    rows: tuple[ShardRow, ...]
    tables: tuple[bytes, ...]

    @classmethod
    def of(cls, all_shards: Sequence[Sequence[ShardedTensor]]) -> CachedLayout:
        """The layout of what the ranks hold; `all_shards` has one rank's shards per item."""
        return cls(shard_rows(all_shards), tuple(table_digest(shards) for shards in all_shards))

    def plans(self) -> GroupPlans:
        """The distributions that follow from it."""
        return GroupPlans(self.rows, self.tables)

    def to_json(self) -> dict[str, object]:
        """The form in which a file has it."""
        shards = [[encode_shard(row.metadata), row.ranks, row.mains] for row in self.rows]
        tables = [table.hex() for table in self.tables]
        return {"tables": tables, "digest": _digest_of([tables, shards]), "shards": shards}

    @classmethod
    def from_json(cls, layout: Any, num_ranks: int) -> CachedLayout:
        """Read it back; ValueError, TypeError or KeyError where something is wrong with it."""
        tables = tuple(bytes.fromhex(table) for table in layout["tables"])
        shards = layout["shards"]
        if len(tables) != num_ranks or any(len(table) != DIGEST_NBYTES for table in tables):
            raise ValueError(f"expected {num_ranks} digests of {DIGEST_NBYTES} bytes")
        if layout["digest"] != _digest_of([layout["tables"], shards]):
            raise ValueError("a layout is not the one that was written")
        rows = tuple(
            ShardRow(decode_shard(shard), tuple(ranks), tuple(mains))
            for shard, ranks, mains in shards
        )
        for row in rows:
            if not set(row.mains) <= set(row.ranks) <= set(range(num_ranks)):
                raise ValueError(f"{row.metadata.key}: ranks {row.ranks}, mains {row.mains}")
        return cls(rows, tables)


def cache_file(directory: str | os.PathLike[str], ranks: Sequence[int], *, prefix: str) -> str:
    """Where the plans of a group with these global ranks lie: another group has another file."""
    digest = blake2b(json.dumps(list(ranks)).encode(), digest_size=6).hexdigest()
    return os.path.join(directory, f"{prefix}_{min(ranks)}_{len(ranks)}_{digest}.json")


def read_layouts(file: str, ranks: Sequence[int] | None = None) -> list[CachedLayout]:
    """The layouts of a file, the latest last. FileNotFoundError where there is no file.

    FormatError where it is damaged, of another format, or of a group other than `ranks`.
    """
    try:
        table = json.loads(Path(file).read_bytes())
        if table["kind"] != KIND or table["format"] != FORMAT:
            text = f"is {table['kind']} format {table['format']}; this reads {KIND} format {FORMAT}"
            raise FormatError(text, file=file)
        if ranks is not None and table["ranks"] != list(ranks):
            text = f"is for the ranks {table['ranks']}, not {list(ranks)}"
            raise FormatError(text, file=file)
        num_ranks = len(table["ranks"])
        return [CachedLayout.from_json(layout, num_ranks) for layout in table["layouts"]]
    except FormatError:
        raise
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"is no plan cache: {error}", file=file) from error


def write_layout(file: str, layout: CachedLayout, ranks: Sequence[int]) -> None:
    """Add a layout to a file, or write it anew where it is damaged; a crash leaves the old one."""
    try:
        known = read_layouts(file, ranks)
    except (FileNotFoundError, FormatError):
        known = []
    known = [other for other in known if other.tables != layout.tables]
    table = {
        "kind": KIND,
        "format": FORMAT,
        "ranks": list(ranks),
        "layouts": [kept.to_json() for kept in [*known, layout][-MAX_LAYOUTS:]],
    }
    os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
    partial = f"{file}.tmp.{os.getpid()}.{min(ranks)}"
    with open(partial, "w", encoding="ascii") as stream:
        json.dump(table, stream, separators=(",", ":"))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, file)


def _digest_of(shards: object) -> str:
    text = json.dumps(shards, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=DIGEST_NBYTES).hexdigest()
