"""Where transfers over a process group have been found weak, each as the case that shows it.

Names are as in `test_http_transport_weaknesses.py` and in `test_transport_reports.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distcore.testing import rank_threads
from distcore.v1.runtime import GroupChannel
from fttransport import (
    CodecRefused,
    IntegrityError,
    LayoutMismatch,
    PGTransport,
    StepMismatch,
    TransportError,
)
from fttransport import pg_transport as module
from fttransport.digests import Digester
from fttransport.manifest import content_id
from fttransport.snapshot import take_snapshot

S = timedelta(seconds=10)
CPU = torch.device("cpu")


class Command:
    """A value whose pickle makes a file where it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


class Counted:
    """A group that counts its messages."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.sent = 0

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        self.sent += 1
        return self._group.send(tensors, dst, tag)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._group.recv(tensors, src, tag)


def transport(channel: GroupChannel, **options: Any) -> PGTransport[Any]:
    timeout = options.pop("timeout", S)
    return PGTransport(options.pop("group", channel.group), timeout, CPU, **options)


def move(
    channel: GroupChannel,
    sends: PGTransport[Any],
    receives: PGTransport[Any],
    state: Any,
    *,
    steps: tuple[int, int] = (1, 1),
) -> Any:
    """Send on rank 0, receive on the others."""
    if channel.rank == 0:
        return sends.send_checkpoint([1], steps[0], state)
    return receives.recv_checkpoint(0, "<n/a>", steps[1])


def test_w1_nothing_that_comes_over_a_group_runs(tmp_path: Path) -> None:
    command = Command(tmp_path / "made")

    def run(channel: GroupChannel) -> None:
        opens, plain = transport(channel, codec="pickle"), transport(channel)
        with pytest.raises(CodecRefused, match="pickle"):
            move(channel, opens, plain, {"c": command})

    rank_threads(2, run).values()
    assert not command.path.exists()


def test_w20_another_dtype_is_refused_on_both_sides_before_anything_is_written() -> None:
    own = {"w": torch.zeros(4, dtype=torch.int32)}

    def run(channel: GroupChannel) -> None:
        mine = transport(channel, state_dict=lambda: own)
        with pytest.raises(LayoutMismatch, match=r"\['w'\].*float32.*int32"):
            move(channel, mine, mine, {"w": torch.ones(4)})

    rank_threads(2, run).values()
    assert own["w"].tolist() == [0, 0, 0, 0]


def test_w20_a_transposed_target_gets_the_right_values() -> None:
    own = {"w": torch.zeros(2, 3).t()}

    def run(channel: GroupChannel) -> None:
        mine = transport(channel, state_dict=lambda: own)
        move(channel, mine, mine, {"w": torch.arange(6.0).view(3, 2)})

    rank_threads(2, run).values()
    assert own["w"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_w22_after_mismatches_the_group_goes_on() -> None:
    """Of the step, of the layout, of what is sent: each three times, and then a transfer."""

    def run(channel: GroupChannel) -> None:
        own = {"w": torch.zeros(3)}
        mine = transport(channel, state_dict=lambda: own)
        wrong: tuple[tuple[int, dict[str, Any], type[Exception]], ...] = (
            (2, {"w": torch.ones(3)}, StepMismatch),
            (1, {"w": torch.ones(4)}, LayoutMismatch),
            (1, {"w": print}, CodecRefused),
        )
        for step, state, kind in wrong * 3:
            with pytest.raises(kind):
                move(channel, mine, mine, state, steps=(step, 1))
        move(channel, mine, mine, {"w": torch.arange(3.0)})
        assert own["w"].tolist() == ([0, 0, 0] if channel.rank == 0 else [0, 1, 2])

    rank_threads(2, run).values()


def test_w23_thousands_of_small_tensors_are_a_handful_of_messages() -> None:
    def run(channel: GroupChannel) -> int:
        group = Counted(channel.group)
        mine = transport(channel, group=group)
        if channel.rank == 0:
            mine.send_checkpoint([1], 1, [torch.full((10,), float(i)) for i in range(2000)])
        else:
            found = mine.recv_checkpoint(0, "<n/a>", 1)
            assert all(int(tensor[9]) == i for i, tensor in enumerate(found))
        return group.sent

    assert max(rank_threads(2, run).values()) <= 4


def test_w24_parameters_and_slices_are_filled_in_place() -> None:
    model = torch.nn.Linear(4, 3)
    buffer = torch.zeros(10)
    own = {"model": list(model.parameters()), "slice": buffer[2:6]}

    def run(channel: GroupChannel) -> None:
        mine = transport(channel, state_dict=lambda: own)
        state = {"model": [torch.ones(3, 4), torch.ones(3)], "slice": torch.arange(4.0)}
        move(channel, mine, mine, state)

    rank_threads(2, run).values()
    assert all(bool((parameter == 1).all()) for parameter in model.parameters())
    assert buffer.tolist() == [0, 0, 0, 1, 2, 3, 0, 0, 0, 0]


def test_w26_both_sides_log_the_rate_and_the_route(caplog: pytest.LogCaptureFixture) -> None:
    def run(channel: GroupChannel) -> None:
        mine = transport(channel)
        move(channel, mine, mine, {"w": torch.ones(1_000_000)})

    with caplog.at_level(logging.INFO, "fttransport"):
        rank_threads(2, run).values()
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line.split()[0] for line in lines] == ["received", "sent"]
    assert all("MB/s" in line for line in lines)
    assert "rank 0: 4.0 MB" in lines[0]
    assert "rank 1: 4.0 MB" in lines[1]


def test_torchft_323_without_a_timeout_the_constructor_s_is_taken() -> None:
    """0.1 s there, 20 s in the group, and a peer that does nothing."""

    def run(channel: GroupChannel) -> None:
        if channel.rank == 1:
            time.sleep(0.5)
            return
        begin = time.monotonic()
        with pytest.raises(TimeoutError, match="timed out"):
            transport(channel, timeout=timedelta(seconds=0.1)).send_checkpoint([1], 1, {})
        assert time.monotonic() - begin < 5

    rank_threads(2, run).values()


def test_checkpoint_engine_97_without_destinations_a_send_returns_at_once() -> None:
    transport_of_nobody: PGTransport[Any] = PGTransport(object(), S, CPU)
    transport_of_nobody.send_checkpoint([], 1, {"w": torch.ones(3)})
    report = transport_of_nobody.last_report
    assert report is not None
    assert (report.nbytes, report.moved_bytes) == (12, 0)


def test_a_dead_destination_does_not_keep_the_others_waiting() -> None:
    def run(channel: GroupChannel) -> float:
        mine = transport(channel, timeout=timedelta(seconds=2))
        begin = time.monotonic()
        if channel.rank == 0:
            with pytest.raises(TimeoutError) as caught:
                mine.send_checkpoint([2, 1, 3], 1, {"n": 5})
            assert isinstance(caught.value, TransportError)
            assert set(caught.value.failures) == {"rank 2"}
            assert mine.last_report is not None
            assert set(mine.last_report.per_source) == {"rank 1", "rank 3"}
        elif channel.rank == 2:
            time.sleep(3)
        else:
            assert mine.recv_checkpoint(0, "<n/a>", 1) == {"n": 5}
        return time.monotonic() - begin

    took = rank_threads(4, run).values()
    assert max(took[1], took[3]) < 1.5


def test_destinations_fail_each_for_its_own_reason() -> None:
    """One asks for another step, one has another layout, one is healed."""

    def run(channel: GroupChannel) -> str:
        own = {"w": torch.zeros(5 if channel.rank == 2 else 3)}
        mine = transport(channel, state_dict=lambda: own)
        try:
            if channel.rank == 0:
                mine.send_checkpoint([1, 2, 3], 1, {"w": torch.ones(3)})
            else:
                mine.recv_checkpoint(0, "<n/a>", 7 if channel.rank == 1 else 1)
        except TransportError as error:
            return f"{type(error).__name__} {sorted(error.failures)}"
        return f"{own['w'].sum():.0f}"

    assert list(rank_threads(4, run).values()) == [
        "StepMismatch ['rank 1', 'rank 2']",
        "StepMismatch []",
        "LayoutMismatch []",
        "3",
    ]


def test_a_hostile_source_is_refused_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptions cut at any place, with bits changed, under their right ids."""
    changes: list[Callable[[bytes], bytes]] = [
        lambda text: text[:-1],
        lambda text: b"[" * 100_000,
        lambda text: b"{}",
        lambda text: text.upper(),
    ]

    def run(channel: GroupChannel, change: Callable[[bytes], bytes]) -> None:
        def spoiled(*args: Any, **options: Any) -> Any:
            staged = take_snapshot(*args, **options)
            text = change(staged.text)
            return replace(staged, text=text, content_id=content_id(text, Digester("xxh3")))

        mine = transport(channel)
        if channel.rank == 0:
            monkeypatch.setattr(module, "take_snapshot", spoiled)
        with pytest.raises(IntegrityError):
            move(channel, mine, mine, {"w": torch.ones(30)})

    for change in changes:
        rank_threads(2, partial(run, change=change)).values()
