"""Digests against known values."""

from __future__ import annotations

import hashlib

import pytest

from fttransport.digests import Digester, digester_for


def test_known_values() -> None:
    assert Digester("xxh3").digest([]) == "99aa06d3014798d86001c324468d497f"
    expected = hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    assert Digester("blake2b").digest([b"a", memoryview(b"bc")]) == expected


def test_buffers_count_as_one() -> None:
    digester = Digester("xxh3")
    assert digester.digest([b"ab", b"c"]) == digester.digest([b"abc"])


def test_a_key_makes_it_keyed_and_none_verifies_nothing() -> None:
    keyed = digester_for("xxh3", b"k")
    assert keyed is not None
    assert keyed.digest([b"a"]) != Digester("blake2b").digest([b"a"])
    assert digester_for(None, b"") is None
    with pytest.raises(ValueError, match="md5"):
        digester_for("md5", b"")
    with pytest.raises(ValueError, match="key"):
        Digester("blake2b-keyed")
