"""Communicators of replica groups: split once from their parent, kept, and given back.

The caches here are the state that the face has by its document. A communicator belongs to the
parent that it was split from; the parent is known by its `id`, so it has to be cleared before it
is replaced. A group that is dropped without that is forgotten; what was split from it is then
not destroyed, since its peers may be anywhere, and destroying is for all of them together.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from reshard.face import streams
from reshard.face.duck_types import Group, Signature, StatelessGroup
from reshard.face.regions import region_numel
from reshard.face.striped import ordered_replica_members

Key = tuple[int, Any]

SUBCOMM_CACHE: OrderedDict[Key, Any] = OrderedDict()
"""(id of the parent, signature) -> the communicator of this rank's replica group."""
INACTIVE_SUBCOMM_CACHE: OrderedDict[Key, Any] = OrderedDict()
"""The same for the communicators of ranks that are in no replica group: kept to be destroyed."""
PROCESS_GROUP_COMM_IDS: OrderedDict[int, set[int]] = OrderedDict()
"""id of a process group -> ids of the parents that it has had."""
PROCESS_GROUP_FINALIZERS: OrderedDict[int, weakref.finalize[..., Any]] = OrderedDict()
"""id of a process group -> what forgets it when it is gone."""


def parent_communicator_key(process_group: StatelessGroup) -> int:
    """The id of the group's communicator, which is noted as the group's own."""
    key, group_id = id(process_group.nccl_communicator), id(process_group)
    PROCESS_GROUP_COMM_IDS.setdefault(group_id, set()).add(key)
    if group_id not in PROCESS_GROUP_FINALIZERS:
        try:
            finalizer = weakref.finalize(process_group, finalize_process_group, group_id)
        except TypeError:  # no weak reference can be made to it
            return key
        finalizer.atexit = False
        PROCESS_GROUP_FINALIZERS[group_id] = finalizer
    return key


def active_replica_signature(destination_groups: Iterable[Group]) -> Signature:
    """Representative and members of every group of several ranks that hold something."""
    return tuple(
        (representative, members)
        for region, members, representative in destination_groups
        if len(members) > 1 and region_numel(region)
    )


def get_replica_subcommunicator(
    process_group: StatelessGroup, destination_groups: Iterable[Group], device: torch.device
) -> Any:
    """The communicator of this rank's replica group; None where it is in no such group.

    Collective over the whole group the first time that it sees these replica groups: one split,
    in which all ranks that are in none share one colour that is not used.
    """
    signature = active_replica_signature(destination_groups)
    key = parent_communicator_key(process_group), signature
    if not signature:
        return None
    if key in SUBCOMM_CACHE:
        return SUBCOMM_CACHE[key]
    if key in INACTIVE_SUBCOMM_CACHE:
        return None
    rank = process_group.rank
    color, place, cache = len(signature), rank, INACTIVE_SUBCOMM_CACHE
    for number, (representative, members) in enumerate(signature):
        if rank in members:
            color, cache = number, SUBCOMM_CACHE
            place = ordered_replica_members(representative, members).index(rank)
    streams.settle(device)
    cache[key] = process_group.nccl_communicator.split(color=color, key=place)
    return SUBCOMM_CACHE.get(key)


def destroy_subcommunicator(communicator: Any) -> None:
    """Finalize and destroy a communicator, as far as it has these methods."""
    for method in ("finalize", "destroy"):
        act = getattr(communicator, method, None)
        if callable(act):
            act()


def evict_communicators(comm_ids: Iterable[int]) -> None:
    """Destroy and forget what was split from these parents, in the order of the splits.

    Everything is forgotten even where something cannot be destroyed; then this raises an
    ExceptionGroup.
    """
    errors = []
    for communicator in _taken(set(comm_ids)):
        try:
            destroy_subcommunicator(communicator)
        except Exception as error:  # noqa: BLE001 - raised when all the others are destroyed too
            errors.append(error)
    if errors:
        raise ExceptionGroup("communicators that could not be destroyed", errors)


def finalize_process_group(process_group_id: int) -> None:
    """Forget a group that is gone, and what was split from its communicators."""
    PROCESS_GROUP_FINALIZERS.pop(process_group_id, None)
    _taken(_own_comm_ids(process_group_id))


def clear_process_group(process_group: object) -> None:
    """Destroy and forget what was split for one group. Collective over it."""
    group_id = id(process_group)
    finalizer = PROCESS_GROUP_FINALIZERS.pop(group_id, None)
    if finalizer is not None:
        finalizer.detach()
    ids = _own_comm_ids(group_id)
    if hasattr(process_group, "nccl_communicator"):
        ids.add(id(process_group.nccl_communicator))
    evict_communicators(ids)


def clear_all() -> None:
    """Destroy and forget everything that was split for any group."""
    for finalizer in PROCESS_GROUP_FINALIZERS.values():
        finalizer.detach()
    PROCESS_GROUP_FINALIZERS.clear()
    PROCESS_GROUP_COMM_IDS.clear()
    evict_communicators({key[0] for cache in _caches() for key in list(cache)})


def _own_comm_ids(process_group_id: int) -> set[int]:
    """The parents of a group that no other group has too; the group is forgotten."""
    ids = PROCESS_GROUP_COMM_IDS.pop(process_group_id, set())
    return ids.difference(*PROCESS_GROUP_COMM_IDS.values())


def _taken(comm_ids: set[int]) -> list[Any]:
    """Take what was split from these parents out of the caches."""
    return [cache.pop(key) for cache in _caches() for key in list(cache) if key[0] in comm_ids]


def _caches() -> tuple[dict[Key, Any], dict[Key, Any]]:
    return SUBCOMM_CACHE, INACTIVE_SUBCOMM_CACHE
