"""What a receive takes of memory beside the state, as the system counts it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fttransport import HTTPTransport

Make = Callable[..., HTTPTransport[Any]]

S = timedelta(seconds=30)
MIB = 1 << 20
STATE_NBYTES = 192 * MIB
EXTRA_NBYTES = 64 * MIB

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def resident_nbytes(field: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def rise_nbytes(receive: Callable[[], object]) -> int:
    """How far the resident memory of this process, the source in it, rises in a receive."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = resident_nbytes("VmRSS")
    receive()
    return resident_nbytes("VmHWM") - before


def state_of(fill: float) -> dict[str, torch.Tensor]:
    """Three large tensors, and a thousand small ones of 16 KiB."""
    large = {f"w{i}": torch.full((STATE_NBYTES // 12,), fill + i) for i in range(3)}
    return large | {f"s{i}": torch.full((4096,), fill + i) for i in range(1000)}


def test_in_place_a_receive_holds_less_than_64_mib_beside_the_state(http: Make) -> None:
    state, own = state_of(1.0), state_of(0.0)
    source, receiver, fresh = http(), http(state_dict=lambda: own), http()
    source.send_checkpoint([], 1, state, S)

    def in_place() -> None:
        receiver.recv_checkpoint(0, source.metadata(), 1, S)

    assert rise_nbytes(in_place) < EXTRA_NBYTES
    assert all(torch.equal(own[name], tensor) for name, tensor in state.items())
    # The measure itself: new tensors are memory.
    assert (
        rise_nbytes(lambda: fresh.recv_checkpoint(0, source.metadata(), 1, S)) > STATE_NBYTES // 2
    )


def test_a_send_holds_less_than_64_mib_beside_the_state(http: Make) -> None:
    state, source = state_of(1.0), http()
    assert rise_nbytes(lambda: source.send_checkpoint([], 1, state, S)) < EXTRA_NBYTES
