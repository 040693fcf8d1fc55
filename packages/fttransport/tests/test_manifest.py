"""What a description from outside must be before anything is made of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from fttransport.codec import Codec
from fttransport.destination import Destination
from fttransport.digests import Digester
from fttransport.errors import AuthError, IntegrityError
from fttransport.manifest import content_id, read_manifest
from fttransport.snapshot import take_snapshot

XXH3 = Digester("xxh3")


def table_of() -> dict[str, Any]:
    state = {"w": torch.arange(4.0), "n": 1}
    found = take_snapshot(state, 5, codec=Codec(), digester=XXH3)
    table: dict[str, Any] = json.loads(found.text)
    return table


def read(table: object) -> None:
    text = json.dumps(table).encode()
    Destination(read_manifest(text, content_id(text, XXH3), b""), Codec())


def test_the_table_as_it_is_can_be_read() -> None:
    read(table_of())
    assert table_of()["tensors"] == {
        "forms": [["float32", [4], None, 0, None]],
        "form": [0],
        "block": [0],
        "offset": [0],
    }
    assert table_of()["blocks"] == [16]


@pytest.mark.parametrize(
    "change",
    [
        {"format": 2},
        {"step": "5"},
        {"blocks": [8]},
        {"blocks": [-16]},
        {"blocks": [1 << 63]},
        {"blocks": 16},
        {"digests": []},
        {"digests": ["00"]},
        {"digests": [5]},
        {"chunk_nbytes": 0},
        {"algorithm": "md5"},
        {"tensors": []},
        {"tensors": {}},
        {"tree": {"x": 7}},
        {"tree": {"x": -1}},
        {"tree": {"x": True}},
        {"tree": {"d": [["../../etc", {"x": "0"}]]}},
    ],
)
def test_a_description_of_no_possible_state_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        read(table_of() | change)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_table_is_refused(text: bytes) -> None:
    with pytest.raises(IntegrityError):
        read_manifest(text, content_id(text, XXH3), b"")


def test_a_changed_description_has_another_id() -> None:
    text = json.dumps(table_of()).encode()
    with pytest.raises(IntegrityError, match="has id"):
        read_manifest(text.replace(b'"step": 5', b'"step": 6'), content_id(text, XXH3), b"")


def test_with_a_key_only_who_has_it_can_describe() -> None:
    keyed = Digester("blake2b-keyed", b"secret")
    found = take_snapshot({"w": torch.ones(3)}, 5, codec=Codec(), digester=keyed)
    assert read_manifest(found.text, found.content_id, b"secret").step == 5
    for key in (b"", b"other"):
        with pytest.raises(AuthError):
            read_manifest(found.text, found.content_id, key)
    plain = take_snapshot({"w": torch.ones(3)}, 5, codec=Codec(), digester=XXH3)
    with pytest.raises(AuthError, match="is not authenticated"):
        read_manifest(plain.text, plain.content_id, b"secret")
