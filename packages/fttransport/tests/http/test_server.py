"""What the server answers to whom, asked with plain sockets."""

from __future__ import annotations

import errno
import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from fttransport import HTTPTransport, Security
from fttransport.fence import Fence
from fttransport.http.server import Server

Make = Callable[..., HTTPTransport[Any]]

S = timedelta(seconds=10)
W = torch.arange(10, dtype=torch.uint8)


def ask(transport: HTTPTransport[Any], path: str, *headers: str, method: str = "GET") -> bytes:
    """The whole answer to one request."""
    parts = urlsplit(transport.address())
    lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", *headers]
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as sock:
        sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        answer = b""
        while data := sock.recv(65536):
            answer += data
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


@pytest.fixture
def serving(http: Make) -> HTTPTransport[Any]:
    transport = http(3, timeout_s=1)
    transport.send_checkpoint([], 5, {"w": W}, S)
    return transport


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/healthz", 200),
        ("/checkpoint/5/full", 200),
        ("/checkpoint/5/data", 200),
        ("/checkpoint/5/metadata", 200),
        ("/checkpoint/5/manifest", 200),
        ("/checkpoint/5/0", 200),
        ("/checkpoint/5/2", 200),
        ("/checkpoint/5/3", 404),
        ("/checkpoint/5/-1", 404),
        ("/checkpoint/4/full", 400),
        ("/checkpoint/five/full", 400),
        ("/checkpoint/5", 404),
        ("/checkpoint/5/full/more", 404),
        ("/checkpoint/5/../../etc/passwd", 404),
        ("/other/5/full", 404),
        ("/", 404),
    ],
)
def test_status(serving: HTTPTransport[Any], path: str, status: int) -> None:
    assert status_of(ask(serving, path)) == status


def test_parts_are_cut_by_bytes(serving: HTTPTransport[Any]) -> None:
    parts = [body_of(ask(serving, f"/checkpoint/5/{i}")) for i in range(3)]
    assert parts == [b"\x00\x01\x02", b"\x03\x04\x05", b"\x06\x07\x08\x09"]


@pytest.mark.parametrize(
    ("asked", "status", "body"),
    [
        ("bytes=2-4", 206, b"\x02\x03\x04"),
        ("bytes=8-", 206, b"\x08\x09"),
        ("bytes=8-99", 206, b"\x08\x09"),
        ("bytes=10-", 416, None),
        ("bytes=4-2", 416, None),
        ("lines=1-2", 416, None),
    ],
)
def test_ranges(serving: HTTPTransport[Any], asked: str, status: int, body: bytes | None) -> None:
    answer = ask(serving, "/checkpoint/5/data", f"Range: {asked}")
    assert status_of(answer) == status
    if body is not None:
        assert body_of(answer) == body
        assert f"Content-Length: {len(body)}".encode() in answer


def test_the_manifest_is_json_and_its_id_the_etag(serving: HTTPTransport[Any]) -> None:
    answer = ask(serving, "/checkpoint/5/manifest")
    assert json.loads(body_of(answer))["step"] == 5
    tag = next(line for line in answer.split(b"\r\n") if line.startswith(b"ETag: "))[6:].decode()
    assert status_of(ask(serving, "/checkpoint/5/data", f"If-Match: {tag}")) == 200
    assert status_of(ask(serving, "/checkpoint/5/data", 'If-Match: "old"')) == 412


def test_methods_and_bodies(serving: HTTPTransport[Any]) -> None:
    assert status_of(ask(serving, "/checkpoint/5/data", method="POST")) == 405
    assert status_of(ask(serving, "/healthz", "Content-Length: 3")) == 413
    head = ask(serving, "/checkpoint/5/data", method="HEAD")
    assert b"Content-Length: 10" in head
    assert body_of(head) == b""


def test_garbage_ends_the_connection_and_not_the_server(serving: HTTPTransport[Any]) -> None:
    parts = urlsplit(serving.address())
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as sock:
        sock.sendall(b"\x00\x01 nonsense\r\n\r\n" + b"x" * 70_000)
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    assert status_of(ask(serving, "/healthz")) == 200


def test_a_blocked_request_is_told_to_come_again(http: Make) -> None:
    transport = http(timeout_s=5)
    begin = time.monotonic()
    answer = ask(transport, "/checkpoint/5/full", "Prefer: wait=0.2")
    assert status_of(answer) == 503
    assert b"Retry-After: 0" in answer
    assert 0.2 <= time.monotonic() - begin < 3


def test_without_the_token_nothing_is_told(http: Make) -> None:
    transport = http(security=Security(token="s3cret"), bind="127.0.0.1")
    transport.send_checkpoint([], 5, {"weight_name": W}, S)
    for path in ("/checkpoint/5/manifest", "/checkpoint/4/full", "/checkpoint/x", "/other"):
        for header in ("X-None: 1", "Authorization: Bearer wrong"):
            answer = ask(transport, path, header)
            assert status_of(answer) == 401
            assert b"weight_name" not in answer
            assert b"serving" not in answer
    right = "Authorization: Bearer s3cret"
    assert status_of(ask(transport, "/checkpoint/5/manifest", right)) == 200


def test_one_reader_too_many_is_told_to_come_again(http: Make) -> None:
    transport = http(max_readers=1)
    transport.send_checkpoint([], 5, {"w": torch.zeros(64 << 20, dtype=torch.uint8)}, S)
    parts = urlsplit(transport.address())
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as sock:
        request = f"GET /checkpoint/5/data HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        sock.sendall(request.encode())
        assert sock.recv(100).startswith(b"HTTP/1.1 200")
        answer = ask(transport, "/checkpoint/5/data")
    assert status_of(answer) == 503
    assert b"Retry-After: 1" in answer


class Exhausted(socket.socket):
    """A listener that at first finds no file descriptor left."""

    failures = 2

    def accept(self) -> tuple[socket.socket, Any]:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_a_server_outlives_a_time_without_file_descriptors(http: Make) -> None:
    listener = Exhausted(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    options: dict[str, Any] = {"security": Security(), "num_chunks": 0, "max_readers": 1}
    server = Server(listener, Fence(), timeout_s=2, **options)
    with socket.create_connection(listener.getsockname(), timeout=5) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sock.recv(15) == b"HTTP/1.1 200 OK"
    server.close(wait=True)


def test_who_sends_a_request_byte_by_byte_is_cut_off(http: Make) -> None:
    parts = urlsplit(http(timeout_s=0.4).address())
    begin = time.monotonic()
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nX: ")
        with suppress(ConnectionError):
            while time.monotonic() - begin < 5:
                sock.sendall(b"y")
                time.sleep(0.05)
    assert time.monotonic() - begin < 3
