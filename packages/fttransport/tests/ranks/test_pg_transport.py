"""PGTransport between ranks: what arrives, and that every failure is known to both sides."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from distcore.testing import check_transport, loopback_group, rank_threads
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
from fttransport.destination import Destination

S = timedelta(seconds=10)
CPU = torch.device("cpu")


def transport(channel: GroupChannel, **options: Any) -> PGTransport[Any]:
    timeout = options.pop("timeout", S)
    return PGTransport(channel.group, timeout, CPU, **options)


def state_of() -> dict[str, Any]:
    w = torch.arange(3_000_000.0)
    small = [torch.full((5,), float(i)) for i in range(100)]
    return {"w": w, "tied": w, "small": small, "n": 3, "empty": torch.empty(0), "h": w[:7].half()}


def move(
    mine: PGTransport[Any],
    channel: GroupChannel,
    state: object,
    *,
    step: int = 5,
    sides: tuple[int, int] = (0, 1),
    timeout: timedelta | None = None,
) -> Any:
    """Send `state` as step 5 on the first of `sides`, receive `step` on the other ranks."""
    if channel.rank == sides[0]:
        return mine.send_checkpoint([sides[1]], 5, state, timeout)
    return mine.recv_checkpoint(sides[0], "<n/a>", step, timeout)


def check(found: Any) -> None:
    expected = state_of()
    assert torch.equal(found["w"], expected["w"])
    assert found["tied"].data_ptr() == found["w"].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(found["small"], expected["small"], strict=True))
    assert found["n"] == 3
    assert found["empty"].shape == (0,)
    assert torch.equal(found["h"], expected["h"])


def test_a_state_arrives_at_every_destination() -> None:
    def run(channel: GroupChannel) -> None:
        mine = transport(channel)
        assert mine.metadata() == "<n/a>"
        if channel.rank == 0:
            mine.send_checkpoint([1, 2], step=5, state_dict=state_of())
            report = mine.last_report
            assert report is not None
            assert set(report.per_source) == {"rank 1", "rank 2"}
        else:
            check(mine.recv_checkpoint(0, "<n/a>", step=5))
        mine.disallow_checkpoint()
        mine.shutdown()

    rank_threads(3, run).values()


def test_it_keeps_the_contract_of_a_transport() -> None:
    store = HashStore()
    check_transport(lambda rank: PGTransport(loopback_group(store, rank, 2), S, CPU))


def test_in_place_the_own_tensors_are_filled() -> None:
    def run(channel: GroupChannel) -> None:
        a = torch.tensor([1.0, 2.0, 3.0])
        if channel.rank == 0:
            transport(channel).send_checkpoint([1], 1, {"a": a, "t": torch.arange(6.0).view(3, 2)})
            return
        own = {"a": torch.zeros(3), "extra": torch.ones(2), "t": torch.zeros(2, 3).t()}
        found = transport(channel, state_dict=lambda: own).recv_checkpoint(0, "<n/a>", 1)
        assert found["a"] is own["a"]
        assert own["a"].tolist() == [1, 2, 3]
        assert own["t"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert own["extra"].tolist() == [1, 1]

    rank_threads(2, run).values()


def test_another_step_is_the_same_error_on_both_sides_and_the_group_goes_on() -> None:
    def run(channel: GroupChannel) -> None:
        mine = transport(channel)
        with pytest.raises(StepMismatch, match="serving 5 but got step=4") as caught:
            move(mine, channel, state_of(), step=4)
        assert caught.value.code == 400
        if channel.rank == 0:
            mine.send_checkpoint([1], 5, state_of())
        else:
            check(mine.recv_checkpoint(0, "<n/a>", 5))

    rank_threads(2, run).values()


def test_a_tensor_that_does_not_fit_is_the_same_error_on_both_sides() -> None:
    def run(channel: GroupChannel) -> None:
        own = {"w": torch.zeros(3, dtype=torch.int32)}
        mine = transport(channel, state_dict=lambda: own if channel.rank else None)
        with pytest.raises(LayoutMismatch, match=r".*'w'.*float32.*int32"):
            move(mine, channel, {"w": torch.ones(3)})
        assert own["w"].tolist() == [0, 0, 0]
        own["w"] = torch.zeros(3)
        if channel.rank == 0:
            mine.send_checkpoint([1], 5, {"w": torch.ones(3)})
        else:
            mine.recv_checkpoint(0, "<n/a>", 5)
            assert own["w"].tolist() == [1, 1, 1]

    rank_threads(2, run).values()


def test_a_value_that_is_not_sent_is_the_same_error_on_both_sides() -> None:
    def run(channel: GroupChannel) -> None:
        with pytest.raises(CodecRefused, match=r"'f'"):
            move(transport(channel), channel, {"f": print})

    rank_threads(2, run).values()


def test_a_wrong_byte_is_the_same_error_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    put = module._put

    def spoil(stream: Any, buffer: torch.Tensor, start: int, stop: int) -> None:
        buffer[0] ^= 1
        put(stream, buffer, start, stop)

    monkeypatch.setattr(module, "_put", spoil)

    def run(channel: GroupChannel) -> None:
        with pytest.raises(IntegrityError, match="wrong bytes"):
            move(transport(channel), channel, {"w": torch.ones(30)})

    rank_threads(2, run).values()


def test_a_state_that_cannot_be_handed_over_reaches_the_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source is told that all is well when the receiver has the state, not before."""

    def fail(self: Destination) -> None:
        raise RuntimeError("no room to finish")

    monkeypatch.setattr(Destination, "finish", fail)

    def job(channel: GroupChannel) -> Any:
        return move(transport(channel), channel, {"w": torch.ones(4)})

    at_source, at_receiver = rank_threads(2, job).exceptions
    assert isinstance(at_source, TransportError)
    assert "no room to finish" in str(at_source)
    assert isinstance(at_receiver, RuntimeError)


def test_a_failing_state_dict_reaches_the_source() -> None:
    def broken() -> object:
        raise KeyError("no such model")

    def run(channel: GroupChannel) -> None:
        if channel.rank == 0:
            with pytest.raises(TransportError, match="no such model"):
                transport(channel).send_checkpoint([1], 5, {"w": torch.ones(3)})
        else:
            with pytest.raises(KeyError):
                transport(channel, state_dict=broken).recv_checkpoint(0, "<n/a>", 5)

    rank_threads(2, run).values()


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=0.2)])
def test_a_stalled_peer_times_out(timeout: timedelta | None) -> None:
    constructor = timedelta(seconds=0.2) if timeout is None else S

    def run(channel: GroupChannel) -> None:
        if channel.rank == 2:
            time.sleep(1)
            return
        mine = transport(channel, timeout=constructor)
        begin = time.monotonic()
        sides = (0, 2) if channel.rank == 0 else (2, 1)
        with pytest.raises(RuntimeError, match=r"(T|t)imed out|timeout|time out") as caught:
            move(mine, channel, state_of(), sides=sides, timeout=timeout)
        assert isinstance(caught.value, TimeoutError)
        assert time.monotonic() - begin < 5

    rank_threads(3, run).values()


@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=5)])
def test_an_explicit_timeout_wins_also_where_it_is_zero(timeout: timedelta) -> None:
    def run(channel: GroupChannel) -> None:
        mine = transport(channel, timeout=timedelta(milliseconds=20))
        if channel.rank == 0:
            time.sleep(0.1)
            mine.send_checkpoint([1], 1, state_of(), timeout)
        else:
            check(mine.recv_checkpoint(0, "<n/a>", 1, timeout))

    rank_threads(2, run).values()


def test_a_destination_that_never_answers_does_not_fail_those_before_it() -> None:
    def run(channel: GroupChannel) -> None:
        mine = transport(channel, timeout=timedelta(seconds=0.5))
        if channel.rank == 0:
            with pytest.raises(TimeoutError) as caught:
                mine.send_checkpoint([1, 2], 1, state_of())
            assert isinstance(caught.value, TransportError)
            assert set(caught.value.failures) == {"rank 2"}
        elif channel.rank == 1:
            check(mine.recv_checkpoint(0, "<n/a>", 1))
        else:
            time.sleep(1.2)

    rank_threads(3, run).values()
