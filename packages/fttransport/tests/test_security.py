"""Tokens, keys and TLS: who gets in, and what is told to those who do not."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fttransport import AuthError, HTTPTransport, IntegrityError, Security, SourceLost

Make = Callable[..., HTTPTransport[Any]]

S = timedelta(seconds=10)
STATE = {"w": torch.arange(1000.0)}


def guarded(http: Make, security: Security, **options: Any) -> HTTPTransport[Any]:
    made: HTTPTransport[Any] = http(security=security, bind="127.0.0.1", **options)
    return made


def test_with_the_token_a_state_arrives_and_the_metadata_do_not_have_it(http: Make) -> None:
    security = Security(token="s3cret")
    source, receiver = guarded(http, security), guarded(http, security)
    source.send_checkpoint([], 1, STATE, S)
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 1, S)["w"], STATE["w"])
    assert "s3cret" not in source.metadata()
    assert "s3cret" not in repr(security)


@pytest.mark.parametrize("security", [Security(), Security(token="wrong")], ids=["none", "wrong"])
def test_a_missing_or_wrong_token_is_an_auth_error_at_once(http: Make, security: Security) -> None:
    source, receiver = guarded(http, Security(token="s3cret")), http(security=security)
    begin = time.monotonic()
    with pytest.raises(AuthError, match="token is missing or wrong") as caught:
        receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert time.monotonic() - begin < 2
    assert caught.value.code == 401


def test_without_a_token_only_loopback_is_listened_on(http: Make) -> None:
    assert http().address().startswith("http://127.0.0.1:")
    open_to_all = http(security=Security(token="t"), advertise=["host-a", "::1"])
    first, second = open_to_all.metadata().split(",")
    assert first.startswith("http://host-a:")
    assert second.startswith("http://[::1]:")


def test_with_the_same_key_a_state_arrives(http: Make) -> None:
    security = Security(mac="a key of its own")
    source, receiver = http(security=security), http(security=security)
    source.send_checkpoint([], 1, STATE, S)
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 1, S)["w"], STATE["w"])


@pytest.mark.parametrize(
    ("sends", "receives"), [("a", "b"), ("a", None), (None, "a")], ids=["other", "none", "extra"]
)
def test_another_key_is_an_auth_error(http: Make, sends: str | None, receives: str | None) -> None:
    source = http(security=Security(mac=sends))
    receiver = http(security=Security(mac=receives))
    source.send_checkpoint([], 1, STATE, S)
    with pytest.raises(AuthError, match="authenticated"):
        receiver.recv_checkpoint(0, source.metadata(), 1, S)


def test_an_old_step_cannot_be_replayed_under_a_new_one(http: Make) -> None:
    """Whoever has no key can serve what he has seen, but not under another step."""
    security = Security(mac="key")
    source, receiver = http(security=security), http(security=security)
    source.send_checkpoint([], 1, STATE, S)
    staged = source._fence.snapshot
    replaying = http()
    replaying._fence.open(2, staged)
    with pytest.raises(IntegrityError, match="serves step 2 and describes 1"):
        receiver.recv_checkpoint(0, replaying.metadata(), 2, S)


@pytest.mark.parametrize(
    "options", [{"token": ""}, {"token": "a\r\nb"}, {"token": "\u00e9"}, {"mac": True}], ids=str
)
def test_what_cannot_be_a_token_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="token"):
        Security(**options)


@pytest.mark.parametrize("mac", ["", b""], ids=["text", "bytes"])
def test_an_empty_key_is_refused(mac: str | bytes) -> None:
    with pytest.raises(ValueError, match="mac must not be empty"):
        Security(mac=mac)


def test_mac_true_takes_the_token_for_its_key() -> None:
    assert Security(token="t", mac=True).key == Security(mac="t").key
    assert Security(token="t").key == b""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_over_tls_a_state_arrives_and_only_from_who_is_trusted(http: Make, tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        (
            f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout {key} -out {cert} "
            "-subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
        ).split(),
        check=True,
        capture_output=True,
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(cert, key)
    trusting = ssl.create_default_context(cafile=str(cert))
    both = Security(token="t", tls=(server, trusting))
    source, receiver = guarded(http, both), guarded(http, both, num_chunks=2)
    assert source.address().startswith("https://127.0.0.1:")
    state = {"w": torch.arange(3_000_000.0)}
    source.send_checkpoint([], 1, state, S)
    assert torch.equal(receiver.recv_checkpoint(0, source.metadata(), 1, S)["w"], state["w"])
    plain = http(security=Security(token="t"), bind="127.0.0.1")
    with pytest.raises((AuthError, SourceLost)):
        plain.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=3))
    with pytest.raises(AuthError, match="asks for TLS"):
        receiver.recv_checkpoint(0, plain.metadata(), 1, timedelta(seconds=3))
