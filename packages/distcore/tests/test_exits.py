"""Exit codes, and who only met a peer's failure."""

from __future__ import annotations

import pytest

from distcore.exits import exit_code, is_of_a_peer
from distcore.v1.errors import ChannelTimeout, DisagreementError, PeerError


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
