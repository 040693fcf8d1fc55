"""The choice of a codec, and that pickles are opened by who chose it alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from fttransport import Codec, CodecRefused, HTTPTransport, IntegrityError
from fttransport.codecs import PickleCodec, codec_of

Make = Callable[..., HTTPTransport[Any]]

S = timedelta(seconds=10)


def test_choices() -> None:
    mine = Codec()
    assert codec_of(mine) is mine
    assert type(codec_of("safe")) is Codec
    assert type(codec_of("pickle")) is PickleCodec
    with pytest.raises(ValueError, match="expected 'safe'"):
        codec_of("json")


def test_with_pickle_on_both_sides_any_value_arrives(http: Make) -> None:
    source, receiver = http(codec="pickle"), http(codec="pickle")
    state: dict[str, Any] = {"set": {1, 2}, "slice": slice(1, 2), "w": torch.ones(2)}
    source.send_checkpoint([], 1, state, S)
    found = receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert found["set"] == {1, 2}
    assert found["slice"] == slice(1, 2)
    assert torch.equal(found["w"], state["w"])


def test_a_receiver_that_did_not_choose_it_opens_nothing(http: Make) -> None:
    source = http(codec="pickle")
    source.send_checkpoint([], 1, {"set": {1}}, S)
    with pytest.raises(CodecRefused, match=r"state\['set'\].*pickle"):
        http().recv_checkpoint(0, source.metadata(), 1, S)


def test_what_even_pickle_does_not_take_is_named() -> None:
    with pytest.raises(CodecRefused, match=r"state\['f'\]"):
        PickleCodec().encode({"f": lambda: 0}, lambda tensors: [])


def test_a_spoiled_pickle_is_an_integrity_error() -> None:
    with pytest.raises(IntegrityError, match="pickle"):
        PickleCodec().decode({"p": "AAAA"}, lambda numbers, paths: [])
