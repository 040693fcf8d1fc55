"""Engine: one tensor carried over a channel, in these steps, each of which ends for all alike.

1. *Read*: every rank reads what it was given, and shows shape, dtype, readings and the digest of
   its meshes and placements, or that it could not read.
2. *Settle*: the plan is made, places are found, copies of what would be written over are taken.
3. *Move*: the stages of the plan, one by one. The executor proves that all have the same plan and
   are ready, or tells that one is not; only then destinations change. At the end all confirm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Final, Literal

import torch

from distcore.v1 import Channel, itemsize
from distcore.v1.runtime import agree, execute
from reshard.ends import Ends
from reshard.face import streams
from reshard.face.duck_types import TensorLike
from reshard.face.offers import FAILED, Offer, Side, Terms, digest_in, terms_of
from reshard.placed import Own
from reshard.plan import ReshardPlan, plan_reshard

KEY: Final = "tensor"
MIN_SHARED_NBYTES: Final = 1 << 20
"""For a smaller tensor it does not pay to look for short ways between ranks of one host."""

NO_PLAN: Final = plan_reshard({}, {})
"""What a rank has that has failed to make one; its only stage tells the others."""

Planner = Callable[[tuple[Side, Side], Terms], ReshardPlan]


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
    terms = terms_of(rows, channel.ranks)
    with streams.entered(_device_of(offer), stream):
        plan, ends, failure = NO_PLAN, Ends(channel.rank), None
        try:
            plan = planner(both, terms)
            ends = _ends(plan, offer, terms, channel.rank)
        except BaseException as error:  # noqa: BLE001 - told to the peers and raised again
            failure = error
        _move(plan, ends, channel, same_host=_same_host(terms), failure=failure)


def plan_of(sides: tuple[Side, Side], terms: Terms) -> ReshardPlan:
    """The plan between two sides, balanced over the holders of each part."""
    src, dst = (
        side.layout(terms.shape, terms.dtype, reading)
        for side, reading in zip(sides, terms.readings, strict=True)
    )
    return plan_reshard({KEY: src}, {KEY: dst})


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
        _refuse_strangers(both, channel)
        told = {side.name: f"mesh {side.mesh}, placements {list(side.forms)}" for side in both}
        row = offer.encode(told)
    except BaseException as error:
        channel.all_gather(FAILED)
        agree(label, error, channel)
        raise
    rows = channel.all_gather(row)
    if FAILED in rows:
        agree(label, "read", channel)
    if len({digest_in(row) for row in rows}) > 1:
        agree("reshard: meshes and placements of src_tensor and dst_tensor", told, channel)
    return both, offer, rows


def _refuse_strangers(sides: tuple[Side, Side], channel: Channel) -> None:
    """ValueError where a mesh has ranks that the group has not."""
    for side in sides:
        strangers = sorted(set(side.ranks) - set(channel.ranks))
        if strangers:
            text = f"{side.name}: the mesh {side.mesh} has ranks {strangers}"
            raise ValueError(f"{text}, but the group has {list(channel.ranks)}")


def _ends(plan: ReshardPlan, offer: Offer, terms: Terms, rank: int) -> Ends:
    """This rank's tensors bound to the plan, ready to be sent."""
    own: list[dict[str, Own]] = [
        {} if local is None else {KEY: Own(terms.shape, terms.dtype, layouts[KEY], local)}
        for local, layouts in zip(offer.locals, (plan.src, plan.dst), strict=True)
    ]
    ends = Ends.of(plan, (own[0], own[1]), slabs={}, hooks={}, rank=rank)
    for act in ends.before:
        act()
    return ends


def _same_host(terms: Terms) -> Literal["auto", "off"]:
    """How ranks of one host exchange: chosen by what all know, also a rank without a plan."""
    nbytes = prod(terms.shape) * itemsize(terms.dtype)
    return "auto" if nbytes >= MIN_SHARED_NBYTES else "off"


def _move(
    plan: ReshardPlan,
    ends: Ends,
    channel: Channel,
    *,
    same_host: Literal["auto", "off"],
    failure: BaseException | None,
) -> None:
    sources = ends.sources
    for stage in plan.stages:
        execute(stage, channel, sources, ends.destinations, same_host=same_host, failure=failure)
        sources = ends.destinations


def _device_of(offer: Offer) -> torch.device:
    given = [local for local in offer.locals if local is not None]
    return given[0].device if given else torch.device("cpu")
