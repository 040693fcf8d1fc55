"""Objects as data: what travels comes back equal, and what does not is refused by name."""

from __future__ import annotations

import argparse
import io
import random
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx import CheckpointingException
from ckptx.objects import decode, encode

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_data_comes_back(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal, and yet not the same


@pytest.mark.parametrize(
    "value",
    [
        {1, 2},
        frozenset({"a"}),
        OrderedDict([("b", 1), ("a", 2)]),
        bytearray(b"xy"),
        complex(1, -2),
        slice(1, None, 2),
        range(3, 9, 2),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cuda:1"),
        argparse.Namespace(lr=0.1, betas=(0.9, 0.99)),
        PurePosixPath("a/b"),
        np.float32(1.5),
        random.Random(3).getstate(),
        float("inf"),
        1 << 200,
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_types_come_back(value: Any) -> None:
    found = decode(encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Torch itself cannot unpickle float8 and uint16 with `weights_only`."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.arange(count, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    value = raw.view(dtype).view(shape)
    found = decode(encode({"t": value}))["t"]
    assert (found.dtype, found.shape) == (dtype, value.shape)
    assert found.reshape(-1).view(torch.uint8).tolist() == raw.tolist()


def test_a_strided_tensor_comes_back_in_logical_order() -> None:
    assert decode(encode(torch.arange(6).view(2, 3).t())).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_arrays_and_streams_come_back_and_can_be_written() -> None:
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    found = decode(encode([array, io.BytesIO(b"state")]))
    assert found[0].tolist() == array.tolist()
    assert found[0].dtype == array.dtype
    found[0][0, 0] = 9
    assert found[1].read() == b"state"


class Custom:
    """Nothing that travels."""


@pytest.mark.parametrize(
    "value",
    [Custom(), Custom, print, np.array([Custom()]), torch.zeros(3).to_sparse()],
    ids=["object", "class", "function", "array", "sparse"],
)
def test_what_could_run_code_is_refused_with_its_place(value: object) -> None:
    with pytest.raises(CheckpointingException, match="does not travel"):
        encode({"a": [1, value]})


def test_the_place_of_what_is_refused_is_named() -> None:
    with pytest.raises(CheckpointingException, match=r"\['a'\]\[1\]: a .*Custom"):
        encode({"a": [1, Custom()]})
