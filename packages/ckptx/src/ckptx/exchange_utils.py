"""The names of Megatron-Core's dist_checkpointing.exchange_utils, on ckptx's own engine.

Change the import and keep the code. What differs is said in each docstring; in short: any device
and backend, no pickle from files or other ranks, inputs unchanged, and a mistake on one rank is
the same error on all. `exchange_algo` also takes "planned", which is the fast one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final, Literal, TypeVar

import torch

from ckptx import cache, distribution, full_gather, inner, objects, shard_table
from ckptx.cached_plans import PlanCache
from ckptx.distribution import ShardDistribution
from ckptx.errors import as_checkpoint_errors
from ckptx.exchange import DEFAULT_STAGING_NBYTES, ExchangeOptions, exchange
from ckptx.sharded import ObjectId, ShardedTensor, ShardId
from distcore.v1.runtime import Group, channel_over

__all__ = [
    "PG_DIST_CACHE_FILE_PREFIX",
    "ShardDistribution",
    "T",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "is_float8tensor",
    "logger",
]

T = TypeVar("T")
logger: Final = logging.getLogger(__name__)
PG_DIST_CACHE_FILE_PREFIX: Final = "pg_dist"

# The one memo of this package: file of a group -> the plans that were last used with it. It is
# checked against the caller's shards before it is obeyed.
_PG_DIST_CACHE: dict[str, dict[bool, ShardDistribution]] = {}

Tensors = dict[ShardId, torch.Tensor]


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Whether it is a quantised tensor of Transformer Engine, which need not be installed."""
    return inner.is_float8tensor(tensor)


def _shard_size(sh_ten: ShardedTensor) -> int:
    """The bytes of a shard: an int, whatever its shape."""
    return distribution.shard_nbytes(sh_ten)


def _get_empty_tensor_for_exchange(
    shard_id: ShardId,
    needed_shards: Mapping[ShardId, ShardedTensor],
    unneeded_shards: Mapping[ShardId, ShardedTensor],
    loaded_tensors: Tensors,
) -> tuple[torch.Tensor, torch.device | None]:
    """The tensor into which a shard is received, and the device on which it is wanted.

    A needed shard's own data where it has some, else a new tensor on torch's default device; it is
    entered in `loaded_tensors`. For a shard that is not needed: a new tensor to be thrown away,
    and None. KeyError where neither mapping has the shard.
    """
    shard = needed_shards.get(shard_id)
    if shard is None:
        shard = unneeded_shards[shard_id]
        device = None if shard.data is None else shard.data.device
        return inner.empty_tensor(shard.local_shape, shard.dtype, device), None
    tensor = shard.data
    if tensor is None:
        tensor = inner.empty_tensor(shard.local_shape, shard.dtype, None)
    loaded_tensors[shard_id] = tensor
    return tensor, tensor.device


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[T, Collection[int]],
    shard_to_size: Mapping[T, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[T],
) -> dict[T, int]:
    """Give each shard to the rank, of those that have it, with the fewest bytes so far.

    See `ckptx.distribution.distribute_shards_to_ranks`.
    """
    return distribution.distribute_shards_to_ranks(
        shard_to_ranks, shard_to_size, num_ranks, cross_parallelization_group_loads
    )


def _gather_shards_metadata(
    sharded_state_dict: object,
    parallelization_group: Group | None,
    *,
    timeout: float | timedelta | None = None,
) -> list[list[ShardedTensor]]:
    """The shards of every rank, without data, by index. Collective; they travel as JSON.

    Nested dicts and lists are entered, tuples and other leaves passed by.
    """
    with as_checkpoint_errors(), channel_over(parallelization_group) as channel:
        return shard_table.gather_tables(sharded_state_dict, channel, timeout_s=_seconds(timeout))


def _build_shard_distribution(
    all_shards: Sequence[Sequence[ShardedTensor]], ignore_groups: bool
) -> ShardDistribution:
    """The distribution for a load (`ignore_groups=True`) or a save. Pure.

    CheckpointPlanError where ranks describe one shard differently, and in a save where two ranks
    claim its main copy.
    """
    rows = distribution.shard_rows(all_shards)
    return distribution.distribution_of(rows, len(all_shards), ignore_groups=ignore_groups)


def _pg_dist_cache_file_path(
    cache_path: str | os.PathLike[str], parallelization_group: Group | None
) -> str:
    """Where the plans of a group lie, a name that no other group has. Local."""
    with channel_over(parallelization_group) as channel:
        return cache.cache_file(cache_path, channel.ranks, prefix=PG_DIST_CACHE_FILE_PREFIX)


def _load_pg_dist_cache(cache_file: str) -> dict[bool, ShardDistribution]:
    """Both distributions of the layout that was last written to a file, by `ignore_groups`.

    FileNotFoundError where there is no file, FormatError where it is no plan cache.
    """
    return cache.read_layouts(cache_file)[-1].plans()


def _create_pg_dist_cache(
    all_shards: Sequence[Sequence[ShardedTensor]],
    cache_path: str | os.PathLike[str],
    parallelization_group: Group | None,
    *,
    timeout: float | timedelta | None = None,
) -> dict[bool, ShardDistribution]:
    """Write both distributions of gathered shards and return them. Collective.

    The rank with the lowest number writes; when any rank returns, the file is there.
    """
    with as_checkpoint_errors(), channel_over(parallelization_group) as channel:
        file = cache.cache_file(cache_path, channel.ranks, prefix=PG_DIST_CACHE_FILE_PREFIX)
        return PlanCache(file, {}, channel, _seconds(timeout)).write(all_shards)


def determine_main_replica_uniform_distribution(
    sharded_state_dict: object,
    parallelization_group: Group | None,
    ignore_groups: bool = False,
    pg_cache_path: str | os.PathLike[str] | None = None,
    pg_cache_create: bool = False,
    *,
    trust: bool = False,
    on_stale: Literal["replan", "error"] = "replan",
    timeout: float | timedelta | None = None,
) -> ShardDistribution | None:
    """Who reads or writes which shard of the group; None for a group of one.

    Collective over the group (None is the default group). Without `pg_cache_path` the shards of
    all ranks are gathered. With `pg_cache_create` the plans are written there too. With a path
    alone they come from there, once 32 bytes per rank have proven that they are those of the
    present shards; if they are not, they are made anew with a warning, or with
    `on_stale="error"` StalePlanError is raised. `trust` leaves out the proof between ranks: each
    only looks whether the cache has its own shards, and raises StalePlanError if not.
    """
    with as_checkpoint_errors(), channel_over(parallelization_group) as channel:
        if channel.size == 1:
            return None
        timeout_s = _seconds(timeout)
        if pg_cache_path is None:
            all_shards = shard_table.gather_tables(sharded_state_dict, channel, timeout_s=timeout_s)
            return _build_shard_distribution(all_shards, ignore_groups)
        file = cache.cache_file(pg_cache_path, channel.ranks, prefix=PG_DIST_CACHE_FILE_PREFIX)
        plans = PlanCache(file, _PG_DIST_CACHE, channel, timeout_s)
        if pg_cache_create:
            return plans.create(sharded_state_dict)[ignore_groups]
        if trust:
            return plans.trust(sharded_state_dict)[ignore_groups]
        return plans.read(sharded_state_dict, on_stale=on_stale)[ignore_groups]


def exchange_loaded_tensors_gather_rounds(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None = None,
    parallelization_group: Group | None = None,
) -> Tensors:
    """Exchange in rounds, dtype by dtype, one tensor of each loader per round. Collective.

    Messages go to the ranks that need them, so tensors of one round may differ in size.
    """
    return exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, "gather_rounds"
    )


def exchange_loaded_tensors_gather_object(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Group | None = None,
) -> Tensors:
    """Every shard that any rank has loaded comes to every rank. Collective, for debugging.

    The distribution is not looked at. CheckpointPlanError ("Duplicate shard ids") on all ranks
    where two have loaded one shard. Tensors move as bytes; nothing is pickled.
    """
    return exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, "gather_object"
    )


def exchange_loaded_objects_gather_object(
    loaded_objects: Mapping[ShardId | ObjectId, Any],
) -> dict[ShardId | ObjectId, Any]:
    """Every object that any rank of the default group has loaded comes to every rank. Collective.

    Objects travel as data: plain values, containers of them, tensors, arrays and byte streams.
    PeerError on all ranks for any other type.
    """
    with as_checkpoint_errors(), channel_over(None) as channel:
        return objects.gather_objects(loaded_objects, channel)


def exchange_loaded_tensors_broadcast(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Group | None = None,
) -> Tensors:
    """Exchange one tensor after the other, each from its loader to all that need it. Collective."""
    return exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, "broadcast"
    )


def exchange_by_distribution(
    loaded_tensors: Tensors,
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution | None,
    parallelization_group: Group | None = None,
    exchange_algo: str = "broadcast",
    *,
    max_staging_bytes: int = DEFAULT_STAGING_NBYTES,
    verify: Literal["xxh3"] | None = None,
    same_host: Literal["auto", "off"] = "auto",
    device: str | torch.device | None = None,
    timeout: float | timedelta | None = None,
) -> Tensors:
    """Return the tensors that this rank has loaded and those that it needs, by shard id.

    Collective. `exchange_algo` is "broadcast", "gather_rounds", "gather_object" (which returns
    every shard of the group) or "planned": only to ranks that need it, small shards packed,
    `max_staging_bytes` held at most, proven by digests if `verify` is "xxh3", through memory
    between ranks of one host. All give the same bits, whatever dtype, strides or class a tensor
    has; quantised tensors are never converted.

    `parallelization_group` is a process group or a Channel. Ranks of one host find each other
    anew in each call with a process group; a GroupChannel that is kept spares them that.

    A shard with data is received in place and returned as that tensor; others are made on
    `device`, by default the one that the group's messages use. `timeout` bounds each wait.

    Raises, on every rank, before a tensor has changed: ExchangeError (an AssertionError, as users
    of Megatron-Core know it) where the distribution is None or does not fit, UnknownAlgorithmError
    (a NotImplementedError); CheckpointPeerError where that is so on one rank only,
    CheckpointDisagreement where the ranks have different distributions.
    """
    options = ExchangeOptions(
        max_staging_bytes=max_staging_bytes,
        verify=verify,
        timeout_s=_seconds(timeout),
        same_host=same_host,
        device=device,
    )
    with as_checkpoint_errors(), channel_over(parallelization_group) as channel:
        if exchange_algo == "gather_object":
            return full_gather.gather_all(loaded_tensors, unloaded_shards, channel, options=options)
        tensors, report = exchange(
            loaded_tensors,
            unloaded_shards,
            shard_distribution,
            channel,
            algorithm=exchange_algo,
            options=options,
        )
    logger.debug("%s", report)
    return tensors


def _seconds(timeout: float | timedelta | None) -> float | None:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
