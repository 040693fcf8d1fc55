"""The striped plan: every rank of a replica group receives a stripe, then they gather.

The local tensor of a group is cut along dim 0 into as many equal stripes as the group has ranks.
In row-major memory these lie one behind the other, so one all-gather in place puts them together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reshard.face.duck_types import Group, Region, Regions, Target, Transfer
from reshard.face.exact import Overlaps, holders_of
from reshard.face.regions import region_numel, region_view_is_contiguous


def ordered_replica_members(representative: int, members: Sequence[int]) -> tuple[int, ...]:
    """The ranks of a group in the order of their communicator: the representative first."""
    return (representative, *(rank for rank in members if rank != representative))


def build_striped_targets(
    destination_groups: Iterable[Group],
) -> tuple[tuple[Target, ...], dict[int, Region]] | None:
    """Who receives which Region, and the stripe of every rank that shares its Region.

    None where no stripes can be made: where no group has two ranks, or dim 0 of one with more
    does not divide by their number.
    """
    targets: list[Target] = []
    stripes: dict[int, Region] = {}
    for region, members, representative in destination_groups:
        if not region_numel(region):
            continue
        count = len(members)
        if count == 1:
            targets.append((region, representative))
            continue
        if not region or (region[0][1] - region[0][0]) % count:
            return None
        start, stop = region[0]
        step = (stop - start) // count
        for at, rank in enumerate(ordered_replica_members(representative, members)):
            stripes[rank] = ((start + at * step, start + (at + 1) * step), *region[1:])
            targets.append((stripes[rank], rank))
    return (tuple(targets), stripes) if stripes else None


def build_striped_transfers(
    src_regions: Regions, src_ranks: Sequence[int], targets: Iterable[Target]
) -> tuple[Transfer, ...]:
    """The transfers into every target, ascending.

    What a receiver holds itself it copies; for all else the holders of a source Region take
    turns.
    """
    sources = Overlaps(holders_of(src_regions, src_ranks))
    turns: dict[Region, int] = {}
    found = []
    for region, receiver in targets:
        for held, ranks, common in sources.of(region):
            if receiver in ranks:
                found.append((receiver, receiver, common))
                continue
            turn = turns.get(held, 0)
            turns[held] = turn + 1
            found.append((ranks[turn % len(ranks)], receiver, common))
    return tuple(sorted(found))


def max_p2p_peer_degree(transfers: Iterable[Transfer]) -> int:
    """The most different ranks that one rank sends to or receives from."""
    peers: dict[int, set[int]] = {}
    for source, receiver, _ in transfers:
        if source != receiver:
            peers.setdefault(source, set()).add(receiver)
            peers.setdefault(receiver, set()).add(source)
    return max(map(len, peers.values()), default=0)


def remote_transfers_avoid_double_staging(
    transfers: Iterable[Transfer], src_regions: Regions, dst_regions: Regions
) -> bool:
    """Whether everything that crosses ranks lies in order at one of its ends at least."""
    return all(
        source == receiver
        or region_view_is_contiguous(common, src_regions[source])
        or region_view_is_contiguous(common, dst_regions[receiver])
        for source, receiver, common in transfers
    )
