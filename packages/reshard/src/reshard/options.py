"""Options: how a plan is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from distcore.v1 import PlanError, Problem

_FAN_OUTS = ("auto", "direct", "stripe", "node")


@dataclass(frozen=True, slots=True)
class Options:
    """How a plan is made.

    `quantum_nbytes`: a cell larger than this is split over its holders.
    `fan_out`: how a cell reaches more receivers than it has holders: `"direct"` from the holders,
    in `"stripe"`s that the receivers pass on, the same per `"node"`, or by cost (`"auto"`).
    `stripe_nbytes`: no stripe is smaller, so that small cells make no swarm of messages.
    `node_cost`: what a byte between nodes costs, in bytes within a node.
    `max_peers`: how many ranks a rank should send to, and receive from, at most. A receiver whose
    cells have no holder in common needs more, and gets them.
    """

    quantum_nbytes: int = 8 << 20
    fan_out: Literal["auto", "direct", "stripe", "node"] = "auto"
    stripe_nbytes: int = 64 << 10
    node_cost: float = 1.0
    max_peers: int | None = None

    def __post_init__(self) -> None:
        problems = []
        for name in ("quantum_nbytes", "stripe_nbytes"):
            if getattr(self, name) < 1:
                text = f"{getattr(self, name)} is not at least 1"
                problems.append(Problem(name, "range", text))
        if self.fan_out not in _FAN_OUTS:
            text = f"{self.fan_out!r} is none of {', '.join(map(repr, _FAN_OUTS))}"
            problems.append(Problem("fan_out", "value", text))
        if self.node_cost < 1:
            problems.append(Problem("node_cost", "range", f"{self.node_cost} is below 1"))
        if self.max_peers is not None and self.max_peers < 1:
            problems.append(Problem("max_peers", "range", f"{self.max_peers} is not at least 1"))
        if problems:
            raise PlanError(problems)
