"""Full gather: every rank gets every shard that any rank has loaded, needed or not.

For debugging: it looks at no distribution. What ranks have loaded is told as JSON and tensors
move as bytes, so nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckptx.errors import CheckpointPlanError
from ckptx.exchange import ExchangeOptions
from ckptx.inner import empty_tensor, inner_form, inner_tensors, parts_of
from ckptx.part import Tensors, name_of, place_for
from ckptx.shard_table import gather_bytes
from ckptx.sharded import ShardedTensor, ShardId
from distcore.v1 import Channel, Plan, Problem, Region, Transfer
from distcore.v1.runtime import dtype_name, execute, run_together, torch_dtype


def gather_all(
    loaded: Mapping[ShardId, torch.Tensor],
    needed: Mapping[ShardId, ShardedTensor],
    channel: Channel,
    *,
    options: ExchangeOptions | None = None,
) -> Tensors:
    """Return the shards of all ranks, by rank, each rank's in its own order. Collective.

    A shard that is in `needed` with data is received in place; others are made, on the kind of
    device that they come from. Raises CheckpointPlanError ("Duplicate shard ids") on every rank
    where two ranks have loaded one shard, and PeerError where one needs what none has loaded.
    """
    options = options or ExchangeOptions()
    timeout_s = options.timeout_s
    label = options.label("gather_object")
    own = run_together(label, lambda: _describe(loaded), channel, timeout_s=timeout_s)
    rows = gather_bytes(own, channel, timeout_s=timeout_s)
    known = [[_Loaded.of(row) for row in json.loads(table)] for table in rows]
    _refuse_duplicates(known, channel.ranks)

    def make_room() -> tuple[Tensors, dict[str, torch.Tensor]]:
        return _room(known, loaded, needed, channel, options.device)

    found, places = run_together("make room for shards", make_room, channel, timeout_s=timeout_s)
    sources = {
        name_of(name) + path: part
        for name, tensor in loaded.items()
        for path, part in inner_tensors(tensor).items()
    }
    execute(
        _plan(known, channel.ranks),
        channel,
        sources,
        places,
        max_staging_bytes=options.max_staging_bytes,
        verify=options.verify,
        timeout=timeout_s,
        same_host=options.same_host,
    )
    return found


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A shard that some rank has loaded, as it told the others."""

    name: ShardId
    dtype: str
    shape: tuple[int, ...]
    device: str
    form: str | None

    @classmethod
    def of(cls, row: list[Any]) -> _Loaded:
        key, offset, flat, dtype, shape, device, form = row
        name = (key, tuple(offset), None if flat is None else (flat[0], flat[1]))
        return cls(name, dtype, tuple(shape), device, form)

    def place(
        self, shard: ShardedTensor | None, channel: Channel, device: str | torch.device | None
    ) -> torch.Tensor:
        """Where a rank receives it."""
        if device is None:
            same = torch.device(channel.device).type == self.device
            device = channel.device if same else self.device
        if shard is None and self.form is None:
            return empty_tensor(self.shape, torch_dtype(self.dtype), device)
        if shard is None:
            text = f"comes as {self.form}, of which this rank has none to receive it in"
            raise CheckpointPlanError(Problem(name_of(self.name), "class", text))
        if (dtype_name(shard.dtype), shard.local_shape) != (self.dtype, self.shape):
            text = f"comes as {self.dtype} {self.shape}, needs {shard.dtype} {shard.local_shape}"
            raise CheckpointPlanError(Problem(name_of(self.name), "exchange", text))
        found = place_for(shard, device)
        if inner_form(found) != self.form:
            text = f"comes as {self.form or 'a plain tensor'}, is {inner_form(found) or 'plain'}"
            raise CheckpointPlanError(Problem(name_of(self.name), "class", text))
        return found


def _describe(loaded: Mapping[ShardId, torch.Tensor]) -> bytes:
    rows = []
    for (key, offset, flat), tensor in loaded.items():
        inner_tensors(tensor)  # refuses what cannot be sent
        dtype, shape = dtype_name(tensor.dtype), list(tensor.shape)
        rows.append([key, offset, flat, dtype, shape, tensor.device.type, inner_form(tensor)])
    return json.dumps(rows).encode()


def _refuse_duplicates(known: Sequence[Sequence[_Loaded]], ranks: Sequence[int]) -> None:
    holders: dict[ShardId, list[int]] = {}
    for rank, shards in zip(ranks, known, strict=True):
        for shard in shards:
            holders.setdefault(shard.name, []).append(rank)
    problems = [
        Problem(name_of(name), "duplicate", f"Duplicate shard ids: loaded by ranks {held}")
        for name, held in holders.items()
        if len(held) > 1
    ]
    if problems:
        raise CheckpointPlanError(problems)


def _plan(known: Sequence[Sequence[_Loaded]], ranks: Sequence[int]) -> Plan:
    return Plan(
        Transfer(name_of(shard.name) + path, src, dst, Region.of_shape(shape))
        for src, shards in zip(ranks, known, strict=True)
        for shard in shards
        for path, _, shape in (
            [("", "", shard.shape)] if shard.form is None else parts_of(shard.form)
        )
        for dst in ranks
        if dst != src
    )


def _room(
    known: Sequence[Sequence[_Loaded]],
    loaded: Mapping[ShardId, torch.Tensor],
    needed: Mapping[ShardId, ShardedTensor],
    channel: Channel,
    device: str | torch.device | None,
) -> tuple[Tensors, dict[str, torch.Tensor]]:
    """All shards: the own ones as they are, and room for the rest; and its plain tensors."""
    there = {shard.name for shards in known for shard in shards}
    missing = [name for name in needed if name not in there]
    if missing:
        text = "is needed by this rank, but loaded by none"
        raise CheckpointPlanError(Problem(name_of(name), "missing", text) for name in missing)
    found: Tensors = {}
    places: dict[str, torch.Tensor] = {}
    for index, shards in enumerate(known):
        for shard in shards:
            if index == channel.index:
                found[shard.name] = loaded[shard.name]
                continue
            found[shard.name] = shard.place(needed.get(shard.name), channel, device)
            for path, part in inner_tensors(found[shard.name]).items():
                places[name_of(shard.name) + path] = part
    return found, places
