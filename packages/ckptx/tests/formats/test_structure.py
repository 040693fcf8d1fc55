"""structure: strides become an order of dims, and what is not known is refused."""

from __future__ import annotations

import pytest

from ckptx.formats.pickled import Record, parse
from ckptx.formats.structure import TensorRecord, tensor_record, tensor_structure


def record(shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorRecord:
    return TensorRecord("0", "float32", 0, shape, strides)


@pytest.mark.parametrize(
    ("shape", "strides", "order"),
    [
        ((3, 4), (4, 1), (0, 1)),
        ((4, 3), (1, 4), (1, 0)),
        ((), (), ()),
        ((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3, 1)),
        ((1, 4), (1, 1), (0, 1)),
        ((4, 1), (1, 4), (0, 1)),
        ((0, 3), (3, 1), (0, 1)),
        ((5, 1, 2), (2, 9, 1), (0, 1, 2)),
    ],
)
def test_the_order_of_dims(
    shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...]
) -> None:
    assert record(shape, strides).order() == order


@pytest.mark.parametrize(("shape", "strides"), [((3, 4), (8, 1)), ((3, 4), (0, 1)), ((2,), (2,))])
def test_gaps_and_overlaps_are_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="gaps or overlap"):
        record(shape, strides).order()


@pytest.mark.parametrize("dtype", ["float32", "bool", "float8_e5m2", "uint64", "complex32"])
def test_what_is_written_is_read(dtype: str) -> None:
    found = tensor_record(parse(tensor_structure(dtype, (2, 3)), file="x"))
    assert found == TensorRecord("0", dtype, 0, (2, 3), (3, 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Record("torch._utils._rebuild_tensor_v2", (1, 2)), "unknown way"),
        (Record("torch._utils._rebuild_tensor_v2", None), "unknown way"),
    ],
)
def test_unknown_tensors(value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        tensor_record(value)


def test_what_is_no_tensor() -> None:
    assert tensor_record(5) is None
    assert tensor_record(Record("some.thing", ())) is None
