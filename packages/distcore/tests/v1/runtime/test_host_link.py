"""HostLink: frames over a socket pair, and what an end learns of the other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from distcore.v1.runtime.host_link import FILLED, OFFERED, ROW, Frame, HostLink

Ends = tuple[HostLink, HostLink]


@pytest.fixture
def ends() -> Iterator[Ends]:
    mine, theirs = socket.socketpair()
    links = HostLink(1, mine), HostLink(0, theirs)
    yield links
    for link in links:
        link.close()


def test_frames_arrive_whole_and_in_order(ends: Ends) -> None:
    ends[0].send(ROW, payload=b"row")
    ends[0].send(FILLED, nbytes=1 << 40)
    assert ends[1].receive() == [Frame(ROW, 0, 0, b"row"), Frame(FILLED, 0, 1 << 40, b"")]
    assert ends[1].receive() == []


def test_what_the_socket_does_not_take_waits(ends: Ends) -> None:
    payload = bytes(3_000_000)
    ends[0].send(OFFERED, number=7, payload=payload)
    assert ends[0].has_output
    found: list[Frame] = []
    while not found:
        found = ends[1].receive()
        ends[0].flush()
    assert found == [Frame(OFFERED, 7, 0, payload)]
    assert not ends[0].has_output


def test_frames_sent_before_the_end_still_arrive(ends: Ends) -> None:
    ends[0].send(ROW, payload=b"last")
    ends[0].close()
    assert ends[1].receive() == [Frame(ROW, 0, 0, b"last")]
    assert ends[1].receive() == []
    assert ends[1].lost


def test_an_end_sees_that_the_other_has_shut_even_with_frames_unread(ends: Ends) -> None:
    ends[0].send(ROW, payload=b"unread")
    assert ends[1].is_open()
    ends[0].shut()
    assert not ends[1].is_open()
    assert not ends[0].is_open()


def test_what_an_end_that_is_gone_had_said_is_still_heard(ends: Ends) -> None:
    ends[1].send(ROW, payload=b"last")
    ends[1].close()
    ends[0].send(FILLED, nbytes=1)
    assert not ends[0].has_output
    assert not ends[0].lost
    assert ends[0].receive() == [Frame(ROW, 0, 0, b"last")]
    assert ends[0].receive() == []
    assert ends[0].lost


def test_a_forked_child_cannot_end_the_link(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    ends[0].shut()
    assert ends[1].is_open()
