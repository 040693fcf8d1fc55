"""Stats: what a plan moves, counted from its transfers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from distcore.v1 import Plan


@dataclass(frozen=True, slots=True)
class Stats(Mapping[str, int]):
    """Counts of a plan over all its stages; also a mapping from name to int.

    Bytes between different ranks, fan-out to replicas included; `local_bytes` stay on their rank.
    `messages` are the transfers that cross ranks, `max_peers` the most ranks that one rank sends
    to or receives from, `rounds` the steps in which no rank sends or receives twice.
    """

    wire_bytes: int
    local_bytes: int
    max_egress_bytes: int
    max_ingress_bytes: int
    messages: int
    max_messages: int
    max_peers: int
    rounds: int
    stages: int

    def __getitem__(self, name: str) -> int:
        if name not in _NAMES:
            raise KeyError(name)
        return int(getattr(self, name))

    def __iter__(self) -> Iterator[str]:
        return iter(_NAMES)

    def __len__(self) -> int:
        return len(_NAMES)

    @classmethod
    def of(cls, stages: Sequence[Plan], itemsizes: Mapping[str, int]) -> Stats:
        """Count the transfers of `stages`."""
        local = 0
        sent: Counter[int] = Counter()
        received: Counter[int] = Counter()
        messages: Counter[int] = Counter()
        rounds = peers = 0
        for stage in stages:
            pairs: Counter[tuple[int, int]] = Counter()
            for src, dst, nbytes in sizes_of(stage, itemsizes):
                if src == dst:
                    local += nbytes
                    continue
                sent[src] += nbytes
                received[dst] += nbytes
                messages[src] += 1
                messages[dst] += 1
                pairs[src, dst] += 1
            out = max(Counter(src for src, _ in pairs).values(), default=0)
            into = max(Counter(dst for _, dst in pairs).values(), default=0)
            peers = max(peers, out, into)
            # The edges of a bipartite graph can be coloured with as many colours as the
            # largest degree: so many rounds suffice.
            rounds += max(out, into)
        return cls(
            wire_bytes=sent.total(),
            local_bytes=local,
            max_egress_bytes=max(sent.values(), default=0),
            max_ingress_bytes=max(received.values(), default=0),
            messages=messages.total() // 2,
            max_messages=max(messages.values(), default=0),
            max_peers=peers,
            rounds=rounds,
            stages=len(stages),
        )


_NAMES = tuple(field.name for field in fields(Stats))


def sizes_of(plan: Plan, itemsizes: Mapping[str, int]) -> Iterator[tuple[int, int, int]]:
    """Sender, receiver and bytes of every transfer."""
    columns = plan.columns
    sizes = [itemsizes[key] for key in columns.keys]
    coords, at = columns.coords, columns.at
    for row, (src, dst, key) in enumerate(zip(columns.src, columns.dst, columns.key, strict=True)):
        low, high = at[row], at[row + 1]
        ndim = (high - low) // 2
        nbytes = sizes[key]
        for dim in range(low, low + ndim):
            nbytes *= coords[dim + ndim] - coords[dim]
        yield src, dst, nbytes
