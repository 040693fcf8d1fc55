"""Exit codes, and who only met a peer's failure."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from distcore.board import Board
from distcore.exits import exit_code, is_of_a_peer, leave
from distcore.v1.errors import ChannelTimeout, DisagreementError, PeerError


class Left(BaseException):
    """The process would have ended here."""


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[float]:
    """The seconds that the leaving rank would have slept; its error file is in tmp_path."""
    slept: list[float] = []

    def end(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return slept


def left(error: BaseException, rank: int, board: Board | None) -> int:
    """The exit code with which a rank leaves."""
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - as the run does
        with pytest.raises(Left) as caught:
            leave(raised, rank, board)
    return int(caught.value.args[0])


def test_the_first_to_fail_goes_at_once_with_its_traceback(
    waits: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = Board(HashStore(), 1, 2)
    error = ValueError("boom")
    board.report("load", error)
    assert left(error, 1, board) == 1
    assert waits == []
    printed = capsys.readouterr().err
    assert printed.startswith("rank 1 failed and ends the run:\nTraceback")
    record = json.loads((tmp_path / "error.json").read_text())["message"]
    assert record["message"] == "ValueError: boom"
    assert "raise error" in record["extraInfo"]["py_callstack"]


def test_who_met_a_peers_failure_waits_and_quotes_it(waits: list[float], tmp_path: Path) -> None:
    store = HashStore()
    Board(store, 1, 2).report("load", ValueError("boom"))
    lost = RuntimeError("Connection closed by peer [127.0.0.1]:1")
    assert left(lost, 0, Board(store, 0, 2)) == 1
    assert waits == [1.5]
    record = json.loads((tmp_path / "error.json").read_text())["message"]
    told = record["extraInfo"]["py_callstack"]
    assert "Rank 1 had failed before, with:" in told
    assert "ValueError: boom" in told


def test_a_lost_peer_that_told_nothing_is_waited_for_too(waits: list[float]) -> None:
    assert left(ChannelTimeout("late", peer=1), 1, Board(HashStore(), 1, 2)) == 1
    assert left(PeerError("x", {0: "boom"}), 1, None) == 1
    assert waits == [1.5, 1.5]


def test_rank_0_stays_a_moment_where_it_holds_the_store(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert left(SystemExit(3), 0, None) == 3
    assert waits == [0.5]


def test_a_rank_leaves_even_if_it_cannot_say_why(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert left(KeyboardInterrupt(), 1, None) == 130


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("x"), 1),
        (KeyboardInterrupt(), 130),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 3),
        (SystemExit("message"), 1),
        (SystemExit(256), 1),  # only the lowest byte reaches the parent
        (SystemExit(-1), 255),
    ],
    ids=repr,
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    ("error", "of_a_peer"),
    [
        (PeerError("x", {1: "boom"}), True),
        (PeerError("x", {0: "boom", 1: "boom"}), False),
        (ChannelTimeout("late", peer=1), True),
        (RuntimeError("[file.cc:1] Connection closed by peer [::1]:3"), True),
        (RuntimeError("shapes differ"), False),
        (DisagreementError("x", {0: "a", 1: "b"}), False),
        (ValueError("connection reset"), False),
    ],
    ids=repr,
)
def test_who_only_met_a_peers_failure(error: BaseException, of_a_peer: bool) -> None:
    assert is_of_a_peer(error, 0) is of_a_peer
