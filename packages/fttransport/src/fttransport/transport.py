"""CheckpointTransport: what carries the state of a live replica to one that recovers.

Names, signatures and meaning are those of torchft's checkpointing module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Generic, TypeVar

T = TypeVar("T")


class CheckpointTransport(ABC, Generic[T]):
    """Sends and receives a state, one step at a time."""

    @abstractmethod
    def metadata(self) -> str:
        """What a receiver needs to find this source. Cheap, and the same for its whole life."""

    @abstractmethod
    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Make the state of `step` available to `dst_ranks`. May return before it was fetched."""

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of `step` from the source that `metadata` describes."""

    def disallow_checkpoint(self) -> None:
        """Wait until what was sent is no longer read; afterwards the state may be changed."""

    def shutdown(self, wait: bool = True) -> None:
        """End all serving and free everything; with `wait`, return when that is done."""
