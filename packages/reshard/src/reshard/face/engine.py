"""Engine: one tensor carried over a channel, in these steps, each of which ends for all alike.

1. *Read*: every rank reads what it was given.
2. *Offer*: shape, dtype and readings go to all ranks, or that a rank could not read.
3. *Settle*: the plan is made, places are found, copies of what would be written over are taken;
   and all ranks show each other meshes, placements and plan.
4. *Move*: the stages of the plan. Only here destinations change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from distcore.v1 import Channel
from distcore.v1.runtime import agree, execute
from reshard.ends import Ends
from reshard.face import streams
from reshard.face.duck_types import TensorLike
from reshard.face.offers import FAILED, Offer, Side, Terms, terms_of
from reshard.placed import Own
from reshard.plan import ReshardPlan, plan_reshard

KEY: Final = "tensor"
MIN_SHARED_NBYTES: Final = 1 << 20
"""Below this on the wire it does not pay to look for short ways between ranks of one host."""


@dataclass(frozen=True, slots=True)
class Route:
    """A plan, and the bytes that it moves between ranks."""

    plan: ReshardPlan
    wire_nbytes: int


Planner = Callable[[tuple[Side, Side], Terms], Route]


def carry(
    tensors: tuple[TensorLike | None, TensorLike | None],
    sides: Callable[[], tuple[Side, Side]],
    channel: Channel,
    *,
    planner: Planner,
    stream: Any,
) -> None:
    """Carry the first tensor into the second. Collective over the channel."""
    both, offer, rows = _read(tensors, sides, channel)
    with streams.entered(_device_of(offer), stream):
        route, ends = _settle_together(both, offer, rows, channel, planner)
        _move(route, ends, channel)


def route_of(sides: tuple[Side, Side], terms: Terms) -> Route:
    """The way between two sides, balanced over the holders of each part."""
    src, dst = (
        side.layout(terms.shape, terms.dtype, reading)
        for side, reading in zip(sides, terms.readings, strict=True)
    )
    plan = plan_reshard({KEY: src}, {KEY: dst})
    return Route(plan, plan.stats()["wire_bytes"])


def _read(
    tensors: tuple[TensorLike | None, TensorLike | None],
    sides: Callable[[], tuple[Side, Side]],
    channel: Channel,
) -> tuple[tuple[Side, Side], Offer, Sequence[bytes]]:
    """What this rank was given, and the rows of all ranks; PeerError where one could not read."""
    label = "reshard: read src_tensor and dst_tensor"
    try:
        both = sides()
        offer = Offer.of(channel.rank, tensors, both)
    except BaseException as error:
        channel.all_gather(FAILED)
        agree(label, error, channel)
        raise
    rows = channel.all_gather(offer.encode())
    if FAILED in rows:
        agree(label, "read", channel)
    return both, offer, rows


def _settle_together(
    sides: tuple[Side, Side],
    offer: Offer,
    rows: Sequence[bytes],
    channel: Channel,
    planner: Planner,
) -> tuple[Route, Ends]:
    """The way and this rank's ends of it, once all ranks have the same."""
    label = "reshard: meshes and placements of src_tensor and dst_tensor"
    try:
        found = _settle(sides, offer, terms_of(rows, channel.ranks), channel, planner)
    except BaseException as error:
        agree(label, error, channel)
        raise
    told = {side.name: f"mesh {side.mesh}, placements {list(side.forms)}" for side in sides}
    agree(label, told, channel)
    return found


def _settle(
    sides: tuple[Side, Side], offer: Offer, terms: Terms, channel: Channel, planner: Planner
) -> tuple[Route, Ends]:
    """The way, and this rank's tensors bound to it, ready to be sent."""
    for side in sides:
        strangers = sorted(set(side.ranks) - set(channel.ranks))
        if strangers:
            text = f"{side.name}: the mesh {side.mesh} has ranks {strangers}"
            raise ValueError(f"{text}, but the group has {list(channel.ranks)}")
    route = planner(sides, terms)
    plan = route.plan
    own: list[dict[str, Own]] = [
        {} if local is None else {KEY: Own(terms.shape, terms.dtype, layouts[KEY], local)}
        for local, layouts in zip(offer.locals, (plan.src, plan.dst), strict=True)
    ]
    ends = Ends.of(plan, (own[0], own[1]), slabs={}, hooks={}, rank=channel.rank)
    for act in ends.before:
        act()
    return route, ends


def _move(route: Route, ends: Ends, channel: Channel) -> None:
    same_host: Literal["auto", "off"] = "off"
    if route.wire_nbytes >= MIN_SHARED_NBYTES:
        same_host = "auto"
    sources = ends.sources
    for stage in route.plan.stages:
        if len(stage):
            execute(stage, channel, sources, ends.destinations, same_host=same_host)
        sources = ends.destinations


def _device_of(offer: Offer) -> torch.device:
    given = [local for local in offer.locals if local is not None]
    return given[0].device if given else torch.device("cpu")
