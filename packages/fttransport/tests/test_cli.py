"""The command line: a file served by one process and fetched into another file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
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

S = timedelta(seconds=10)


def call(*arguments: object) -> Any:
    return testing.CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_served_file_is_fetched_as_it_is(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(100, 30), "b": torch.arange(5, dtype=torch.bfloat16)}
    source, copy, token = tmp_path / "in.safetensors", tmp_path / "out.safetensors", tmp_path / "t"
    safetensors.save_file(tensors, source)
    token.write_text("s3cret\n")
    command = [sys.executable, "-c", "from fttransport.cli import app; app()", "serve"]
    options = [str(source), "--step", "7", "--token-file", str(token), "--bind", "127.0.0.1"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            metadata = process.stdout.readline().strip() if process.stdout else ""
            result = call("fetch", metadata, "--step", 7, "-o", copy, "--token-file", token)
            refused = call("fetch", metadata, "--step", 7, "-o", tmp_path / "x", "--timeout", 5)
        finally:
            process.terminate()
    assert result.exit_code == 0, result.output
    found = safetensors.load_file(copy)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[key], value) for key, value in tensors.items())
    assert refused.exit_code == 1
    assert not (tmp_path / "x").exists()


def test_a_nested_state_is_written_with_dots_and_tied_tensors_twice(
    http: Make, tmp_path: Path
) -> None:
    w = torch.ones(3)
    transport = http(security=Security(), bind="127.0.0.1")
    transport.send_checkpoint([], 1, {"user": {"e": w, "h": w}, "list": [w[:2], 5]}, S)
    output = tmp_path / "out.safetensors"
    result = call("fetch", transport.metadata(), "--step", 1, "-o", output)
    assert result.exit_code == 0, result.output
    found = safetensors.load_file(output)
    assert {key: value.tolist() for key, value in found.items()} == {
        "user.e": [1, 1, 1],
        "user.h": [1, 1, 1],
        "list.0": [1, 1],
    }


def test_errors_are_told_without_a_traceback(http: Make, tmp_path: Path) -> None:
    transport = http()
    transport.send_checkpoint([], 1, {"n": 5}, S)
    output = tmp_path / "out.safetensors"
    for step, word in ((2, "serving 1 but got"), (1, "no tensors")):
        result = call("fetch", transport.metadata(), "--step", step, "-o", output)
        assert result.exit_code == 1
        assert word in result.stderr.replace("\n", " ")
    missing = call("serve", tmp_path / "none.safetensors", "--step", 1)
    assert missing.exit_code == 1
    assert list(tmp_path.iterdir()) == []
