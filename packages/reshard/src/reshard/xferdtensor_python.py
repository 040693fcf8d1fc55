"""The names of NeMo-RL's weight_sync.xferdtensor_python, on the engine of this package.

Change the import and keep the code. `xferdtensor_python_impl` carries one tensor from a mesh and
placements to others, in place and without ever holding the whole tensor. It takes two kinds of
group:

- A torch process group of any backend (or a channel). The transfer is planned and executed by
  the engine of this package: balanced, over any Shard, strided and replicated placements, with
  ranks that take no part; and a mistake on one rank raises on all of them before a byte moves.
- The stateless kind: an object with an int `rank` and an `nccl_communicator`. Then everything is
  done in the steps below, by calls on that communicator: transfers into one rank of every replica
  group and a broadcast, or, where the shapes allow it, stripes for all of them and an all-gather.
  Here too the ranks tell each other of a mistake, by that communicator, before one of them sends.

The other names are the steps of the second kind, for code and tests that know them. Regions are
((start, stop), ...), groups (region, members, representative), transfers (source, receiver,
region). Plans and communicators are kept in the caches below; `clear_xferdtensor_python_caches`
empties them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch

from distcore.v1.runtime import Group as ProcessGroup
from distcore.v1.runtime import channel_over
from reshard.face import (
    communicators,
    engine,
    exact,
    local_parts,
    meshes,
    regions,
    staging,
    streams,
    striped,
)
from reshard.face.council import Council
from reshard.face.duck_types import (
    Geometry,
    Mesh,
    StatelessGroup,
    StripedGeometry,
    TensorLike,
)
from reshard.face.offers import Side, Terms, form_of
from reshard.plan import ReshardPlan

__all__ = ["clear_xferdtensor_python_caches", "xferdtensor_python_impl"]

_READ: Final = "reshard: src_tensor and dst_tensor, their meshes and placements"
_STAGE: Final = "reshard: stage src_tensor and dst_tensor"

V = TypeVar("V")
Cache = OrderedDict[Any, V]

# Ranks may be threads of one process.
_LOCK: Final = threading.Lock()

_PLAN_CACHE: Cache[Any] = OrderedDict()
_PLAN_CACHE_MAX_SIZE: int = 1024
_STRIPED_PLAN_CACHE: Cache[Any] = OrderedDict()
_STRIPED_PLAN_CACHE_MAX_SIZE: int = 1024
_SUBCOMM_CACHE: Final = communicators.SUBCOMM_CACHE
_INACTIVE_SUBCOMM_CACHE: Final = communicators.INACTIVE_SUBCOMM_CACHE
_PROCESS_GROUP_COMM_IDS: Final = communicators.PROCESS_GROUP_COMM_IDS
_PROCESS_GROUP_FINALIZERS: Final = communicators.PROCESS_GROUP_FINALIZERS

# Meshes and placements
_mesh_rank_tensor = meshes.mesh_rank_tensor
_mesh_ranks = meshes.mesh_ranks
_mesh_signature = meshes.mesh_signature
_mesh_coordinates = meshes.mesh_coordinates
_normalize_shard_dim = meshes.normalize_shard_dim
_placement_signature = meshes.placement_signature
_validate_layout = meshes.validate_layout

# Regions
_compute_shard_slices = regions.compute_shard_slices
_rank_regions = regions.rank_regions
_intersect = regions.intersect
_local_slices = regions.local_slices
_region_numel = regions.region_numel
_region_view_is_contiguous = regions.region_view_is_contiguous

# Plans
_destination_groups = exact.destination_groups
_build_exact_plan = exact.build_exact_plan
_ordered_replica_members = striped.ordered_replica_members
_build_striped_targets = striped.build_striped_targets
_build_striped_transfers = striped.build_striped_transfers
_max_p2p_peer_degree = striped.max_p2p_peer_degree
_remote_transfers_avoid_double_staging = striped.remote_transfers_avoid_double_staging

# What a rank has
_local_tensor = local_parts.local_tensor
_tensor_metadata = local_parts.tensor_metadata
_validate_local_inputs = local_parts.validate_local_inputs

# Communicators
_parent_communicator_key = communicators.parent_communicator_key
_active_replica_signature = communicators.active_replica_signature
_get_replica_subcommunicator = communicators.get_replica_subcommunicator
_destroy_subcommunicator = communicators.destroy_subcommunicator
_evict_communicators = communicators.evict_communicators
_finalize_process_group = communicators.finalize_process_group

# Moving
_stage_rank_operations = staging.stage_rank_operations
_exchange_exact_overlaps = staging.exchange_exact_overlaps
_broadcast_destination = staging.broadcast_destination
_destination_buffer = staging.destination_buffer
_stage_striped_operations = staging.stage_striped_operations
_allgather_destination = staging.allgather_destination


def _plan_geometry(
    src_mesh: Mesh,
    src_placements: Sequence[object],
    dst_mesh: Mesh,
    dst_placements: Sequence[object],
    global_shape: Sequence[int],
) -> Geometry:
    """The Regions of both sides, the groups of the destination, and the exact plan.

    Pure but for the cache: what was planned before is the same object again. Raises ValueError
    and NotImplementedError as `_validate_layout` does.
    """

    def make() -> Geometry:
        _validate_layout(src_mesh, src_placements, global_shape, "src")
        _validate_layout(dst_mesh, dst_placements, global_shape, "dst")
        src_regions = _rank_regions(src_mesh, src_placements, global_shape)
        dst_regions = _rank_regions(dst_mesh, dst_placements, global_shape)
        groups = _destination_groups(dst_mesh, dst_placements, dst_regions)
        transfers = _build_exact_plan(src_regions, _mesh_ranks(src_mesh), groups)
        return src_regions, dst_regions, groups, transfers

    key = _plan_key(src_mesh, src_placements, dst_mesh, dst_placements, global_shape)
    return _cached(_PLAN_CACHE, key, _PLAN_CACHE_MAX_SIZE, make)


def _striped_geometry(
    src_mesh: Mesh,
    src_placements: Sequence[object],
    dst_mesh: Mesh,
    dst_placements: Sequence[object],
    global_shape: Sequence[int],
) -> StripedGeometry | None:
    """The same with the striped plan, and the stripe of every rank; None where none is worth it.

    That is where no stripes can be made, or a part of them would have to be packed at both ends.
    """
    args = src_mesh, src_placements, dst_mesh, dst_placements, global_shape

    def make() -> StripedGeometry | None:
        src_regions, dst_regions, groups, _ = _plan_geometry(*args)
        made = _build_striped_targets(groups)
        if made is None:
            return None
        targets, stripes_by_rank = made
        transfers = _build_striped_transfers(src_regions, _mesh_ranks(src_mesh), targets)
        if not _remote_transfers_avoid_double_staging(transfers, src_regions, dst_regions):
            return None
        return src_regions, dst_regions, groups, transfers, stripes_by_rank

    return _cached(_STRIPED_PLAN_CACHE, _plan_key(*args), _STRIPED_PLAN_CACHE_MAX_SIZE, make)


def clear_xferdtensor_python_caches(process_group: object = None) -> None:
    """Empty the plan caches and destroy the communicators that were split.

    With a group: the striped plans, and what was split for that group. Without one: everything.
    Part of the protocol of the stateless kind: all ranks of the group call it at the same place,
    when no work on the device is under way, before the parent communicator is replaced or
    destroyed.
    """
    with _LOCK:
        _STRIPED_PLAN_CACHE.clear()
        if process_group is None:
            _PLAN_CACHE.clear()
    if process_group is not None:
        communicators.clear_process_group(process_group)
    else:
        communicators.clear_all()


def _xferdtensor_python_impl_v1(  # noqa: PLR0917 - the signature that users know
    src_tensor: TensorLike | None,
    src_mesh: Mesh,
    src_placement: Sequence[object],
    dst_tensor: TensorLike | None,
    dst_mesh: Mesh,
    dst_placement: Sequence[object],
    process_group: StatelessGroup,
    stream: Any = None,
) -> None:
    """Carry `src_tensor` into `dst_tensor` by the exact plan and a broadcast per replica group.

    For the stateless kind of group. Collective; every rank of the communicator calls it, in the
    same order.
    """
    sides = src_tensor, src_mesh, src_placement, dst_tensor, dst_mesh, dst_placement
    council = Council.over(process_group, (src_tensor, dst_tensor), stream)
    with council.failures(_READ):
        global_shape, device, dtype = _tensor_metadata(src_tensor, dst_tensor)
        src_regions, dst_regions, groups, transfers = _plan_geometry(
            src_mesh, src_placement, dst_mesh, dst_placement, global_shape
        )
    rank = process_group.rank
    with streams.entered(device, stream) as used:
        with council.step(_READ, partial(_told, *sides)):
            _validate_local_inputs(
                rank, src_tensor, dst_tensor, src_regions, dst_regions, device, dtype
            )
        subcommunicator = _get_replica_subcommunicator(process_group, groups, device)
        with council.step(_STAGE):
            sends, receives, dst_local = _stage_rank_operations(
                rank,
                src_tensor,
                dst_tensor,
                src_regions,
                dst_regions,
                transfers,
                device,
                dtype,
                used,
            )
        _exchange_exact_overlaps(process_group.nccl_communicator, sends, receives, used)
        _broadcast_destination(subcommunicator, dst_local, used)


def xferdtensor_python_impl(  # noqa: PLR0917 - the signature that users know
    src_tensor: TensorLike | None,
    src_mesh: Mesh,
    src_placement: Sequence[object],
    dst_tensor: TensorLike | None,
    dst_mesh: Mesh,
    dst_placement: Sequence[object],
    process_group: StatelessGroup | ProcessGroup | None,
    stream: Any = None,
) -> None:
    """Carry `src_tensor` into `dst_tensor`: afterwards every destination rank holds its part.

    Collective; every rank of `process_group` calls it, in the same order, with equal meshes and
    placements. A tensor has a global shape, a dtype, a device and a local tensor
    (`_local_tensor` or `to_local()`); it is None on ranks outside its mesh, or has None as its
    local tensor there. The destination is written in place, Parameters and strided tensors too.
    `stream` is the CUDA stream on which everything is enqueued, by default the current one.

    With a torch process group (None is the default group) the ranks of meshes are global ranks
    of that group. Every mistake raises on every rank and before a destination has changed:
    PeerError where one rank's own arguments are wrong (where all ranks fail alike, each raises
    its own ValueError or NotImplementedError instead), DisagreementError where ranks describe
    the tensors or the meshes differently.

    With the stateless kind the ranks are those of its communicator, every rank has at least one
    tensor, and placements are Shard or Replicate: ValueError and NotImplementedError on the rank
    that sees the mistake. The others raise PeerError, and all DisagreementError where they
    describe things differently, before any rank has sent or received; see `reshard.face.council`
    for when ranks can tell each other. A rank that fails after that, for want of memory, may have
    copied what it holds itself into its destination.
    """
    sides = src_tensor, src_mesh, src_placement, dst_tensor, dst_mesh, dst_placement
    if not hasattr(process_group, "nccl_communicator"):
        _carry(*sides, process_group, stream)
        return
    group = cast("StatelessGroup", process_group)
    council = Council.over(group, (src_tensor, dst_tensor), stream)
    with council.failures(_READ):
        global_shape, device, dtype = _tensor_metadata(src_tensor, dst_tensor)
        plan = _striped_geometry(src_mesh, src_placement, dst_mesh, dst_placement, global_shape)
    if plan is None:
        _xferdtensor_python_impl_v1(*sides, group, stream)
        return
    src_regions, dst_regions, groups, transfers, stripes = plan
    rank = group.rank
    with streams.entered(device, stream) as used:
        with council.step(_READ, partial(_told, *sides)):
            _validate_local_inputs(
                rank, src_tensor, dst_tensor, src_regions, dst_regions, device, dtype
            )
        subcommunicator = _get_replica_subcommunicator(group, groups, device)
        with council.step(_STAGE):
            local = _local_tensor(dst_tensor)
            buffer, copies_back = _destination_buffer(local, device, dtype, used)
            sends, receives = _stage_striped_operations(
                rank, src_tensor, buffer, src_regions, dst_regions, transfers, device, dtype, used
            )
        _exchange_exact_overlaps(group.nccl_communicator, sends, receives, used)
        if rank in stripes:
            _allgather_destination(subcommunicator, buffer, dst_regions[rank], stripes[rank], used)
        if copies_back and local is not None and buffer is not None:
            with torch.no_grad():
                local.copy_(buffer)


def _told(  # noqa: PLR0917 - as above
    src_tensor: TensorLike | None,
    src_mesh: Mesh,
    src_placement: Sequence[object],
    dst_tensor: TensorLike | None,
    dst_mesh: Mesh,
    dst_placement: Sequence[object],
) -> str:
    """What all ranks must have been asked for alike, as text: the shortest first."""
    shape, _, dtype = _tensor_metadata(src_tensor, dst_tensor)
    sides = (
        ("src_tensor", src_mesh, src_placement),
        ("dst_tensor", dst_mesh, dst_placement),
    )
    placed = [f"{name} as {[form_of(one) for one in placements]}" for name, _, placements in sides]
    meshes = [f"{name} on {_mesh_signature(mesh)}" for name, mesh, _ in sides]
    return ", ".join([f"{dtype} {list(shape)}", *placed, *meshes])


def _carry(  # noqa: PLR0917 - as above
    src_tensor: TensorLike | None,
    src_mesh: Mesh,
    src_placement: Sequence[object],
    dst_tensor: TensorLike | None,
    dst_mesh: Mesh,
    dst_placement: Sequence[object],
    process_group: ProcessGroup | None,
    stream: Any,
) -> None:
    """Carry over a torch process group or a channel."""

    def read_sides() -> tuple[Side, Side]:
        return (
            Side.of("src_tensor", src_mesh, src_placement),
            Side.of("dst_tensor", dst_mesh, dst_placement),
        )

    with channel_over(process_group) as channel:
        engine.carry((src_tensor, dst_tensor), read_sides, channel, planner=_planned, stream=stream)


def _planned(sides: tuple[Side, Side], terms: Terms) -> ReshardPlan:
    """The engine's plan, kept among the plans of this face."""
    key = sides[0].key, sides[1].key, terms
    return _cached(_PLAN_CACHE, key, _PLAN_CACHE_MAX_SIZE, lambda: engine.plan_of(sides, terms))


def _plan_key(
    src_mesh: Mesh,
    src_placements: Sequence[object],
    dst_mesh: Mesh,
    dst_placements: Sequence[object],
    global_shape: Sequence[int],
) -> tuple[object, ...]:
    ndim = len(global_shape)
    return (
        _mesh_signature(src_mesh),
        _placement_signature(src_placements, ndim),
        _mesh_signature(dst_mesh),
        _placement_signature(dst_placements, ndim),
        tuple(int(n) for n in global_shape),
    )


def _cached(cache: Cache[Any], key: object, max_size: int, make: Callable[[], V]) -> V:
    """What `make` returned for this key before, or returns now.

    Beyond `max_size` the entry goes that has not been asked for longest.
    """
    with _LOCK:
        if key in cache:
            cache.move_to_end(key)
            found: V = cache[key]
            return found
    made = make()
    with _LOCK:
        made = cache.setdefault(key, made)
        cache.move_to_end(key)
        while len(cache) > max_size:
            cache.popitem(last=False)
    return made
