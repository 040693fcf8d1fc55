"""channel: messages, and that the Protocols are small enough for a stand-in to fill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from distcore.v1 import Channel, Message, Pending, PlanError


def buffer(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_the_bytes_of_a_message() -> None:
    assert Message(3, (buffer(4), buffer(0), buffer(5))).nbytes == 9
    assert Message(3, ()).nbytes == 0


def test_buffers_become_a_tuple() -> None:
    assert type(Message(0, [buffer(1)]).buffers) is tuple  # type: ignore[arg-type]


def test_messages_are_compared_by_identity_never_by_data() -> None:
    one, other = Message(0, (buffer(4),)), Message(0, (buffer(4),))
    assert one != other
    assert len({one, other, one}) == 2


def test_a_negative_peer_is_refused() -> None:
    with pytest.raises(PlanError, match="-1 is no rank") as caught:
        Message(-1, ())
    assert [(p.where, p.kind) for p in caught.value.problems] == [("peer", "rank")]


class Done:
    def wait(self) -> None:
        pass


class Alone:
    """The channel of a group of one rank: the smallest thing that is a Channel."""

    rank = 4
    index = 0
    size = 1
    ranks = (4,)
    device = "cpu"

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        return (row,)

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        return Done()

    def scatters(self, peer: int) -> bool:
        return False


def test_a_class_is_a_channel_without_inheriting_from_one() -> None:
    channel: Channel = cast(Channel, Alone())
    assert Channel not in Alone.__mro__
    wanted = {name for name in vars(Channel) if not name.startswith("_")}
    assert wanted == {name for name in vars(Alone) if not name.startswith("_")}
    assert channel.all_gather(b"row") == (b"row",)
    channel.start([], []).wait()
