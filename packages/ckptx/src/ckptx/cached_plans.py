"""Cached plans: a group's distributions from memory or a file, proven to be those of its shards.

Each rank offers the layout that its own shards point to, together with the digest of its table:
32 bytes. If all offer the layout that all tables together make, it is the present one. Otherwise
the ranks look for exactly that layout; where one has it not, it is stale.
"""

from __future__ import annotations

import warnings
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, Literal

from ckptx.cache import CachedLayout, GroupPlans, StalePlanError, read_layouts, write_layout
from ckptx.distribution import ShardDistribution
from ckptx.errors import FormatError
from ckptx.shard_table import gather_tables, sharded_tensors_in, table_digest
from ckptx.sharded import ShardedTensor
from distcore.v1 import Channel, Problem
from distcore.v1.runtime import run_together

Memo = MutableMapping[str, dict[bool, ShardDistribution]]
_OFFER_NBYTES: Final = 16
_NOTHING: Final = bytes(_OFFER_NBYTES)


@dataclass(frozen=True, slots=True)
class PlanCache:
    """Where the plans of one group are kept: a file, and a memo that several files share."""

    file: str
    memo: Memo
    channel: Channel
    timeout_s: float | None = None

    def create(self, state: object) -> GroupPlans:
        """The plans of the present shards; gathered, written and remembered if the memo has none.

        Collective; when it returns the file is there for all ranks.
        """
        try:
            own = table_digest(sharded_tensors_in(state))
        except Exception:  # noqa: BLE001 - the gathering below meets the same error and tells all
            own = _NOTHING
        remembered = self._remembered(own)
        tables, agreed = self._show(own, remembered)
        if agreed and remembered is not None and remembered.tables == tables:
            return remembered
        all_shards = gather_tables(state, self.channel, timeout_s=self.timeout_s)
        return self.write(all_shards)

    def write(self, all_shards: Sequence[Sequence[ShardedTensor]]) -> GroupPlans:
        """Write the plans of gathered shards, by the rank with the lowest number. Collective."""
        channel = self.channel

        def act() -> GroupPlans:
            layout = CachedLayout.of(all_shards)
            plans = layout.plans()
            if channel.rank == min(channel.ranks):
                write_layout(self.file, layout, channel.ranks)
            return plans

        plans = run_together("write the plan cache", act, channel, timeout_s=self.timeout_s)
        self.memo[self.file] = plans
        return plans

    def read(self, state: object, *, on_stale: Literal["replan", "error"]) -> GroupPlans:
        """The cached plans of the present shards. Collective; 32 bytes per rank if all is well.

        Where the cache does not have them: StalePlanError, or a warning and plans made anew.
        FileNotFoundError where no rank has a file.
        """
        own, found, failure = _NOTHING, None, None
        try:
            own = table_digest(sharded_tensors_in(state))
            found = self._remembered(own) or self._only_match(own)
        except Exception as error:  # noqa: BLE001 - told to all ranks just below
            failure = error
        tables, agreed = self._show(own, found)
        if not agreed or found is None or found.tables != tables:
            found, reason = self._search(tables, failure)
            if found is None:
                return self._replan(state, reason, on_stale)
        self.memo[self.file] = found
        return found

    def trust(self, state: object) -> GroupPlans:
        """The cached plans that this rank's own shards point to. Local: no rank asks another.

        StalePlanError where these shards are in no layout of the cache, or in several.
        """
        own = table_digest(sharded_tensors_in(state))
        found = self._remembered(own)
        if found is None:
            matches = self._matches(own)
            if len(matches) != 1:
                text = f"{len(matches)} layouts have this rank's shards; expected 1"
                raise StalePlanError(Problem(self.file, "stale", text))
            found = matches[0].plans()
        self.memo[self.file] = found
        return found

    def _remembered(self, own: bytes) -> GroupPlans | None:
        """What the memo has, if this rank's shards are in it."""
        plans = self.memo.get(self.file)
        if isinstance(plans, GroupPlans) and len(plans.tables) == self.channel.size:
            return plans if plans.tables[self.channel.index] == own else None
        return None

    def _matches(self, own: bytes) -> list[CachedLayout]:
        layouts = read_layouts(self.file, self.channel.ranks)
        return [layout for layout in layouts if layout.tables[self.channel.index] == own]

    def _only_match(self, own: bytes) -> GroupPlans | None:
        matches = self._matches(own)
        return matches[-1].plans() if matches else None

    def _show(self, own: bytes, plans: GroupPlans | None) -> tuple[tuple[bytes, ...], bool]:
        """The tables of all ranks, and whether all offer the layout that these make."""
        offer = _NOTHING if plans is None else _layout_digest(plans.tables)
        rows = self.channel.all_gather(own + offer, timeout_s=self.timeout_s)
        tables = tuple(row[:_OFFER_NBYTES] for row in rows)
        wanted = _layout_digest(tables)
        return tables, all(row[_OFFER_NBYTES:] == wanted for row in rows)

    def _search(
        self, tables: tuple[bytes, ...], failure: Exception | None
    ) -> tuple[GroupPlans | None, str]:
        """The plans of these tables if every rank has them, else why not. Collective."""
        reason = "it does not know the present shards"

        def look() -> GroupPlans | None:
            if failure is not None and not isinstance(failure, FormatError):
                raise failure
            layouts = [] if failure is not None else read_layouts(self.file, self.channel.ranks)
            for layout in reversed(layouts):
                if layout.tables == tables:
                    return layout.plans()
            return None

        found = run_together("read the plan cache", look, self.channel, timeout_s=self.timeout_s)
        row = bytes([found is not None]).ljust(64, b"\0")
        rows = self.channel.all_gather(row, timeout_s=self.timeout_s)
        lacking = [rank for rank, r in zip(self.channel.ranks, rows, strict=True) if not r[0]]
        if failure is not None:
            reason = str(failure)
        return (None if lacking else found), f"{reason} (ranks {lacking} have no plan for them)"

    def _replan(
        self, state: object, reason: str, on_stale: Literal["replan", "error"]
    ) -> GroupPlans:
        if on_stale == "error":
            raise StalePlanError(Problem(self.file, "stale", reason))
        warnings.warn(f"the plan cache {self.file} is not used: {reason}", stacklevel=4)
        all_shards = gather_tables(state, self.channel, timeout_s=self.timeout_s)
        layout = run_together(
            "plan anew", lambda: CachedLayout.of(all_shards).plans(), self.channel
        )
        self.memo[self.file] = layout
        return layout


def _layout_digest(tables: Sequence[bytes]) -> bytes:
    return blake2b(b"".join(tables), digest_size=_OFFER_NBYTES).digest()
