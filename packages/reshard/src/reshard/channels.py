"""Channels for a `group` argument: a process group, a channel, or none at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, cast

import torch

from distcore.v1 import Channel, Message, Pending, PlanError
from distcore.v1.runtime import GroupChannel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup  # noqa: TID251 - a type of the public signature

Group: TypeAlias = "ProcessGroup | Channel"


@dataclass(frozen=True, slots=True)
class OpenedChannel:
    """A channel, and what is to be closed with it: None where it is the caller's own."""

    channel: Channel
    made: GroupChannel | None = None

    def close(self) -> None:
        """Close the channel if it was made here; the group stays the caller's."""
        if self.made is not None:
            self.made.close()


def open_channel(group: Group | None) -> OpenedChannel:
    """The channel over `group`; None is the default group, or one rank where there is none."""
    if hasattr(group, "all_gather") and hasattr(group, "scatters"):
        return OpenedChannel(cast("Channel", group))
    if group is None:
        dist = torch.distributed  # noqa: TID251 - where the default group is looked up
        if not (dist.is_available() and dist.is_initialized()):
            return OpenedChannel(SoloChannel())
        group = dist.group.WORLD
    made = GroupChannel(cast("ProcessGroup", group))
    return OpenedChannel(made, made)


class SoloChannel:
    """The channel of a single rank, which has nobody to talk to."""

    rank = 0
    index = 0
    size = 1
    ranks = (0,)
    device = "cpu"

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Return the own row."""
        return (bytes(row),)

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        """Start nothing: there is no peer."""
        if sends or receives:
            raise PlanError("a single rank has no peer to send to or receive from")
        return _Nothing()

    def scatters(self, peer: int) -> bool:
        """Whether small buffers cost nothing; there are none."""
        return False


@dataclass(frozen=True, slots=True)
class _Nothing:
    """No message on its way."""

    def wait(self) -> None:
        """Return at once."""
