"""The active set: which parameters step, agreed on by all ranks in one small exchange.

A rank knows only of its own gradients. If each went by them alone, one would wait for a matrix
that another never sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from distcore.v1 import Channel, PlanError, Problem
from distcore.v1.runtime import agree

MissingGrads: TypeAlias = Literal["skip", "zero", "error"]
MISSING_GRADS: Final = ("skip", "zero", "error")
_LABEL: Final = "a step of OwnerMuon"
_FAILED: Final = 1


@dataclass(frozen=True, slots=True)
class Holding:
    """A parameter's name, and the positions of the ranks that hold elements of it."""

    name: str
    indices: frozenset[int]


def exchange_presence(
    present: Sequence[bool],
    terms: str,
    failure: BaseException | None,
    channel: Channel,
    *,
    timeout_s: float | None = None,
) -> tuple[tuple[bool, ...], ...]:
    """For every rank, by position, which parameters have a gradient there. Collective.

    `terms` is what must be equal on all ranks besides, 32 hex digits; `failure` tells the peers
    that this rank cannot step. Raises DisagreementError or PeerError on every rank.
    """
    row = bytes([0 if failure is None else _FAILED]) + bytes.fromhex(terms) + _packed(present)
    rows = channel.all_gather(row, timeout_s=timeout_s)
    head = len(row) - len(_packed(present))
    if failure is not None or any(other[:head] != row[:head] for other in rows):
        agree(_LABEL, terms if failure is None else failure, channel, timeout_s=timeout_s)
    return tuple(_unpacked(other[head:], len(present)) for other in rows)


def choose_active(
    presence: Sequence[Sequence[bool]], holdings: Sequence[Holding], missing: MissingGrads
) -> tuple[bool, ...]:
    """Which parameters step, the same on every rank. Pure.

    A parameter without a gradient on any rank does not. Where some of its holders have one and
    some do not, `missing` decides: `"skip"` leaves it as it is on all ranks, `"zero"` takes a
    missing gradient as zeros, `"error"` raises PlanError with every such parameter.

    >>> holding = Holding("w", frozenset({0, 1}))
    >>> choose_active([[True], [False]], [holding], "skip")
    (False,)
    >>> choose_active([[True], [False]], [holding], "zero")
    (True,)
    """
    active, problems = [], []
    for at, holding in enumerate(holdings):
        having = {index for index in holding.indices if presence[index][at]}
        lacking = sorted(holding.indices - having)
        active.append(bool(having) and (not lacking or missing == "zero"))
        if having and lacking and missing == "error":
            text = f"has a gradient, but not on the ranks at the positions {lacking}"
            problems.append(Problem(holding.name, "gradient", text))
    if problems:
        raise PlanError(problems)
    return tuple(active)


def _packed(present: Sequence[bool]) -> bytes:
    bits = sum(1 << at for at, has in enumerate(present) if has)
    return bits.to_bytes(-(-len(present) // 8), "little")


def _unpacked(row: bytes, count: int) -> tuple[bool, ...]:
    bits = int.from_bytes(row, "little")
    return tuple(bool(bits >> at & 1) for at in range(count))
