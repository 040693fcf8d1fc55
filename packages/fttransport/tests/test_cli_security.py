"""Tokens, keys and certificates on the command line."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fttransport import HTTPTransport, Security

pytest.importorskip("typer")
pytest.importorskip("rich")
testing = pytest.importorskip("typer.testing")
safetensors = pytest.importorskip("safetensors.torch")

from fttransport.cli import app  # noqa: E402 - after the libraries that it needs

Make = Callable[..., HTTPTransport[Any]]

TENSORS = {"w": torch.arange(100_000.0)}

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)


def call(*arguments: object) -> Any:
    return testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state, a token, two keys, and a certificate that is its own authority."""
    home = tmp_path_factory.mktemp("files")
    safetensors.save_file(TENSORS, home / "in.safetensors")
    (home / "token").write_text("s3cret\n")
    (home / "mac").write_bytes(b"\xff a key \n")
    (home / "other").write_text("another key")
    (home / "empty").write_text("\n")
    subprocess.run(
        (
            f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout {home}/key -out {home}/cert"
            " -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
        ).split(),
        check=True,
        capture_output=True,
    )
    return home


@pytest.fixture(scope="module")
def metadata(files: Path) -> Iterator[str]:
    """What a source prints that asks for a token and a certificate, and has a key."""
    command = [sys.executable, "-c", "from fttransport.cli import app; app()", "serve"]
    options = ["--step", "7", "--bind", "127.0.0.1", "--mac-file", "mac", "--token-file", "token"]
    tls = ["--tls-cert", "cert", "--tls-key", "key", "--tls-ca", "cert"]
    with subprocess.Popen(
        [*command, "in.safetensors", *options, *tls], stdout=subprocess.PIPE, text=True, cwd=files
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


GIVEN = {"token-file": "token", "mac-file": "mac", "tls-cert": "cert", "tls-key": "key"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"tls-ca": None}, "certificate is not trusted"),
        ({"mac-file": None}, "is authenticated with a key"),
        ({"mac-file": "other"}, "authenticated with another key"),
        ({"token-file": None}, "token is missing or wrong"),
        ({"token-file": "other"}, "token is missing or wrong"),
        ({"tls-cert": None, "tls-key": None}, "https://127.0.0.1"),
        ({"mac-file": "empty"}, "must not be empty"),
        ({"tls-cert": None}, ""),
        ({"tls-cert": None, "tls-ca": None}, "--tls-key needs --tls-cert"),
        ({"tls-cert": "token"}, "error"),
    ],
    ids=str,
)
def test_only_who_has_everything_gets_the_state(
    metadata: str, files: Path, tmp_path: Path, change: dict[str, str | None], said: str
) -> None:
    chosen = GIVEN | {"tls-ca": "cert"} | change
    options = [
        text for name, file in chosen.items() if file for text in (f"--{name}", files / file)
    ]
    output = tmp_path / "out.safetensors"
    result = call("fetch", metadata, "--step", 7, "-o", output, "--timeout", 10, *options)
    assert metadata.startswith("https://127.0.0.1:")
    if not change:
        assert result.exit_code == 0, result.output
        assert torch.equal(safetensors.load_file(output)["w"], TENSORS["w"])
        return
    assert result.exit_code == 1
    assert said in result.stderr.replace("\n", " ")
    assert not output.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tls-key", "key"], "needs --tls-cert"),
        (["--tls-ca", "cert"], "needs --tls-cert"),
        (["--tls-cert", "cert"], "error"),
        (["--mac-file", "missing"], "No such file"),
        (["--mac-file", "empty"], "must not be empty"),
    ],
    ids=str,
)
def test_a_source_that_lacks_a_part_says_so(files: Path, options: list[str], said: str) -> None:
    named = [text if text.startswith("--") else files / text for text in options]
    result = call("serve", files / "in.safetensors", "--step", 1, "--seconds", 0, *named)
    assert result.exit_code == 1
    assert said in result.stderr.replace("\n", " ")


def test_a_key_of_a_file_is_the_key_of_its_text(http: Make, files: Path, tmp_path: Path) -> None:
    """Without the white space around it, so that an editor's line break is no part of it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files / "cert", files / "key")
    security = Security(mac=b"\xff a key", tls=context)
    source = http(security=security, bind="127.0.0.1")
    source.send_checkpoint([], 1, TENSORS, timedelta(0))
    output = tmp_path / "out.safetensors"
    options = ["--mac-file", files / "mac", "--tls-ca", files / "cert"]
    result = call("fetch", source.metadata(), "--step", 1, "-o", output, *options)
    assert result.exit_code == 0, result.output
