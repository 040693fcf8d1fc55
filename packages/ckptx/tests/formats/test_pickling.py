"""pickling: what is written is what torch's and Python's unpicklers read."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx.formats.pickled import Global, Record, parse
from ckptx.formats.pickling import Call, New, pickled

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_data_is_read_back_by_both(value: object) -> None:
    data = pickled(value)
    assert pickle.loads(data) == value
    assert parse(data, file="x") == value


def test_sets_bytes_names_and_calls() -> None:
    size = Call(Global("torch", "Size"), ((2, 3),))
    value = [{1, 2}, frozenset({"a"}), b"xyz", Global("torch", "bfloat16"), size, size]
    expected = [{1, 2}, frozenset({"a"}), b"xyz", torch.bfloat16, torch.Size((2, 3))]
    assert pickle.loads(pickled(value)) == [*expected, torch.Size((2, 3))]


def test_an_object_gets_its_state() -> None:
    found = parse(pickled(New(Global("some", "Thing"), {"a": 1})), file="x")
    assert isinstance(found, Record)
    assert (found.name, found.args, found.get("a")) == ("some.Thing", (), 1)


def test_other_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="a Parameter is no plain data"):
        pickled({"a": torch.nn.Parameter(torch.ones(1))})
    with pytest.raises(TypeError, match="a object is no plain data"):
        pickled(object())
