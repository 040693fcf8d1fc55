"""The safe codec: equal values come out, nothing runs, and what it refuses is named."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distcore.codec import codec_named, decode, digest, encode, is_plain
from distcore.v1.errors import PlanError


def returned(value: object) -> Any:
    return decode(memoryview(encode(value)))


PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
HASHABLE = st.recursive(
    PLAIN | st.binary() | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
VALUES = st.recursive(
    HASHABLE | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
        | st.sets(HASHABLE, max_size=4)
    ),
    max_leaves=20,
)


def typed(value: object) -> object:
    """A value with the types of all parts, which `==` alone does not compare."""
    if isinstance(value, dict):
        return type(value), [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(typed(item)) for item in value)
    return type(value), value


@given(VALUES)
def test_a_value_comes_back_with_its_types(value: object) -> None:
    assert typed(returned(value)) == typed(value)
    assert digest(returned(value)) == digest(value) != bytes(16)


@given(st.lists(st.integers(-(2**70), 2**70) | st.integers(-5, 5), min_size=60, max_size=70))
def test_many_ints_come_back_whatever_their_size(values: list[int]) -> None:
    assert returned(values) == values


def test_many_floats_come_back_to_the_bit() -> None:
    values = [math.inf, -0.0, 0.1, 5e-324] * 20
    assert list(map(str, returned(values))) == list(map(str, values))
    assert math.isnan(returned([math.nan] * 100)[7])


@pytest.mark.parametrize(
    "name",
    [
        "bool", "int8", "uint16", "uint64", "float16", "bfloat16", "float32", "complex64",
        "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_a_tensor_of_every_dtype_comes_back(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.arange(nbytes, dtype=torch.uint8) % 2
    tensor = raw.view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
    got = returned({"w": [tensor]})["w"][0]
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert got.reshape(-1).view(torch.uint8).tolist() == raw.tolist()


def test_a_view_is_sent_without_the_rest_of_its_storage() -> None:
    big = torch.arange(1 << 20)
    data = encode(big[5:6])
    assert len(data) < 200
    assert decode(memoryview(data)).tolist() == [5]
    assert returned(torch.arange(6).reshape(2, 3).T).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_copy_owns_its_memory() -> None:
    data = encode(torch.zeros(4))
    tensor = decode(memoryview(data))
    data[:] = bytes(len(data))
    tensor += 1
    assert tensor.tolist() == [1, 1, 1, 1]


def test_what_belongs_to_torch_and_numpy_comes_back() -> None:
    parameter = returned(torch.nn.Parameter(torch.ones(2), requires_grad=False))
    assert type(parameter) is torch.nn.Parameter
    assert not parameter.requires_grad
    assert returned([torch.bfloat16, torch.device("cuda:1")]) == [
        torch.bfloat16,
        torch.device("cuda:1"),
    ]
    assert type(returned(torch.Size([2, 3]))) is torch.Size
    number = returned(np.float32(2.5))
    assert (type(number), number) == (np.float32, 2.5)
    array = returned(np.arange(6, dtype=">i2").reshape(2, 3)[:, ::2])
    assert (array.dtype.str, array.tolist()) == (">i2", [[0, 2], [3, 5]])


class Loose:
    """No codec knows it but pickle."""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: 0, "value: a builtins.function cannot be sent safely"),
        ({"m": [1, {"k": Path("x")}]}, r"value\['m'\]\[1\]\['k'\]: a pathlib\.\w*Path cannot"),
        ([1, (Loose(),)], r"value\[1\]\[0\]: a .*Loose cannot"),
        ({Loose: 1}, "a key of value: a builtins.type cannot"),
        ({frozenset([Path("a")])}, "an item of an item of value: a pathlib"),
        (10**5000, "value: cannot be written: Exceeds the limit"),
        (torch.empty(2, device="meta"), "a tensor that is not dense .*device meta"),
        (torch.eye(2).to_sparse(), "a tensor that is not dense .*sparse_coo"),
        (np.array(["a"]), "a numpy.ndarray cannot"),
    ],
    ids=["function", "path", "object", "key", "item", "int", "meta", "sparse", "strings"],
)
def test_what_is_refused_is_named_with_its_place(value: object, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        encode(value)
    assert digest(value) == bytes(16)


def test_a_value_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(PlanError, match="nested too deeply, or holds itself"):
        encode(value)


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="no value"):
        decode(memoryview(b"\x80\x04K\x01."))


def test_the_digest_is_that_of_equal_values() -> None:
    assert digest({"a": b"1", "b": b"2"}) == digest({"b": b"2", "a": b"1"})
    assert digest({"a": b"1", "b": b"2"}) != digest({"a": b"2", "b": b"1"})
    assert digest({b"1", b"22"}) == digest({b"22", b"1"})
    assert digest([1]) != digest((1,))
    assert digest(1) != digest(1.0)


def test_the_digest_of_a_set_does_not_depend_on_the_process() -> None:
    code = "from distcore.codec import digest; print(digest({'a', 'b', 'c', 'd'}).hex())"
    done = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert done[0] == done[1] == digest({"a", "b", "c", "d"}).hex().encode() + b"\n"


def test_pickle_is_there_by_name_only() -> None:
    way = codec_named("pickle")
    assert way.decode(memoryview(way.encode(Path("a")))) == Path("a")
    with pytest.raises(PlanError, match="cannot be pickled"):
        way.encode(lambda: 0)
    with pytest.raises(PlanError, match=r"expected one of .*, got 'dill'"):
        codec_named("dill")


def test_plain_values() -> None:
    assert is_plain(1)
    assert is_plain([None, "a", 2.5, True])
    assert not is_plain([[1]])
    assert not is_plain((1,))
    assert not is_plain(torch.ones(1))
