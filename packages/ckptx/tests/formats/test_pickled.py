"""pickled: plain data comes out as it went in, calls stay inert, damage is named."""

from __future__ import annotations

import collections
import os
import pickle
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx.errors import FormatError
from ckptx.formats.pickled import Global, Record, parse

LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(PLAIN, st.integers(4, 5))
def test_plain_data_of_every_kind(value: object, protocol: int) -> None:
    assert parse(pickle.dumps(value, protocol), file="x") == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int) -> None:
    value = {"a": [1, -5, 300, 2**40, -(2**70), 2.5], "b": (b"x", "y", {1, 2}, None, True, ())}
    assert parse(pickle.dumps(value, protocol), file="x") == value


def test_what_is_shared_stays_shared() -> None:
    inner = [1]
    found = parse(pickle.dumps([inner, inner]), file="x")
    assert isinstance(found, list)
    assert found[0] is found[1]


def test_names_and_known_calls() -> None:
    value = [torch.float32, torch.Size((2, 3)), collections.OrderedDict(a=1)]
    assert parse(pickle.dumps(value), file="x") == [Global("torch", "float32"), (2, 3), {"a": 1}]


class Evil:
    """Leaves a trace where a pickle of it is executed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_is_called(tmp_path: os.PathLike[str], protocol: int) -> None:
    trace = os.path.join(tmp_path, "trace")
    found = parse(pickle.dumps(["before", Evil(trace)], protocol), file="x")
    assert isinstance(found, list)
    record = found[1]
    assert isinstance(record, Record)
    assert (record.name.split(".")[-1], record.args) == ("mkdir", (trace,))
    assert not os.path.exists(trace)


def test_an_object_is_its_name_and_state() -> None:
    found = parse(pickle.dumps(collections.UserDict(a=1)), file="x")
    assert isinstance(found, Record)
    assert found.name.endswith("UserDict")
    assert found.get("data") == {"a": 1}
    assert found.get("none") is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x02",
        b"\x80\x02K",
        b"\x80\x02h\x05.",
        b"\x80\x02a.",
        b"\x80\x02t.",
        b"\x80\x02\x86.",
        b"\x80\x02K\x01K\x02a.",
        b"\x80\x02](K\x01}s.",
        b"\x80\x02}(](K\x01u.",
        b"\x80\x02X\x02\x00\x00\x00\xff\xff.",
        b"\x80\x02cposix\n",
        b"i.",
    ],
)
def test_damage_is_named_with_its_byte(data: bytes) -> None:
    with pytest.raises(FormatError, match="not a pickle") as caught:
        parse(data, file="some file", offset=100)
    assert caught.value.file == "some file"
    assert caught.value.offset is not None
    assert 100 <= caught.value.offset <= 100 + len(data)


@given(st.binary(max_size=60))
def test_any_bytes_are_data_or_an_error(data: bytes) -> None:
    with suppress(FormatError):
        parse(data, file="x")
