"""Channel: what carries bytes between ranks.

A channel moves bytes and knows nothing of tensors' dtypes, shapes or keys: every buffer is a
one-dimensional contiguous uint8 tensor on the channel's device.
Both ends know from the plan which buffers of which sizes belong together, so a message has no
header: the k-th buffer sent to a peer in one `start` is the k-th buffer received from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from distcore.v1.errors import PlanError, Problem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """Buffers for, or from, one peer, in an order that both ends know.

    `peer` is a global rank. Each buffer is a contiguous one-dimensional uint8 tensor; the caller
    keeps it alive and unchanged (a send) or unread (a receive) until `Pending.wait` returns.
    Two messages are equal only where they are one object: data is never compared.
    """

    peer: int
    buffers: tuple[torch.Tensor, ...]

    def __post_init__(self) -> None:
        if type(self.buffers) is not tuple:
            object.__setattr__(self, "buffers", tuple(self.buffers))
        if self.peer < 0:
            raise PlanError(Problem("peer", "rank", f"{self.peer} is no rank"))

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers together."""
        return sum(buffer.numel() for buffer in self.buffers)


class Pending(Protocol):
    """Messages on their way."""

    def wait(self) -> None:
        """Return when every receive has arrived and every sent buffer may be changed again.

        Raises ChannelError where the carrier broke, ChannelTimeout where the time ran out.
        """


class Channel(Protocol):
    """Carries bytes between the ranks of one group.

    Every method but the properties is collective in the sense that its counterpart must be
    called on the peers: `all_gather` by all ranks, `start` by both ends of each message.
    """

    @property
    def rank(self) -> int:
        """The global rank of the caller."""

    @property
    def index(self) -> int:
        """The caller's position in the group."""

    @property
    def size(self) -> int:
        """The number of ranks in the group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks of the group, by index."""

    @property
    def device(self) -> str:
        """The device on which buffers must lie, such as `"cpu"` or `"cuda:0"`."""

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        """Return every rank's `row`, by index. All rows must have one length on all ranks."""

    def start(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        *,
        timeout_s: float | None = None,
    ) -> Pending:
        """Start messages to and from other ranks, at most one per peer and direction.

        Nothing is sent to the caller itself. A size that differs between the two ends is an
        error of the caller; the plan's agreement rules it out.
        """

    def scatters(self, peer: int) -> bool:
        """Whether many small buffers to or from `peer` cost no more than one packed buffer."""
