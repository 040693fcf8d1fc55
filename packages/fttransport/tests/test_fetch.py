"""Many sources, and what goes wrong on the way: healed byte for byte, or an error in time."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from fttransport import (
    DeadlineExceeded,
    HTTPTransport,
    IntegrityError,
    SourceLost,
    TransportError,
    join_metadata,
)

Make = Callable[..., HTTPTransport[Any]]
Fault = Callable[[bytes, int], bytes | None]
Front = Callable[..., Any]

S = timedelta(seconds=20)
NBYTES = 40_000_000


def flip(at: int) -> Fault:
    """One bit flipped at a byte of the answers."""

    def fault(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        spoiled = bytearray(data)
        spoiled[at - before] ^= 1
        return bytes(spoiled)

    return fault


def cut(at: int) -> Fault:
    """The connection broken off after so many bytes."""

    def fault(data: bytes, before: int) -> bytes | None:
        return data if before + len(data) < at else None

    return fault


def drip(after: int, pause_s: float) -> Fault:
    """From a byte on, a few bytes at a time."""

    def fault(data: bytes, before: int) -> bytes:
        if before >= after:
            time.sleep(pause_s)
        return data

    return fault


def state_of(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    words = torch.randint(0, 1 << 30, (NBYTES // 8 - 10,), generator=made)
    return {"w": words, "small": torch.arange(10)}


def sources_of(http: Make, n: int, state: dict[str, Any]) -> list[HTTPTransport[Any]]:
    made = [http() for _ in range(n)]
    for source in made:
        source.send_checkpoint([], 1, state, S)
    return made


def check(found: Any, state: dict[str, Any]) -> None:
    assert torch.equal(found["w"], state["w"])
    assert torch.equal(found["small"], state["small"])


def test_a_state_is_striped_over_all_its_sources(http: Make) -> None:
    state, receiver = state_of(), http(4)
    sources = sources_of(http, 3, state)
    metadata = join_metadata([source.metadata() for source in sources])
    check(receiver.recv_checkpoint(0, metadata, 1, S), state)
    report = receiver.last_report
    assert report is not None
    assert set(report.per_source) == {source.address() for source in sources}
    assert report.moved_bytes == NBYTES
    assert report.failures == {}


@pytest.mark.parametrize(
    "fault",
    [flip(6_000_000), cut(6_000_000), drip(6_000_000, 1.0), cut(10), flip(50)],
    ids=["bit", "cut", "drip", "cut at once", "bit in the head"],
)
def test_what_a_bad_source_owes_comes_from_others(proxy: Front, http: Make, fault: Fault) -> None:
    state, receiver = state_of(), http(2)
    sources = sources_of(http, 2, state)
    with proxy(sources[0].address(), fault) as front:
        metadata = join_metadata([front.address, sources[1].metadata()])
        check(receiver.recv_checkpoint(0, metadata, 1, S), state)
    report = receiver.last_report
    assert report is not None
    assert report.moved_bytes >= NBYTES


@pytest.mark.parametrize("fault", [flip(6_000_000), cut(6_000_000)], ids=["bit", "cut"])
def test_the_only_source_is_asked_again_for_what_went_wrong(
    proxy: Front, http: Make, fault: Fault
) -> None:
    state, receiver = state_of(), http()
    (source,) = sources_of(http, 1, state)
    with proxy(source.address(), fault) as front:
        if fault.__qualname__.startswith("flip"):
            check(receiver.recv_checkpoint(0, front.address, 1, S), state)
            assert receiver.last_report is not None
            assert receiver.last_report.retried_bytes > 0
        else:
            with pytest.raises(SourceLost):
                receiver.recv_checkpoint(0, front.address, 1, S)


def test_a_source_that_dies_at_any_moment_is_replaced(proxy: Front, http: Make) -> None:
    """Twenty moments and faults from a seed; every state is healed byte for byte."""
    choose = random.Random(7)
    state = {"w": torch.arange(1_500_000), "small": torch.arange(10)}
    sources, receiver = sources_of(http, 3, state), http(2)
    for _ in range(20):
        at = choose.randrange(12_000_000)
        fault = choose.choice([cut(at), flip(at)])
        with proxy(sources[0].address(), fault) as front:
            addresses = [front.address, *(source.metadata() for source in sources[1:])]
            choose.shuffle(addresses)
            check(receiver.recv_checkpoint(0, join_metadata(addresses), 1, S), state)


def test_a_second_try_goes_on_where_the_first_ended(proxy: Front, http: Make) -> None:
    state, receiver = state_of(), http()
    (source,) = sources_of(http, 1, state)
    with proxy(source.address(), cut(20_000_000)) as front, pytest.raises(SourceLost):
        receiver.recv_checkpoint(0, front.address, 1, S)
    check(receiver.recv_checkpoint(0, source.metadata(), 1, S), state)
    report = receiver.last_report
    assert report is not None
    assert report.reused_bytes >= 3 * 4_194_304
    assert report.moved_bytes == NBYTES - report.reused_bytes


def test_a_slow_drip_ends_at_the_deadline(proxy: Front, http: Make) -> None:
    own = {"w": torch.zeros(NBYTES // 8 - 10, dtype=torch.int64)}
    state, receiver = state_of(), http(state_dict=lambda: own)
    (source,) = sources_of(http, 1, state)
    with proxy(source.address(), drip(1_000_000, 0.05), piece=1000) as front:
        begin = time.monotonic()
        with pytest.raises(DeadlineExceeded) as caught:
            receiver.recv_checkpoint(0, front.address, 1, timedelta(seconds=1))
        assert time.monotonic() - begin < 4
    assert caught.value.dirty is True


def test_a_silent_source_is_lost_after_a_quarter_of_the_time(proxy: Front, http: Make) -> None:
    state, receiver = state_of(), http()
    sources = sources_of(http, 2, state)
    with proxy(sources[0].address(), drip(1_000_000, 30)) as front:
        metadata = join_metadata([front.address, sources[1].metadata()])
        begin = time.monotonic()
        check(receiver.recv_checkpoint(0, metadata, 1, timedelta(seconds=8)), state)
        assert time.monotonic() - begin < 6


def test_sources_with_other_content_are_never_mixed(http: Make) -> None:
    state, receiver = state_of(), http(2)
    first, second = sources_of(http, 2, state)
    (other,) = sources_of(http, 1, state_of(seed=1))
    metadata = join_metadata([other.metadata(), first.metadata(), second.metadata()])
    check(receiver.recv_checkpoint(0, metadata, 1, S), state)
    report = receiver.last_report
    assert report is not None
    assert "has content" in report.failures[other.address()]
    assert other.address() not in report.per_source


def test_dead_sources_beside_a_live_one_cost_nothing(http: Make) -> None:
    state, receiver = state_of(), http()
    dead, live = sources_of(http, 2, state)
    dead.shutdown()
    metadata = join_metadata([dead.metadata(), live.metadata()])
    check(receiver.recv_checkpoint(0, metadata, 1, S), state)
    assert receiver.last_report is not None
    assert "refused" in receiver.last_report.failures[dead.address()]


def test_a_source_that_changes_its_state_meanwhile_is_never_mixed(proxy: Front, http: Make) -> None:
    state = state_of()
    own = {"w": torch.zeros_like(state["w"])}
    (source,) = sources_of(http, 1, state)
    changed = False

    def change(done: int, total: int) -> None:
        nonlocal changed
        if not changed:
            changed = True
            source.send_checkpoint([], 1, state_of(seed=1), S)

    receiver = http(state_dict=lambda: own, progress=change)
    with proxy(source.address(), drip(3_000_000, 0.002)) as front:
        try:
            found = receiver.recv_checkpoint(0, front.address, 1, S)
        except (IntegrityError, SourceLost):
            assert changed
        else:
            check(found, state)


def test_after_disallow_returned_no_change_reaches_a_reader(proxy: Front, http: Make) -> None:
    """A receiver that is under way comes to its end, or fails; it never sees a later value."""
    state = {"w": torch.zeros(NBYTES // 8, dtype=torch.int64)}
    source, receiver = http(verify=None, timeout_s=0.3), http(4)
    source.send_checkpoint([], 1, state, S)
    begun = False

    def fence(done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            begun = True
            source.disallow_checkpoint()
            state["w"].fill_(1)

    receiver = http(4, progress=fence)
    with proxy(source.address(), drip(1_000_000, 0.01)) as front:
        try:
            found = receiver.recv_checkpoint(0, front.address, 1, timedelta(seconds=4))
        except TransportError:
            assert begun
        else:
            assert int(found["w"].max()) == 0


@pytest.mark.parametrize("place", range(0, 400, 16))
def test_a_bit_anywhere_in_the_head_of_one_source_costs_that_source_only(
    proxy: Front, http: Make, place: int
) -> None:
    state, receiver = state_of(), http(2)
    sources = sources_of(http, 2, state)
    with proxy(sources[0].address(), flip(place)) as front:
        metadata = join_metadata([front.address, sources[1].metadata()])
        check(receiver.recv_checkpoint(0, metadata, 1, S), state)


@pytest.mark.parametrize("who", ["ask", "fetch"])
def test_a_name_that_is_looked_up_for_long_does_not_outlast_the_deadline(
    proxy: Front, http: Make, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """By who asks what there is, or by a second stream, which has a connection of its own."""
    (source,) = sources_of(http, 1, state_of())
    receiver, look_up, ended = http(2), socket.getaddrinfo, threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        if threading.current_thread().name.startswith(f"fttransport-{who}"):
            ended.wait(20)
        return look_up(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with proxy(source.address(), drip(1_000_000, 0.02)) as front:
        begin = time.monotonic()
        with pytest.raises(TransportError) as caught:
            receiver.recv_checkpoint(0, front.address, 1, timedelta(seconds=2))
        assert isinstance(caught.value, TimeoutError)
        assert time.monotonic() - begin < 5
    ended.set()
