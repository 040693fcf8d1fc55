"""Protocols: what the packages offer each other, as small contracts.

A package registers an implementation as an entry point in the group `distcore.v1.<role>`; who
needs one looks it up with `distcore.v1.providers(role)`.  An implementation does not inherit from
these classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import timedelta

    from distcore.v1.layout import Layout
    from distcore.v1.plan import Plan


class Progress(Protocol):
    """Told now and then how far a transfer has come. Called on the caller's thread."""

    def __call__(self, done_nbytes: int, total_nbytes: int, /) -> None:
        """`done_nbytes` of `total_nbytes` of this rank have been sent and received."""


class Resharder(Protocol):
    """Plans the way of whole state dicts from one set of layouts to another (role `resharder`)."""

    def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
        """Return a plan after which every rank of `dst` holds its Regions of every key.

        Pure and deterministic. PlanError where the keys or the global shapes differ.
        """


class StateTransport(Protocol):
    """Carries the state of a live replica to one that recovers (role `transport`)."""

    def metadata(self) -> str:
        """What a receiver must know to find this source."""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: object, timeout: timedelta
    ) -> None:
        """Make `state_dict` of `step` available to `dst_ranks`."""

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        """Return the state of `step` from the source that `metadata` describes."""

    def disallow_checkpoint(self) -> None:
        """Serve the last state no longer; after this returns it may be changed."""

    def shutdown(self, wait: bool = True) -> None:
        """End all serving and free everything."""
