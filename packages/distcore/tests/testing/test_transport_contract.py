"""check_transport passes a right transport, and sees each way to be wrong."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta

import pytest
import torch

from distcore.testing import check_transport


class Desk:
    """Where the transports of one process put their states for each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.served: tuple[int, object] | None = None


class InProcess:
    """A transport between threads: a copy of the state on a desk."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def metadata(self) -> str:
        return "desk"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: object, timeout: timedelta
    ) -> None:
        with self._desk.changed:
            self._desk.served = step, copy.deepcopy(state_dict)
            self._desk.changed.notify_all()

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        with self._desk.changed:
            served = self._desk.changed.wait_for(self._is_served, timeout.total_seconds())
            if not served or self._desk.served is None or self._desk.served[0] != step:
                raise TimeoutError(f"step {step} is not served")
            return self._desk.served[1]

    def disallow_checkpoint(self) -> None:
        with self._desk.changed:
            self._desk.served = None

    def shutdown(self, wait: bool = True) -> None:
        self.disallow_checkpoint()

    def _is_served(self) -> bool:
        return self._desk.served is not None


class Casting(InProcess):
    """Gives every tensor back as float32."""

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        state = super().recv_checkpoint(src_rank, metadata, step, timeout)
        return {
            key: value.float() if isinstance(value, torch.Tensor) else value
            for key, value in state.items()  # type: ignore[attr-defined]
        }


class Forgetful(InProcess):
    """Serves the first state for ever."""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: object, timeout: timedelta
    ) -> None:
        if self._desk.served is None:
            super().send_checkpoint(dst_ranks, 0, state_dict, timeout)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        return super().recv_checkpoint(src_rank, metadata, 0, timeout)

    def disallow_checkpoint(self) -> None:
        pass


class Late(InProcess):
    """Waits far longer than it was allowed to."""

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        try:
            return super().recv_checkpoint(src_rank, metadata, step, timeout)
        except TimeoutError:
            time.sleep(5)
            raise


def test_a_right_transport_passes() -> None:
    desk = Desk()
    check_transport(lambda rank: InProcess(desk))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Casting, r"state\.half: sent torch\.bfloat16"),
        (Forgetful, r"step 7: state\.step"),
        (Late, "gave up after"),
    ],
)
def test_a_wrong_transport_is_seen(kind: type[InProcess], text: str) -> None:
    desk = Desk()
    with pytest.raises(AssertionError, match=text):
        check_transport(lambda rank: kind(desk))
