"""Schedule: in which rounds and messages one rank plays its part of a plan.

Both ends of every pair derive the same messages from the plan alone, so no message needs a
header:

- The transfers between a pair, in plan order, are cut into parts that never exceed the pair's
  quota of staging memory. Large parts travel as buffers of their own, small ones are packed.
- The parts of a pair fill batches, at most a quota each. The k-th batches of all pairs of one
  phase make a round.
- A phase joins each rank with at most `PEERS` ranks to send to and as many to receive from, so
  that neither memory nor open operations grow with the group. There are as few phases as can be
  (see `distcore.v1.matching`), so that few have to wait for others. Where the pairs are very
  many, or most ranks have most others as peers, they go by distance in the group instead.

Two rounds may be in flight, hence quota = staging / (2 rounds * 2 directions * peers), which is
never exceeded but by parts that are not staged.
Since rounds are ordered alike on all ranks, the earliest unfinished one can always finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from distcore.v1.matching import Pair, matchings, pairs_of
from distcore.v1.packing import ALIGNMENT, cut_rounds
from distcore.v1.plan import Plan
from distcore.v1.region import Region

PEERS: Final = 8
OWN_BUFFER_NBYTES: Final = 1 << 18
"""A part of this size costs more to be copied twice than to be a message of its own."""
DIRECT_NBYTES: Final = 1 << 28
MAX_PARTS: Final = 8192
MAX_MATCHED: Final = 1 << 14
"""More pairs than this take longer to be dealt out than it would save: 0.1 s for these."""


class Part(NamedTuple):
    """A Region of one tensor that travels as a whole: (part of) one transfer."""

    key: str
    region: Region
    nbytes: int


@dataclass(frozen=True, slots=True)
class Batch:
    """What one rank sends to, or receives from, `peer` in one round.

    `buffers` are runs of parts: one part alone is a buffer of its own, several are packed.
    """

    peer: int
    parts: tuple[Part, ...]
    buffers: tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """The batches that one rank has in flight at the same time."""

    sends: tuple[Batch, ...]
    receives: tuple[Batch, ...]


@dataclass(frozen=True, slots=True)
class Terms:
    """What both ends of a pair know about each other beside the plan.

    `scatters(peer)`: many small buffers cost nothing, so nothing is packed.
    `direct(peer)`: all parts of both ranks lie contiguous on the channel's device, so nothing is
    staged and the quota does not matter. `digest_nbytes` are sent, and staged, with each part.
    """

    staging_nbytes: int
    scatters: Callable[[int], bool]
    direct: Callable[[int], bool]
    digest_nbytes: int = 0


def rows_of(plan: Plan, rank: int) -> tuple[list[int], dict[int, list[int]], dict[int, list[int]]]:
    """The rows of a plan that concern `rank`: its local copies, its sends and its receives by peer.

    >>> from distcore.v1 import Transfer
    >>> region = Region((), ())
    >>> plan = Plan([Transfer("w", 0, 0, region), Transfer("w", 0, 1, region)])
    >>> rows_of(plan, 0)
    ([0], {1: [1]}, {})
    """
    local: list[int] = []
    sends: dict[int, list[int]] = {}
    receives: dict[int, list[int]] = {}
    columns = plan.columns
    for row, (src, dst) in enumerate(zip(columns.src, columns.dst, strict=True)):
        if src == rank:
            if dst == rank:
                local.append(row)
            else:
                sends.setdefault(dst, []).append(row)
        elif dst == rank:
            receives.setdefault(src, []).append(row)
    return local, sends, receives


def regions_of(plan: Plan, rows: Sequence[int]) -> list[tuple[str, Region]]:
    """The key and the Region of each of `rows`; equal Regions are one object."""
    columns = plan.columns
    keys, key, coords, at = columns.keys, columns.key, columns.coords, columns.at
    known: dict[tuple[int, ...], Region] = {}
    found = []
    for row in rows:
        corner = tuple(coords[at[row] : at[row + 1]])
        region = known.get(corner)
        if region is None:
            ndim = len(corner) // 2
            region = known[corner] = Region(corner[:ndim], corner[ndim:])
        found.append((keys[key[row]], region))
    return found


def phases_of(plan: Plan, ranks: Sequence[int]) -> Mapping[Pair, int]:
    """The phase of each pair of the plan, in a group of `ranks`; pairs not named have phase 0."""
    size = len(ranks)
    if size - 1 <= PEERS:
        return {}
    pairs = pairs_of(plan)
    counts = (Counter(pair[end] for pair in pairs) for end in (0, 1))
    most = max((number for count in counts for number in count.values()), default=0)
    if most <= PEERS:
        return {}
    if len(pairs) > MAX_MATCHED or 2 * most >= size:
        place = {rank: position for position, rank in enumerate(ranks)}
        return {(a, b): ((place[b] - place[a]) % size - 1) // PEERS for a, b in pairs}
    return {pair: turn // PEERS for turn, one in enumerate(matchings(pairs)) for pair in one}


def plan_rounds(
    sends: Mapping[int, Sequence[Part]],
    receives: Mapping[int, Sequence[Part]],
    index: int,
    ranks: Sequence[int],
    terms: Terms,
    *,
    phases: Mapping[Pair, int],
) -> tuple[Round, ...]:
    """The rounds of the rank at `index` of a group of `ranks` (global), in order.

    `sends` and `receives` hold, by peer, one part per transfer in plan order; `phases` is what
    `phases_of` says of the plan.
    """
    place = {peer: position for position, peer in enumerate(ranks)}
    quota = _quota(len(ranks), terms)
    grid: dict[tuple[int, int], tuple[list[Batch], list[Batch]]] = {}
    for side, by_peer in enumerate((sends, receives)):
        for peer, transfers in by_peer.items():
            pair = (ranks[index], peer) if side == 0 else (peer, ranks[index])
            phase = phases.get(pair, 0)
            for step, batch in enumerate(_batches(peer, transfers, quota, terms)):
                grid.setdefault((phase, step), ([], []))[side].append(batch)
    return tuple(
        Round(_by_peer(grid[at][0], place), _by_peer(grid[at][1], place)) for at in sorted(grid)
    )


def fit_one_batch(
    sends: Mapping[int, Sequence[Part]],
    receives: Mapping[int, Sequence[Part]],
    size: int,
    terms: Terms,
) -> bool:
    """Whether what a rank has for each of its peers in a group of `size` fits one batch, staged.

    Then its rounds are the same whatever `terms.direct` says.
    """
    quota, digest_nbytes = _quota(size, terms), aligned(terms.digest_nbytes)
    max_parts = min(MAX_PARTS, quota // ALIGNMENT)
    return all(
        len(parts) <= max_parts
        and sum(aligned(part.nbytes) + digest_nbytes for part in parts) <= quota
        for by_peer in (sends, receives)
        for parts in by_peer.values()
    )


def aligned(nbytes: int) -> int:
    """The bytes that a part of `nbytes` takes in a packed buffer, unless it is the last."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut_region(region: Region, max_numel: int) -> Iterator[Region]:
    """Cut a region into boxes of at most `max_numel` elements, in row-major order.

    >>> [box.shape for box in cut_region(Region((0, 0), (5, 4)), 8)]
    [(2, 4), (2, 4), (1, 4)]
    """
    if region.numel <= max_numel:
        yield region
        return
    dim = next(d for d, n in enumerate(region.shape) if n > 1)
    inner = region.numel // region.shape[dim]
    step = max(1, max_numel // inner)
    for low in range(region.start[dim], region.stop[dim], step):
        high = min(low + step, region.stop[dim])
        start = (*region.start[:dim], low, *region.start[dim + 1 :])
        stop = (*region.stop[:dim], high, *region.stop[dim + 1 :])
        yield from cut_region(Region(start, stop), max_numel)


def _width(size: int) -> int:
    """The most peers that a rank sends to, or receives from, at the same time."""
    return min(PEERS, max(1, size - 1))


def _quota(size: int, terms: Terms) -> int:
    """The staging memory of one batch."""
    return terms.staging_nbytes // (4 * _width(size)) // ALIGNMENT * ALIGNMENT


def _cut_parts(transfers: Sequence[Part], limit: int) -> Iterator[Part]:
    for part in transfers:
        if 0 < part.nbytes <= limit:
            yield part
        elif part.nbytes:
            itemsize = part.nbytes // part.region.numel
            for box in cut_region(part.region, max(1, limit // itemsize)):
                yield Part(part.key, box, box.numel * itemsize)


def _batches(peer: int, transfers: Sequence[Part], quota: int, terms: Terms) -> Iterator[Batch]:
    direct, scatters = terms.direct(peer), terms.scatters(peer)
    digest_nbytes = aligned(terms.digest_nbytes)
    limit = DIRECT_NBYTES if direct else quota - digest_nbytes
    parts = list(_cut_parts(transfers, limit))
    sizes = [aligned(part.nbytes) + digest_nbytes for part in parts]
    # Where nothing but digests is staged, the number of parts is what keeps them in the quota.
    filled = max(quota, DIRECT_NBYTES) if direct and scatters else quota
    max_parts = min(MAX_PARTS, quota // ALIGNMENT)
    for batch in cut_rounds(sizes, filled, max_parts=max_parts):
        chosen = tuple(parts[batch.start : batch.stop])
        yield Batch(peer, chosen, tuple(_buffers(chosen, scatters=scatters)))


def _buffers(parts: tuple[Part, ...], *, scatters: bool) -> Iterator[range]:
    """Runs of parts that share a buffer: none where buffers cost nothing, else the small ones."""
    first = 0
    for at, part in enumerate(parts):
        if scatters or part.nbytes >= OWN_BUFFER_NBYTES:
            if first < at:
                yield range(first, at)
            yield range(at, at + 1)
            first = at + 1
    if first < len(parts):
        yield range(first, len(parts))


def _by_peer(batches: list[Batch], place: Mapping[int, int]) -> tuple[Batch, ...]:
    return tuple(sorted(batches, key=lambda batch: place[batch.peer]))
