"""Addresses and metadata as strings, and what is listened on."""

from __future__ import annotations

import socket

import pytest

from fttransport.address import (
    address_of,
    advertised,
    interface_address,
    join_metadata,
    listen,
    split_metadata,
)

A, B, C = (f"http://{host}/checkpoint/" for host in ("a:1", "b:2", "[::1]:3"))


def test_metadata_are_joined_and_split() -> None:
    joined = join_metadata([A, f"{B},{C}"])
    assert joined == f"{A} {B},{C}"
    assert split_metadata(joined) == [[A], [B, C]]
    assert join_metadata([joined, A]) == f"{joined} {A}"


@pytest.mark.parametrize("text", ["", " ", "a:1", "ftp://a:1/", "http://a/", f"{A},"])
def test_what_are_no_metadata_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="metadata"):
        split_metadata(text)


def test_an_ipv6_host_stands_in_brackets() -> None:
    assert address_of("::1", 5, tls=False) == "http://[::1]:5/checkpoint/"
    assert address_of("h", 5, tls=True) == "https://h:5/checkpoint/"


def test_loopback_unless_guarded_bound_or_told_an_interface() -> None:
    for options, host in (
        ({"bind": None, "interface": None, "guarded": False}, "127.0.0.1"),
        ({"bind": "127.0.0.1", "interface": None, "guarded": True}, "127.0.0.1"),
        ({"bind": None, "interface": "lo", "guarded": True}, "127.0.0.1"),
    ):
        with listen(port=0, **options) as listener:
            assert listener.getsockname()[0] == host
            assert advertised(listener, None) == [host]
            assert advertised(listener, "other") == ["other"]
    with listen(None, 0, interface=None, guarded=True) as listener:
        assert advertised(listener, None) == [socket.gethostname()]


def test_an_interface_that_does_not_exist() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(OSError, match="device"):
        interface_address("none0")
