"""What users of such transports have reported or asked for, each as the case that it was about.

A name says whose report it was: the project, and its number there. Those about transfers over a
process group are in `ranks/test_pg_transport_weaknesses.py`.
"""

from __future__ import annotations

import pickle
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
import torch

from fttransport import (
    CodecRefused,
    HTTPTransport,
    IntegrityError,
    Security,
    SourceLost,
    TransportError,
    join_metadata,
)

Make = Callable[..., HTTPTransport[Any]]
Front = Callable[..., Any]

S = timedelta(seconds=20)
STATE = {"w": torch.arange(3_000_000.0)}


def serving(http: Make, state: object = STATE, step: int = 1, **options: Any) -> HTTPTransport[Any]:
    source = http(**options)
    source.send_checkpoint([], step, state, S)
    return source


def flip(at: int) -> Callable[[bytes, int], bytes]:
    """A fault: one bit of a byte is another."""

    def fault(data: bytes, before: int) -> bytes:
        if not before <= at < before + len(data):
            return data
        spoiled = bytearray(data)
        spoiled[at - before] ^= 1
        return bytes(spoiled)

    return fault


def test_torchft_329_the_fast_network_is_named_and_the_report_says_which_was_used(
    http: Make,
) -> None:
    """A name that leads nowhere costs nothing but the try."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        number = closed.getsockname()[1]
    source, receiver = serving(http, interface="lo", advertise="127.0.0.1"), http()
    metadata = f"http://127.0.0.1:{number}/checkpoint/,{source.metadata()}"
    receiver.recv_checkpoint(0, metadata, 1, S)
    assert receiver.last_report is not None
    assert dict(receiver.last_report.per_source) == {source.metadata(): 12_000_000}
    assert f"{source.metadata()}: 12.0 MB" in str(receiver.last_report)


def test_torchft_36_a_byte_that_is_wrong_is_fetched_again(http: Make, proxy: Front) -> None:
    source, receiver = serving(http), http()
    with proxy(source.address(), flip(5_000_000)) as front:
        found = receiver.recv_checkpoint(0, front.address, 1, S)
    assert torch.equal(found["w"], STATE["w"])
    assert receiver.last_report is not None
    assert receiver.last_report.retried_bytes > 0


def test_torchft_282_a_state_that_takes_collectives_is_made_by_the_sending_thread(
    http: Make,
) -> None:
    """Once, in `send_checkpoint`, so that all ranks can take part in it."""
    calls: list[int] = []

    def state() -> dict[str, Any]:
        calls.append(threading.get_ident())
        return STATE

    source = serving(http, state)
    for _ in range(2):
        http().recv_checkpoint(0, source.metadata(), 1, S)
    assert calls == [threading.get_ident()]


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6")
def test_torchft_12_and_67_both_families_and_the_real_port(http: Make) -> None:
    everywhere = serving(http, bind="", advertise=["127.0.0.1", "::1"])
    for address in everywhere.metadata().split(","):
        assert urlsplit(address).port
        assert "w" in http().recv_checkpoint(0, address, 1, S)
    only_six = serving(http, bind="::1")
    assert urlsplit(only_six.address()).hostname == "::1"
    assert "w" in http().recv_checkpoint(0, only_six.metadata(), 1, S)


def test_torchft_81_a_heal_takes_from_all_that_hold_the_state(http: Make) -> None:
    big = {"w": torch.arange(5_000_000)}
    sources = [serving(http, big) for _ in range(3)]
    receiver = http(3)
    receiver.recv_checkpoint(0, join_metadata([s.metadata() for s in sources]), 1, S)
    assert receiver.last_report is not None
    assert set(receiver.last_report.per_source) == {s.address() for s in sources}
    # On a busy machine two may be done before the third has begun.
    assert sum(nbytes > 0 for nbytes in receiver.last_report.per_source.values()) >= 2


@pytest.mark.parametrize("chunks", [0, 3])
def test_pytorch_180481_tensors_without_elements(http: Make, chunks: int) -> None:
    w = torch.randn(10)
    source = serving(http, {"w": w, "b": torch.empty(0), "c": torch.empty(3, 0, 2)}, num_chunks=3)
    found = http(chunks).recv_checkpoint(0, source.metadata(), 1, S)
    assert torch.equal(found["w"], w)
    assert (found["b"].shape, found["c"].shape) == ((0,), (3, 0, 2))
    empty = serving(http, {"b": torch.empty(0)})
    own = {"b": torch.empty(0)}
    assert http(chunks).recv_checkpoint(0, empty.metadata(), 1, S)["b"].shape == (0,)
    in_place = http(chunks, state_dict=lambda: own, delta=True)
    assert in_place.recv_checkpoint(0, empty.metadata(), 1, S)["b"] is own["b"]


def test_pytorch_159801_any_number_heals_from_any_number(http: Make) -> None:
    sources = join_metadata([serving(http).metadata() for _ in range(2)])
    for _ in range(5):
        assert torch.equal(http(2).recv_checkpoint(0, sources, 1, S)["w"], STATE["w"])


def test_miles_1415_parameters_and_a_send_that_fails(http: Make) -> None:
    """A send that raises leaves the fence as it was: what was served goes on, and can be ended."""
    weight = torch.nn.Parameter(torch.ones(3))
    source, receiver = serving(http, {"w": weight}), http()
    with pytest.raises(CodecRefused):
        source.send_checkpoint([], 2, {"w": object()}, S)
    found = receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert isinstance(found["w"], torch.nn.Parameter)
    source.disallow_checkpoint()
    with pytest.raises(TimeoutError):
        receiver.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=0.3))


def test_torchtitan_4422_and_4598_a_callable_is_asked_at_every_send(http: Make) -> None:
    """And the content id tells a state that is stale from one that is not."""
    current = {"lr": 1.0}
    source, receiver, ids = http(), http(), []
    for step in (1, 2):
        current["lr"] /= 2
        source.send_checkpoint([], step, lambda: dict(current), S)
        assert receiver.recv_checkpoint(0, source.metadata(), step, S) == current
        assert receiver.last_report is not None
        ids.append(receiver.last_report.content_id)
    assert ids[0] != ids[1]


def test_torchtitan_2899_one_timeout_bounds_the_whole_call(http: Make, proxy: Front) -> None:
    """Whatever the others are: the sources' and the receiver's own are longer here."""

    def fault(data: bytes, before: int) -> bytes:
        time.sleep(0.1)
        return data

    source = serving(http, timeout_s=30)
    begin = time.monotonic()
    with proxy(source.address(), fault, piece=1000) as front, pytest.raises(TimeoutError):
        http(timeout_s=30).recv_checkpoint(0, front.address, 1, timedelta(seconds=0.8))
    assert time.monotonic() - begin < 2.5


def test_megatron_5281_a_corrupt_replica_is_replaced_or_named(http: Make) -> None:
    """The replica's own memory is wrong; what it says of it was right once."""
    state = {"first": torch.ones(1_048_576), "w": STATE["w"]}
    spoiled = {"first": state["first"], "w": STATE["w"].clone()}
    corrupt, sound = serving(http, spoiled), serving(http, state)
    spoiled["w"][5] = float("nan")
    receiver = http()
    metadata = join_metadata([corrupt.metadata(), sound.metadata()])
    assert torch.equal(receiver.recv_checkpoint(0, metadata, 1, S)["w"], STATE["w"])
    with pytest.raises(
        IntegrityError, match=r"wrong bytes in chunk 1: part of state\['w'\]$"
    ) as caught:
        http().recv_checkpoint(0, corrupt.metadata(), 1, S)
    assert corrupt.address() in str(caught.value)


def test_checkpoint_engine_25_receivers_serve_each_other(http: Make) -> None:
    """One source and what has been received from it are sources alike."""
    first = serving(http)
    second = http(serve_received=True)
    second.recv_checkpoint(0, first.metadata(), 1, S)
    third = http(2)
    third.recv_checkpoint(0, join_metadata([first.metadata(), second.metadata()]), 1, S)
    assert third.last_report is not None
    assert set(third.last_report.per_source) == {first.address(), second.address()}


def test_checkpoint_engine_106_a_second_update_is_not_taken_for_the_first(http: Make) -> None:
    source, receiver = serving(http), http()
    receiver.recv_checkpoint(0, source.metadata(), 1, S)
    changed = {"w": STATE["w"] + 1}
    source.send_checkpoint([], 1, changed, S)
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 1, S)["w"], changed["w"])


def test_checkpoint_engine_104_a_send_that_nobody_fetches_returns_at_once(http: Make) -> None:
    begin = time.monotonic()
    serving(http).disallow_checkpoint()
    assert time.monotonic() - begin < 2


def test_sglang_33821_a_receiver_becomes_a_source_also_for_the_next(http: Make) -> None:
    """A chain: from the first to the second to the third, each gone when the next has come."""
    source = serving(http)
    for _ in range(2):
        following = http(serve_received=True)
        following.recv_checkpoint(0, source.metadata(), 1, S)
        source.shutdown()
        source = following
    assert torch.equal(http().recv_checkpoint(0, source.metadata(), 1, S)["w"], STATE["w"])


@pytest.mark.parametrize("report", ["hivemind_169", "sglang_24068"])
def test_hivemind_169_many_joiners_at_one_source_are_let_in_by_and_by(
    http: Make, report: str
) -> None:
    source = serving(http, max_readers=2 if report == "hivemind_169" else 1)
    joiners = [http() for _ in range(8)]
    right: list[bool] = []

    def join(joiner: HTTPTransport[Any]) -> None:
        found = joiner.recv_checkpoint(0, source.metadata(), 1, S)
        right.append(torch.equal(found["w"], STATE["w"]))

    threads = [threading.Thread(target=join, args=(joiner,)) for joiner in joiners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 8


def test_modelexpress_550_nothing_is_never_taken_for_success(http: Make) -> None:
    """No source is an error; a state without bytes says that it has none."""
    with pytest.raises(ValueError, match="no source"):
        http().recv_checkpoint(0, join_metadata([]), 1, S)
    source, receiver = serving(http, {}), http()
    assert receiver.recv_checkpoint(0, source.metadata(), 1, S) == {}
    assert receiver.last_report is not None
    assert (receiver.last_report.nbytes, receiver.last_report.moved_bytes) == (0, 0)
    assert "0.0 MB of state" in str(receiver.last_report)


def test_hivemind_504_a_donor_that_leaves_in_the_middle(http: Make, proxy: Front) -> None:
    def fault(data: bytes, before: int) -> bytes | None:
        return data if before < 3_000_000 else None

    first, second, receiver = serving(http), serving(http), http()
    with proxy(first.address(), fault) as front:
        with pytest.raises(SourceLost):
            receiver.recv_checkpoint(0, front.address, 1, S)
        metadata = join_metadata([front.address, second.metadata()])
        assert torch.equal(receiver.recv_checkpoint(0, metadata, 1, S)["w"], STATE["w"])


def test_dlrover_1233_sources_of_another_step_are_left_out(http: Make) -> None:
    old, new = serving(http, {"w": STATE["w"] - 1}, 5), serving(http, step=6)
    receiver = http()
    metadata = join_metadata([old.metadata(), new.metadata()])
    assert torch.equal(receiver.recv_checkpoint(0, metadata, 6, S)["w"], STATE["w"])
    assert receiver.last_report is not None
    assert set(receiver.last_report.per_source) == {new.address()}
    assert "serving 5 but got step=6" in receiver.last_report.failures[old.address()]


def test_sglang_37216_equal_keys_of_other_ranks_are_never_mixed(http: Make) -> None:
    """Two stages of a pipeline have the same keys, and other tensors under them."""
    stages = [serving(http, {"layer.w": torch.full((2_000_000,), float(i))}) for i in range(2)]
    found = http(2).recv_checkpoint(0, join_metadata([s.metadata() for s in stages]), 1, S)
    assert len(found["layer.w"].unique()) == 1


def test_lmdeploy_4698_nothing_is_taken_from_a_request(http: Make) -> None:
    source = serving(http, security=Security(token="t"), bind="127.0.0.1")
    body = pickle.dumps({"w": 1})  # what such a request carried
    with pytest.raises(HTTPError) as caught:
        urlopen(Request(f"{source.address()}1/full", data=body), timeout=5)
    assert caught.value.code == 405
    caught.value.close()


def test_pytorch_ghsa_63cw_no_pickle_is_read_or_written(
    http: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object, **options: object) -> None:
        raise AssertionError("a pickle")

    for home, name in ((pickle, "loads"), (pickle, "dumps"), (torch, "load"), (torch, "save")):
        monkeypatch.setattr(home, name, forbidden)
    source = serving(http, {**STATE, "n": (1, "a", b"b", None, 1.5), "dtype": torch.float16})
    found = http(2).recv_checkpoint(0, source.metadata(), 1, S)
    assert found["n"] == (1, "a", b"b", None, 1.5)


def test_checkpoint_engine_3_a_transfer_that_fails_says_why(http: Make) -> None:
    """In a type, and in the words of each source."""
    gone, other = serving(http), serving(http, step=2)
    gone.shutdown()
    metadata = join_metadata([gone.metadata(), other.metadata()])
    with pytest.raises(TransportError, match="serving 2 but got step=1"):
        http().recv_checkpoint(0, metadata, 1, S)
    with pytest.raises(SourceLost, match=gone.address()):
        http().recv_checkpoint(0, gone.metadata(), 1, S)
