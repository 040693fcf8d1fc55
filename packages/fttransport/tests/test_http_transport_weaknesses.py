"""Where transports of this kind have been found weak, each as the case that shows it.

A name says which: `w3` is the third of the list of weaknesses found in torchft's transports.
Those of transfers over a process group are in `ranks/test_pg_transport_weaknesses.py`.
"""

from __future__ import annotations

import gc
import http.client
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
import torch

from fttransport import (
    AuthError,
    CodecRefused,
    HTTPTransport,
    Security,
    SourceLost,
    TransportError,
    join_metadata,
)

Make = Callable[..., HTTPTransport[Any]]
Front = Callable[..., Any]

S = timedelta(seconds=10)
STATE = {"w": torch.arange(1_000_000.0)}


class Command:
    """A value whose pickle makes a file where it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    with urlopen(Request(url, headers=headers), timeout=5) as answer:
        return answer.status, dict(answer.headers), answer.read()


def slow_reader(address: str, *, step: int = 1) -> socket.socket:
    """A connection that has asked for everything and takes little of it at once."""
    parts = urlsplit(address)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.connect((parts.hostname, parts.port))
    sock.settimeout(5)
    sock.sendall(f"GET {parts.path}{step}/full HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    return sock


def read_to_end(sock: socket.socket, pause_s: float = 0.0) -> int:
    """How many bytes still come."""
    got = 0
    try:
        while data := sock.recv(1 << 20):
            got += len(data)
            time.sleep(pause_s)
    except ConnectionError:
        pass
    return got


def test_w1_nothing_that_comes_over_the_wire_runs(http: Make, tmp_path: Path) -> None:
    command = Command(tmp_path / "made")
    with pytest.raises(CodecRefused, match=r"state\['c'\].*Command"):
        http().send_checkpoint([], 1, {"c": command}, S)
    source = http(codec="pickle")
    source.send_checkpoint([], 1, {"c": command}, S)
    with pytest.raises(CodecRefused, match="pickle"):
        http().recv_checkpoint(0, source.metadata(), 1, S)
    assert not command.path.exists()


def test_w2_without_the_token_nothing_is_read_and_loopback_is_the_default(http: Make) -> None:
    assert urlsplit(http().address()).hostname == "127.0.0.1"
    source = http(security=Security(token="t"), bind="127.0.0.1")
    source.send_checkpoint([], 1, {"secret_name": torch.ones(3)}, S)
    for what in ("full", "metadata", "manifest", "data", "0"):
        with pytest.raises(HTTPError) as caught:
            get(f"{source.address()}1/{what}")
        assert caught.value.code == 401
        assert b"secret_name" not in caught.value.read()
        caught.value.close()


def test_w3_an_error_page_in_the_middle_is_not_taken_for_data(http: Make, proxy: Front) -> None:
    page = b"HTTP/1.0 500 Internal Server Error\r\n\r\n<html>" + b"x" * 3000

    def fault(data: bytes, before: int) -> bytes:
        return page.ljust(len(data)) if before > 1_000_000 else data

    first, second, receiver = http(), http(), http(2)
    for source in (first, second):
        source.send_checkpoint([], 1, STATE, S)
    with proxy(first.address(), fault) as front:
        with pytest.raises(TransportError):
            receiver.recv_checkpoint(0, front.address, 1, S)
        metadata = join_metadata([front.address, second.metadata()])
        found = receiver.recv_checkpoint(0, metadata, 1, S)
    assert torch.equal(found["w"], STATE["w"])


def test_w4_answers_say_their_length_and_give_ranges(http: Make) -> None:
    source = http()
    source.send_checkpoint([], 1, STATE, S)
    status, headers, body = get(f"{source.address()}1/data", Range="bytes=400-407")
    assert (status, headers["Content-Length"]) == (206, "8")
    assert headers["Content-Range"] == "bytes 400-407/4000000"
    assert body == STATE["w"][100:102].numpy().tobytes()
    assert get(f"{source.address()}1/full")[1]["Content-Length"] == "4000000"


def test_w5_when_the_source_dies_another_takes_over(http: Make, proxy: Front) -> None:
    first, second, receiver = http(), http(), http()
    for source in (first, second):
        source.send_checkpoint([], 1, STATE, S)

    def fault(data: bytes, before: int) -> bytes:
        if before > 500_000:
            first.shutdown(wait=False)
        return data

    with proxy(first.address(), fault) as front:
        metadata = join_metadata([front.address, second.metadata()])
        found = receiver.recv_checkpoint(0, metadata, 1, S)
    assert torch.equal(found["w"], STATE["w"])


def test_w6_a_reader_that_takes_longer_than_the_timeout_is_served_to_its_end(http: Make) -> None:
    source = http(timeout_s=0.4)
    source.send_checkpoint([], 1, {"w": torch.zeros(6_000_000, dtype=torch.uint8)}, S)
    with slow_reader(source.address()) as sock:
        got, until = 0, time.monotonic() + 1.2
        while time.monotonic() < until:
            time.sleep(0.02)
            got += len(sock.recv(1 << 13))
        assert got < 3_000_000
        while got < 6_000_000:
            data = sock.recv(1 << 20)
            assert data, f"cut off after {got} bytes"
            got += len(data)


def test_w7_the_timeout_is_a_deadline_also_where_bytes_drip(http: Make, proxy: Front) -> None:
    def fault(data: bytes, before: int) -> bytes:
        time.sleep(0.05)
        return data

    source, receiver = http(), http()
    source.send_checkpoint([], 1, STATE, S)
    begin = time.monotonic()
    with proxy(source.address(), fault, piece=2000) as front, pytest.raises(TimeoutError):
        receiver.recv_checkpoint(0, front.address, 1, timedelta(seconds=1))
    assert time.monotonic() - begin < 2.5


def test_w8_after_disallow_timed_out_the_fence_is_as_good_as_before(http: Make) -> None:
    """A reader that does not go is cut off; open and close work as ever, nobody is let in."""
    source, receiver = http(timeout_s=0.3), http()
    state = {"w": torch.zeros(50_000_000, dtype=torch.uint8)}
    for step in (1, 2, 3):
        source.send_checkpoint([], step, state, S)
        with slow_reader(source.address(), step=step) as sock:
            sock.recv(1000)
            source.disallow_checkpoint()
            with pytest.raises(TimeoutError):
                receiver.recv_checkpoint(0, source.metadata(), step, timedelta(seconds=0.2))
            assert read_to_end(sock) < 50_000_000
    source.send_checkpoint([], 4, STATE, S)
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 4, S)["w"], STATE["w"])


def test_w9_blocked_readers_wait_beside_each_other(http: Make) -> None:
    source = http(timeout_s=5)
    took: list[float] = []

    def receive() -> None:
        receiver, begin = http(), time.monotonic()
        with pytest.raises(TimeoutError):
            receiver.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=1))
        took.append(time.monotonic() - begin)

    threads = [threading.Thread(target=receive) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(took) == 5
    assert max(took) < 3


@pytest.mark.parametrize("way", ["disallow", "send", "shutdown"])
def test_w12_what_was_staged_is_freed(http: Make, way: str) -> None:
    source = http(snapshot="copy")
    source.send_checkpoint([], 1, STATE, S)
    staged = source._fence.snapshot
    assert staged is not None
    kept = weakref.ref(staged.stream)
    del staged
    if way == "disallow":
        source.disallow_checkpoint()
    elif way == "send":
        source.send_checkpoint([], 2, {}, S)
    else:
        source.shutdown()
    gc.collect()
    assert kept() is None


@pytest.mark.gpu
def test_w14_a_state_on_a_device_is_staged_through_pinned_memory(http: Make) -> None:
    source = http()
    source.send_checkpoint([], 1, {"w": STATE["w"].cuda()}, S)
    staged = source._fence.snapshot
    assert staged is not None
    assert all(block.is_pinned() for block in staged.stream.blocks)
    found = http().recv_checkpoint(0, source.metadata(), 1, S)
    assert torch.equal(found["w"], STATE["w"])


def test_w15_there_are_never_more_threads_than_readers_are_allowed(http: Make) -> None:
    source = http(max_readers=1)
    parts = urlsplit(source.address())
    socks = [socket.create_connection((parts.hostname or "", parts.port or 0)) for _ in range(120)]
    try:
        time.sleep(0.3)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("fttransport-reader") <= 8 + 64
    finally:
        for sock in socks:
            sock.close()


def test_w16_the_network_can_be_chosen(http: Make) -> None:
    """By interface, by name, and with several names, of which the first that answers is taken."""
    source = http(interface="lo", advertise=["::1", "127.0.0.1"])
    source.send_checkpoint([], 1, STATE, S)
    first, second = source.metadata().split(",")
    assert urlsplit(first).hostname == "::1"
    assert torch.equal(http().recv_checkpoint(0, second, 1, S)["w"], STATE["w"])
    receiver = http()
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 1, S)["w"], STATE["w"])
    assert receiver.last_report is not None
    assert set(receiver.last_report.per_source) == {second}


def test_w18_parts_are_cut_by_bytes_and_not_by_tensors(http: Make) -> None:
    source = http(4)
    small = {str(i): torch.ones(1, dtype=torch.uint8) for i in range(99)}
    source.send_checkpoint([], 1, {"w": torch.zeros(1_000_001, dtype=torch.uint8), **small}, S)
    sizes = [int(get(f"{source.address()}1/{i}")[1]["Content-Length"]) for i in range(4)]
    assert sizes == [250_025] * 4


def test_w19_a_view_brings_its_own_bytes_only(http: Make) -> None:
    """Views of one buffer, 110 times its size as whole storages, travel as the part they use."""
    buffer = torch.arange(1_000_000.0)
    views = {str(i): buffer[i * 1000 : i * 1000 + 1500] for i in range(110)}
    source, receiver = http(), http()
    source.send_checkpoint([], 1, {"v": buffer[:10], "views": views}, S)
    found = receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert receiver.last_report is not None
    assert receiver.last_report.moved_bytes == 4 * (109 * 1000 + 1500)
    assert all(torch.equal(found["views"][key], view) for key, view in views.items())


def test_w21_a_target_without_memory_is_refused_and_no_other_takes_its_place(http: Make) -> None:
    own = {"w": torch.zeros(1_000_000, device="meta")}
    source, receiver = http(), http(state_dict=lambda: own)
    source.send_checkpoint([], 1, STATE, S)
    with pytest.raises(TransportError, match=r"\['w'\].*meta"):
        receiver.recv_checkpoint(0, source.metadata(), 1, S)


def test_w25_and_torchft_357_a_heal_over_http_needs_no_process_group(http: Make) -> None:
    """So it does not contend with the run's own."""
    source = http()
    source.send_checkpoint([], 1, STATE, S)
    assert torch.equal(http().recv_checkpoint(0, source.metadata(), 1, S)["w"], STATE["w"])
    assert not torch.distributed.is_initialized()


def test_w26_a_log_line_says_the_rate_and_the_route_and_nothing_else_is_printed(
    http: Make, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    source, gone, receiver = http(), http(), http()
    gone.shutdown()
    with caplog.at_level(logging.INFO, "fttransport"):
        source.send_checkpoint([], 1, STATE, S)
        receiver.recv_checkpoint(0, join_metadata([gone.metadata(), source.metadata()]), 1, S)
        with pytest.raises(TransportError):
            receiver.recv_checkpoint(0, source.metadata(), 2, S)
        source.shutdown()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    served = next(line for line in lines if line.startswith("serving step 1"))
    assert f"at {source.address()}: 4.0 MB, staged in" in served
    received = next(line for line in lines if line.startswith("received step 1"))
    assert "MB/s" in received
    assert f"{source.address()}: 4.0 MB" in received
    sent = next(line for line in lines if line.startswith("sent 4.0 MB to 127.0.0.1 port "))
    assert sent.endswith("MB/s")
    lost = next(line for line in lines if line.startswith("did without"))
    assert gone.address() in lost
    assert capfd.readouterr() == ("", "")


def test_a_client_that_keeps_to_http_1_0_is_served(http: Make) -> None:
    """The originals answer so; what was written for them may still ask so."""
    source = http()
    source.send_checkpoint([], 1, {"w": torch.arange(3, dtype=torch.uint8)}, S)
    parts = urlsplit(source.address())
    connection = http_client(parts.hostname or "", parts.port or 0)
    connection.request("GET", f"{parts.path}1/full")
    assert connection.getresponse().read() == b"\0\1\2"
    connection.close()


def http_client(host: str, port: int) -> http.client.HTTPConnection:
    made = http.client.HTTPConnection(host, port, timeout=5)
    made._http_vsn, made._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    return made


def test_a_wrong_token_is_told_at_once_among_several_sources(http: Make) -> None:
    """Where all refuse, that is the error, also beside a source that is gone."""
    source, gone = http(security=Security(token="t"), bind="127.0.0.1"), http()
    gone.shutdown()
    metadata = join_metadata([gone.metadata(), source.metadata()])
    begin = time.monotonic()
    with pytest.raises(AuthError):
        http().recv_checkpoint(0, metadata, 1, S)
    assert time.monotonic() - begin < 3
    with pytest.raises(SourceLost):
        http().recv_checkpoint(0, gone.metadata(), 1, S)
