"""dtypes: sizes by name (test_layout_torch.py compares all of them with torch)."""

from __future__ import annotations

from math import prod

import pytest

from distcore.v1 import ITEMSIZES, PlanError, itemsize


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (3, 4), 48),
        ("float32", (), 4),
        ("float32", (0, 3), 0),
        ("bool", (5,), 5),
        ("float8_e4m3fn", (5,), 5),
        ("bfloat16", (5,), 10),
        ("complex128", (2,), 32),
    ],
)
def test_bytes_of_a_tensor(dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
    assert prod(shape) * itemsize(dtype) == nbytes


@pytest.mark.parametrize("dtype", ["torch.float32", "float", "", None, 4, ["int8"]])
def test_an_unknown_dtype_is_refused_with_the_known_ones(dtype: str) -> None:
    with pytest.raises(PlanError, match=r"known are bfloat16, .*, uint8") as caught:
        itemsize(dtype)
    assert repr(dtype) in str(caught.value)
    assert [(p.where, p.kind) for p in caught.value.problems] == [("dtype", "dtype")]


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        ITEMSIZES["int8"] = 2  # type: ignore[index]
