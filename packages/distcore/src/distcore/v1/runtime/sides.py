"""Sides: what one rank has to send and to receive under a plan, held against its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from distcore.v1.channel import Channel
from distcore.v1.errors import PlanError, Problem
from distcore.v1.layout import Layout, Piece
from distcore.v1.matching import Pair
from distcore.v1.plan import Plan
from distcore.v1.region import Region
from distcore.v1.runtime.disputes import DTYPE_CODES
from distcore.v1.runtime.layouts import (
    dtype_name,
    fits,
    is_dtensor,
    readings_of,
    same_pieces,
)
from distcore.v1.runtime.shard import Shard
from distcore.v1.runtime.staging import Binding, Place
from distcore.v1.schedule import Part, phases_of, regions_of, rows_of

_MASK: Final = (1 << 64) - 1
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Sides:
    """The part of a plan that concerns one rank, and that rank's Shards.

    `rows` are the rows of the plan behind `sends` and `receives`, in the same order.
    `phases` says in which phase which pair exchanges. `is_contiguous` says whether every Region
    that is sent or received lies in order on the channel's device.
    """

    copies: list[Part]
    sends: dict[int, list[Part]]
    receives: dict[int, list[Part]]
    rows: tuple[dict[int, list[int]], dict[int, list[int]]]
    phases: Mapping[Pair, int]
    sources: Side
    destinations: Side
    is_contiguous: bool
    problems: list[Problem]

    @classmethod
    def of(
        cls,
        plan: Plan,
        channel: Channel,
        values: tuple[Mapping[str, torch.Tensor | Shard], Mapping[str, torch.Tensor | Shard]],
        layouts: tuple[Mapping[str, Layout], Mapping[str, Layout]] = ({}, {}),
    ) -> Sides:
        """Collect the parts of the channel's rank, and all that is wrong with its tensors.

        `values` and `layouts` are those of the sources and of the destinations; layouts may be
        given for DTensors of which the reading is known.
        """
        out = Side("source", channel, values[0], layouts[0])
        into = Side("destination", channel, values[1], layouts[1])
        local, send_rows, receive_rows = rows_of(plan, channel.rank)
        sends = {peer: out.parts(plan, rows) for peer, rows in send_rows.items()}
        receives = {peer: into.parts(plan, rows) for peer, rows in receive_rows.items()}
        contiguous = out.is_contiguous and into.is_contiguous
        copies = out.parts(plan, local)
        into.parts(plan, local)
        strangers = (set(plan.columns.src) | set(plan.columns.dst)) - set(channel.ranks)
        problems = [*out.problems, *into.problems, *_copy_problems(copies, out, into)]
        problems += [
            Problem(f"rank {rank}", "rank", f"is in the plan, but not among {channel.ranks}")
            for rank in sorted(strangers)
        ]
        rows = send_rows, receive_rows
        phases = {} if problems else phases_of(plan, channel.ranks)
        return cls(copies, sends, receives, rows, phases, out, into, contiguous, problems)

    @property
    def is_unsettled(self) -> bool:
        """Whether this rank cannot tell how one of its DTensors is to be read."""
        return bool(self.sources.unsettled or self.destinations.unsettled)

    def dtype_balance(self) -> int:
        """The sum over this rank's sends less its receives; zero over all ranks (64 bits)."""
        total = 0
        for sign, side, by_peer, rows_by_peer in self._crossing():
            dtypes = {key: shard.data.dtype for key, shard in side.binding.shards.items()}
            number = {dtype: _number_of(dtype) for dtype in set(dtypes.values())}
            for peer, parts in by_peer.items():
                numbers = np.array([number[dtypes[part.key]] for part in parts], dtype=np.uint64)
                mixed = _mixed(np.array(rows_by_peer[peer], dtype=np.uint64))
                total += sign * int((mixed * numbers).sum())
        return total & _MASK

    def dtypes(self, plan: Plan) -> bytes:
        """For every key of the plan the codes of its dtype here, as a source and a destination."""
        codes = bytearray(2 * len(plan.keys))
        for at, (_, side, by_peer, _) in enumerate(self._crossing()):
            keys = {part.key for parts in by_peer.values() for part in parts}
            for number, key in enumerate(plan.keys):
                if key in keys:
                    dtype = side.binding.shards[key].data.dtype
                    codes[2 * number + at] = DTYPE_CODES[dtype_name(dtype)]
        return bytes(codes)

    def _crossing(
        self,
    ) -> Iterator[tuple[int, Side, dict[int, list[Part]], dict[int, list[int]]]]:
        yield 1, self.sources, self.sends, self.rows[0]
        yield -1, self.destinations, self.receives, self.rows[1]


class Side:
    """Collects the parts and the problems of one side of a plan: sources or destinations."""

    def __init__(
        self,
        name: str,
        channel: Channel,
        values: Mapping[str, torch.Tensor | Shard],
        layouts: Mapping[str, Layout],
    ) -> None:
        self.problems: list[Problem] = []
        self.unsettled: set[str] = set()
        self.is_contiguous = True
        self._name = name
        self.rank = channel.rank
        self._values = values
        self._layouts = layouts
        self._shards: dict[str, Shard] = {}
        self._absent: set[str] = set()
        self._wholes: dict[tuple[int, ...], tuple[Piece]] = {}
        self._parts: dict[Place, Part | None] = {}
        self.binding = Binding(self._shards, channel.device)

    def parts(self, plan: Plan, rows: Sequence[int]) -> list[Part]:
        """One part per row, as far as this rank has what the row asks for."""
        known = self._parts
        found = []
        for key, region in regions_of(plan, rows):
            place = (key, region.start, region.stop)
            try:
                part = known[place]
            except KeyError:
                part = known[place] = self._part(place, region)
            if part is not None:
                found.append(part)
        return found

    def _part(self, place: Place, region: Region) -> Part | None:
        key = place[0]
        shard = self._shards.get(key) or self._shard(key)
        box = None if shard is None else shard.find(region)
        if box is not None:
            part = Part(key, region, box.nbytes)
            self.binding.keep(place, box)
            self.is_contiguous &= not part.nbytes or box.flat(self.binding.device) is not None
            return part
        self.is_contiguous = False
        if shard is not None:
            held = ", ".join(str(piece.region) for piece in shard.pieces[:4]) or "nothing"
            self._refuse(key, "region", f"the {self._name} must hold {region}, but holds {held}")
        return None

    def _shard(self, key: str) -> Shard | None:
        """The Shard of a key, or None where there is none or it cannot be told yet."""
        if key in self._absent:
            return None
        try:
            shard = self._made(key)
        except KeyError:
            self._refuse(key, "missing", f"no {self._name} of this name was given")
        except PlanError as error:
            for problem in error.problems:
                self._refuse(key, problem.kind, problem.text)
        else:
            if shard is not None:
                self._shards[key] = shard
                return shard
            self.unsettled.add(key)
        self._absent.add(key)
        return None

    def _made(self, key: str) -> Shard | None:
        value = self._values[key]
        if isinstance(value, torch.Tensor) and type(value) in _PLAIN and not value.is_nested:
            shard = Shard(value, self._whole(tuple(value.shape)))
        else:
            layout = self._layouts.get(key)
            if layout is None and is_dtensor(value):
                readings = [layout for layout in readings_of(value) if fits(layout, value)]
                if len(readings) > 1 and not same_pieces(readings[0], readings[1], self.rank):
                    return None
                layout = readings[0] if readings else None
            shard = Shard.of(value, self.rank, layout)
        if self._name == "destination" and _repeats(shard.data):
            text = "several elements share one place in memory (an expanded tensor?)"
            raise PlanError(Problem(key, "stride", text))
        return shard

    def _whole(self, shape: tuple[int, ...]) -> tuple[Piece]:
        """The piece of a whole tensor; models have many tensors of few shapes."""
        pieces = self._wholes.get(shape)
        if pieces is None:
            whole = Region.of_shape(shape)
            pieces = self._wholes[shape] = (Piece(whole, whole.start),)
        return pieces

    def _refuse(self, key: str, kind: str, text: str) -> None:
        self.problems.append(Problem(f"rank {self.rank}, {key!r}", kind, text))


def _copy_problems(copies: list[Part], out: Side, into: Side) -> list[Problem]:
    """Where a rank's own source and destination differ in dtype."""
    problems = []
    for key in dict.fromkeys(part.key for part in copies):
        source, destination = out.binding.shards.get(key), into.binding.shards.get(key)
        if source is None or destination is None or source.data.dtype == destination.data.dtype:
            continue
        text = f"the source is {source.data.dtype}, the destination {destination.data.dtype}"
        problems.append(Problem(f"rank {out.rank}, {key!r}", "dtype", text))
    return problems


def _repeats(data: torch.Tensor) -> bool:
    """Whether a dim of the tensor repeats one and the same memory."""
    steps = data.stride()
    return 0 in steps and any(n > 1 for step, n in zip(steps, data.shape, strict=True) if not step)


def _number_of(dtype: torch.dtype) -> int:
    digest = blake2b(dtype_name(dtype).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _mixed(rows: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number of 64 bits per row, without any pattern that sums of other rows could undo.

    The finalizer of SplitMix64 (Steele, Lea and Flood, 2014); arithmetic modulo 2**64.
    """
    mixed = (rows + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), dtype=np.uint64)
