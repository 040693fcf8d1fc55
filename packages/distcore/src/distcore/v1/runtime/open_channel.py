"""The channel for the `group` argument of a face: a process group, a channel, or none at all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias, cast

import torch.distributed as dist

from distcore.v1.channel import Channel, Message, Pending
from distcore.v1.errors import PlanError
from distcore.v1.runtime.group_channel import GroupChannel

Group: TypeAlias = dist.ProcessGroup | Channel
"""What a face takes as its group: a process group, or a channel that the caller keeps open."""


def channel_over(group: Group | None) -> OpenChannel:
    """Open the channel over `group`; None is the default group, or one rank where there is none.

    Local. A channel that is given is used as it is and stays open; one that is made here is
    closed with the result. The group itself stays the caller's.

        with channel_over(group) as channel:
            agree("the step", step, channel)
    """
    if group is not None and hasattr(group, "scatters"):
        return OpenChannel(cast("Channel", group))
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return OpenChannel(SoloChannel())
        group = dist.group.WORLD
    made = GroupChannel(cast("dist.ProcessGroup", group))
    return OpenChannel(made, made)


@dataclass(frozen=True, slots=True)
class OpenChannel(AbstractContextManager[Channel]):
    """A channel, and what is closed with it: None where the channel is the caller's own."""

    channel: Channel
    made: GroupChannel | None = None

    def close(self) -> None:
        """Close the channel if it was made here. Local; a second call does nothing."""
        if self.made is not None:
            self.made.close()

    def __enter__(self) -> Channel:
        """The channel."""
        return self.channel

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close what was made here."""
        self.close()


class SoloChannel:
    """The channel of a single rank, rank 0, which has nobody to talk to."""

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
        """Start nothing; PlanError where there is something to send or receive."""
        if sends or receives:
            raise PlanError("a single rank has no peer to send to or receive from")
        return _Nothing()

    def scatters(self, peer: int) -> bool:
        """Return False: there is no peer."""
        return False


@dataclass(frozen=True, slots=True)
class _Nothing:
    """No message on its way."""

    def wait(self) -> None:
        """Return at once."""
