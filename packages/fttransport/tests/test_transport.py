"""The contract alone."""

from __future__ import annotations

from datetime import timedelta

import pytest

from fttransport.transport import CheckpointTransport


class Echo(CheckpointTransport[int]):
    def metadata(self) -> str:
        return "echo"

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: int, timeout: timedelta
    ) -> None:
        self.kept = state_dict

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> int:
        return self.kept


def test_three_methods_must_be_written_and_two_need_not() -> None:
    assert CheckpointTransport.__abstractmethods__ == {
        "metadata",
        "send_checkpoint",
        "recv_checkpoint",
    }
    transport = Echo()
    transport.send_checkpoint([], 1, 5, timedelta(seconds=1))
    transport.disallow_checkpoint()
    transport.shutdown()
    assert transport.recv_checkpoint(0, "echo", 1, timedelta(seconds=1)) == 5


def test_the_contract_itself_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        CheckpointTransport()  # type: ignore[abstract]
