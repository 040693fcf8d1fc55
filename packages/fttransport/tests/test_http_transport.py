"""HTTPTransport as users of torchft know it, and in place."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch

from distcore.testing import check_transport
from distcore.v1 import providers
from fttransport import (
    CodecRefused,
    DeadlineExceeded,
    HTTPTransport,
    IntegrityError,
    LayoutMismatch,
    NotServing,
    SourceLost,
    StepMismatch,
)

Make = Callable[..., HTTPTransport[Any]]

S = timedelta(seconds=10)


def state_of(seed: int = 0) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    w = torch.randn(300, 100, generator=made)
    return {"user": {"w": w, "b": torch.ones(3), "name": "x"}, "torchft": {"step": 5}}


def check(found: Any, state: dict[str, Any]) -> None:
    assert torch.equal(found["user"]["w"], state["user"]["w"])
    assert torch.equal(found["user"]["b"], state["user"]["b"])
    assert found["user"]["name"] == "x"
    assert found["torchft"] == {"step": 5}


@pytest.mark.parametrize(("sends", "receives"), [(0, 0), (3, 3), (3, 2), (0, 4), (2, 0), (50, 50)])
def test_a_state_arrives_whatever_the_number_of_chunks(
    http: Make, sends: int, receives: int
) -> None:
    source, receiver = http(sends), http(receives)
    source.send_checkpoint([], 1234, state_of(), S)
    check(receiver.recv_checkpoint(0, source.metadata(), 1234, S), state_of())
    assert receiver.last_report is not None
    assert receiver.last_report.moved_bytes == receiver.last_report.nbytes == 120_012


def test_it_keeps_the_contract_of_a_transport(http: Make) -> None:
    check_transport(http)


def test_it_is_found_as_a_provider() -> None:
    assert providers("transport")["http"].load() is HTTPTransport


def test_a_transport_receives_from_itself(http: Make) -> None:
    transport = http()
    transport.send_checkpoint([1, 2], 1, state_of(), S)
    check(transport.recv_checkpoint(0, transport.metadata(), 1, S), state_of())


def test_the_address_is_the_metadata_and_takes_a_step(http: Make) -> None:
    transport = http()
    assert transport.metadata() == transport.address()
    assert transport.address().startswith("http://127.0.0.1:")
    assert transport.address().endswith("/checkpoint/")


def test_another_step_is_an_http_error_400(http: Make) -> None:
    transport = http()
    transport.send_checkpoint([], 2345, {}, S)
    with pytest.raises(HTTPError, match=r"Error 400.*serving 2345 but got step=1234") as caught:
        transport.recv_checkpoint(0, transport.metadata(), 1234, S)
    assert isinstance(caught.value, StepMismatch)
    assert caught.value.code == 400


def test_a_timeout_of_zero_is_a_url_error(http: Make) -> None:
    transport = http()
    transport.send_checkpoint([], 1, {}, S)
    with pytest.raises(URLError, match=r"urlopen error") as caught:
        transport.recv_checkpoint(0, transport.metadata(), 1, timedelta(0))
    assert isinstance(caught.value, DeadlineExceeded)


def test_a_new_transport_serves_nothing_and_a_receive_blocks(http: Make) -> None:
    transport = http()
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="timed out") as caught:
        transport.recv_checkpoint(0, transport.metadata(), 1, timedelta(seconds=0.5))
    assert isinstance(caught.value, NotServing)
    assert 0.3 < time.monotonic() - begin < 3


def test_a_blocked_receive_completes_when_the_step_is_sent(http: Make) -> None:
    transport = http()
    timer = threading.Timer(0.4, lambda: transport.send_checkpoint([], 3, state_of(), S))
    timer.start()
    begin = time.monotonic()
    check(transport.recv_checkpoint(0, transport.metadata(), 3, S), state_of())
    assert 0.3 < time.monotonic() - begin < 3
    timer.join()


def test_allow_and_disallow_can_be_repeated(http: Make) -> None:
    transport = http()
    transport.disallow_checkpoint()
    transport.send_checkpoint([], 1, state_of(), S)
    transport.allow_checkpoint(2)
    check(transport.recv_checkpoint(0, transport.metadata(), 2, S), state_of())
    transport.disallow_checkpoint()
    transport.disallow_checkpoint()
    with pytest.raises(NotServing):
        transport.recv_checkpoint(0, transport.metadata(), 2, timedelta(seconds=0.3))


def test_a_step_allowed_without_anything_staged_says_so(http: Make) -> None:
    transport = http()
    transport.allow_checkpoint(7)
    with pytest.raises(NotServing, match="no checkpoint is staged") as caught:
        transport.recv_checkpoint(0, transport.metadata(), 7, S)
    assert caught.value.code == 409


def test_after_shutdown_a_receive_is_refused_at_once(http: Make) -> None:
    source, receiver = http(), http()
    source.send_checkpoint([], 1, state_of(), S)
    source.shutdown()
    begin = time.monotonic()
    with pytest.raises(SourceLost, match="refused"):
        receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert time.monotonic() - begin < 2
    source.shutdown(wait=False)


def test_tied_tensors_travel_once(http: Make) -> None:
    source, receiver = http(3), http(3)
    w = torch.randn(100)
    source.send_checkpoint([], 1, {"e": w, "h": w}, S)
    found = receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert found["e"] is found["h"]
    assert receiver.last_report is not None
    assert receiver.last_report.moved_bytes == 400


def test_a_value_that_is_not_sent_is_named(http: Make) -> None:
    with pytest.raises(CodecRefused, match=r"state\['user'\]\['f'\]"):
        http().send_checkpoint([], 1, {"user": {"f": print}}, S)


def test_in_place_fills_the_own_tensors(http: Make) -> None:
    own = {"user": {"w": torch.zeros(300, 100), "b": torch.nn.Parameter(torch.zeros(3))}}
    source, receiver = http(), http(2, state_dict=lambda: own)
    source.send_checkpoint([], 1, state_of(), S)
    found = receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert found["user"]["w"] is own["user"]["w"]
    check(found, state_of())


def test_in_place_into_another_shape_names_the_key_and_writes_nothing(http: Make) -> None:
    own = {"user": {"w": torch.zeros(300, 100), "b": torch.zeros(4)}}
    source, receiver = http(), http(state_dict=lambda: own)
    source.send_checkpoint([], 1, state_of(), S)
    with pytest.raises(LayoutMismatch, match=r"\['user'\]\['b'\].*shape \(3,\)") as caught:
        receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert own["user"]["w"].abs().sum() == 0
    assert caught.value.dirty is False


def test_a_delta_fetches_only_the_chunks_that_differ(http: Make) -> None:
    source_state = {"w": torch.arange(4_000_000.0)}
    own = {"w": torch.arange(4_000_000.0)}
    own["w"][3_999_999] = 0
    source, receiver = http(), http(state_dict=lambda: own, delta=True)
    source.send_checkpoint([], 1, source_state, S)
    receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert torch.equal(own["w"], source_state["w"])
    report = receiver.last_report
    assert report is not None
    # 16 000 000 bytes are three chunks of 4 MiB and a rest.
    assert report.reused_bytes == 3 * 4_194_304
    assert report.moved_bytes == 16_000_000 - 3 * 4_194_304


def test_a_receiver_serves_what_it_has_received(http: Make) -> None:
    source, middle, last = http(), http(serve_received=True), http()
    source.send_checkpoint([], 1, state_of(), S)
    middle.recv_checkpoint(0, source.metadata(), 1, S)
    first_id = middle.last_report and middle.last_report.content_id
    source.shutdown()
    check(last.recv_checkpoint(0, middle.metadata(), 1, S), state_of())
    assert last.last_report is not None
    assert last.last_report.content_id == first_id


def test_progress_comes_to_its_end_on_the_callers_thread(http: Make) -> None:
    seen: list[tuple[int, int, int]] = []
    source = http()
    receiver = http(progress=lambda done, all_: seen.append((done, all_, threading.get_ident())))
    source.send_checkpoint([], 1, state_of(), S)
    receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert seen[-1] == (120_012, 120_012, threading.get_ident())


def test_the_manager_s_calls_of_every_step_are_cheap(http: Make) -> None:
    transport = http()
    begin = time.perf_counter()
    for _ in range(1000):
        transport.metadata()
        transport.disallow_checkpoint()
    assert time.perf_counter() - begin < 1


def test_without_verification_a_replaced_state_is_still_never_mixed(http: Make) -> None:
    source, receiver = http(verify=None), http()
    source.send_checkpoint([], 1, state_of(), S)
    check(receiver.recv_checkpoint(0, source.metadata(), 1, S), state_of())
    address = source.address()
    request = urllib.request.Request(f"{address}1/data", headers={"If-Match": '"other"'})
    with pytest.raises(HTTPError) as caught, urllib.request.urlopen(request, timeout=5):
        pass
    assert caught.value.code == 412
    caught.value.close()


@pytest.mark.parametrize(
    "options", [{"codec": "json"}, {"snapshot": "maybe"}, {"verify": "crc"}], ids=str
)
def test_a_choice_that_does_not_exist_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        HTTPTransport(S, 0, **options)  # type: ignore[arg-type]


def test_metadata_without_a_source_are_refused(http: Make) -> None:
    for metadata in ("", "127.0.0.1:80", "ftp://a:1/checkpoint/"):
        with pytest.raises(ValueError, match="metadata"):
            http().recv_checkpoint(0, metadata, 1, S)


def test_a_flipped_bit_in_memory_is_an_integrity_error(http: Make) -> None:
    """The state changes under an alias snapshot without `disallow_checkpoint`."""
    state = state_of()
    own = {"user": {"w": torch.zeros(300, 100)}}
    source, receiver = http(), http(state_dict=lambda: own)
    source.send_checkpoint([], 1, state, S)
    state["user"]["w"][0, 0] += 1
    with pytest.raises(IntegrityError, match="wrong bytes in chunk 0") as caught:
        receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert caught.value.dirty is True
