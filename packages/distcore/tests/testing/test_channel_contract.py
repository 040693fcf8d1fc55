"""check_channel: right channels pass, and each kind of wrong one is caught."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch._C._distributed_c10d import Store

from distcore.testing import check_channel, loopback_group
from distcore.v1.channel import Channel, Message, Pending
from distcore.v1.errors import ChannelTimeout
from distcore.v1.runtime.group_channel import GroupChannel


class Broken(GroupChannel):
    """A right channel, for others to break."""

    @classmethod
    def make(cls, rank: int, size: int, store: Store) -> Channel:
        return cls(loopback_group(store, rank, size, timeout_s=5))


class SwapsBuffers(Broken):
    """Delivers the buffers of a message in another order."""

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        turned = [Message(message.peer, message.buffers[::-1]) for message in sends]
        receives = [Message(message.peer, message.buffers[::-1]) for message in receives]
        if len(sends) == 2 and len(sends[0].buffers) == 1500:
            turned[0] = Message(
                turned[0].peer, tuple(b.flip(0).contiguous() for b in turned[0].buffers)
            )
        return super().start(turned, receives, timeout_s=timeout_s)


@dataclass
class ReturnsEarly:
    """Does not wait for what was started."""

    inner: Pending

    def wait(self) -> None:
        return


class WaitsForNothing(Broken):
    """Says that bytes have arrived before they have."""

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        if receives and self.index == 1:
            return ReturnsEarly(super().start(sends, receives, timeout_s=timeout_s))
        return super().start(sends, receives, timeout_s=timeout_s)


class NamesTheWrongPeer(Broken):
    """Times out, but blames itself."""

    def finish(self, position: int | None, work: object, deadline: float | None) -> None:
        try:
            super().finish(position, work, deadline)  # type: ignore[arg-type]
        except ChannelTimeout as error:
            raise ChannelTimeout(str(error), peer=self.rank) from error


class TakesItsTime(Broken):
    """Ignores the timeout of a call."""

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        late = None if timeout_s is None else timeout_s + 3
        return super().start(sends, receives, timeout_s=late)


class ShufflesRows(Broken):
    """Gathers rows in an order of its own."""

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        return super().all_gather(row, timeout_s=timeout_s)[::-1]


class PromisesOneSided(Broken):
    """Says that it scatters to higher ranks only."""

    def scatters(self, peer: int) -> bool:
        return peer > self.rank


def test_a_right_channel_passes() -> None:
    check_channel(Broken.make, size=2)


@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (SwapsBuffers, "check_many_buffers"),
        (WaitsForNothing, "check_sizes"),
        (NamesTheWrongPeer, "check_silent_sender"),
        (TakesItsTime, "check_silent_sender"),
        (ShufflesRows, "check_rows"),
        (PromisesOneSided, "check_who_is_who"),
    ],
)
def test_a_wrong_channel_is_caught(broken: type[Broken], check: str) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        check_channel(broken.make, deadline_s=20)
    assert caught.value.__notes__ == [f"{check} with 3 ranks"]


def test_a_hang_is_caught() -> None:
    class Hangs(Broken):
        def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
            time.sleep(2)
            return super().all_gather(row, timeout_s=timeout_s)

    with pytest.raises(AssertionError, match="were busy after"):
        check_channel(Hangs.make, deadline_s=0.5)


def test_buffers_of_the_check_are_bytes_on_the_device() -> None:
    """What a channel is handed is what the contract says."""
    seen: list[torch.Tensor] = []

    class Looks(Broken):
        def start(
            self,
            sends: Sequence[Message],
            receives: Sequence[Message],
            *,
            timeout_s: float | None = None,
        ) -> Pending:
            seen.extend(b for message in (*sends, *receives) for b in message.buffers)
            return super().start(sends, receives, timeout_s=timeout_s)

    check_channel(Looks.make, size=2)
    assert {(b.dtype, b.dim(), b.is_contiguous(), b.device.type) for b in seen} == {
        (torch.uint8, 1, True, "cpu")
    }
    assert {0, 1, 4096} < {b.numel() for b in seen}
