"""Tables of tensors: as data and back, and what from outside is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fttransport.table import MAX_NBYTES, Entry, Form, TensorTable

MATRIX = Form("float32", (2, 3), (3, 1), 0, None)
COLUMN = Form("int16", (4,), (5,), 3, {"rank": 1})
EMPTY = Form("bool", (0, 2), (2, 1), 0, None)


def table_of(forms: list[Form], *rows: tuple[int, int, int]) -> TensorTable:
    columns = np.array(rows, dtype=np.int64).reshape(len(rows), 3).T
    return TensorTable(forms, *columns)


def data(**changes: Any) -> dict[str, Any]:
    """A matrix at byte 4 of block 1, with some of its data changed."""
    form = changes.pop("row", ["float32", [2, 3], None, 0, None])
    return {"forms": [form], "form": [0], "block": [1], "offset": [4]} | changes


def test_entries_are_those_that_were_given() -> None:
    table = table_of([MATRIX, COLUMN, EMPTY], (0, 1, 8), (2, -1, 0), (1, 0, 2))
    assert len(table) == 3
    assert table[0] == Entry(1, 8, (2, 3), (3, 1), "float32", 0, None)
    assert table[1:] == [
        Entry(-1, 0, (0, 2), (2, 1), "bool", 0, None),
        Entry(0, 2, (4,), (5,), "int16", 3, {"rank": 1}),
    ]
    assert table.spans.tolist() == [24, 32, 0]


def test_a_table_comes_back_from_its_data() -> None:
    table = table_of([MATRIX, COLUMN, EMPTY], (0, 1, 8), (2, -1, 0), (1, 0, 2), (0, 0, 40))
    text = json.dumps(table.to_json())
    found = TensorTable.from_json(json.loads(text), (64, 32))
    assert found == table
    assert found != table_of([MATRIX], (0, 0, 0))
    assert TensorTable.from_json(table_of([]).to_json(), ()) == table_of([])


def test_what_fits_just_is_taken() -> None:
    assert TensorTable.from_json(data(), (0, 28))[0].offset == 4
    huge = data(row=["uint8", [MAX_NBYTES], None, 0, None], offset=[0])
    assert TensorTable.from_json(huge, (0, MAX_NBYTES))[0].shape == (MAX_NBYTES,)


@pytest.mark.parametrize(
    "changes",
    [
        {"offset": [8]},
        {"offset": [2]},
        {"offset": [-4]},
        {"offset": [1 << 63]},
        {"offset": [MAX_NBYTES]},
        {"offset": [4, 4]},
        {"offset": [4.0]},
        {"offset": [True]},
        {"offset": ["4"]},
        {"offset": 4},
        {"block": [2]},
        {"block": [-1]},
        {"block": []},
        {"form": [1]},
        {"form": [-1]},
        {"form": None},
        {"forms": {}},
        {"forms": []},
        {"forms": [3]},
        {"row": ["float32", [2, 3], [-3, 1], 0, None]},
        {"row": ["float32", [2, 3], [4, 1], 0, None]},
        {"row": ["float32", [2, 3], [1], 0, None]},
        {"row": ["float32", [2, -3], None, 0, None]},
        {"row": ["float32", [1] * 65, None, 0, None]},
        {"row": ["float32", [1 << 40, 1 << 40], None, 0, None]},
        {"row": ["float32", [1 << 40, 1 << 40], [0, 0], 0, None]},
        {"row": ["float32", [1 << 31, 2], [1 << 31, 1], 0, None]},
        {"row": ["float33", [2, 3], None, 0, None]},
        {"row": [["float32"], [2, 3], None, 0, None]},
        {"row": ["float32", [0, 3], None, 0, None]},
        {"row": ["float32", [2, 3], None, -1, None]},
        {"row": ["float32", [2, 3], None, True, None]},
        {"row": ["float32", [2, 3], None, 0, "S(0)"]},
    ],
)
def test_data_of_no_possible_tensors_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        TensorTable.from_json(data(**changes), (0, 28))


@pytest.mark.parametrize("wanted", [[-1], [2], [1 << 70], ["0"], [True], [0.0], 0, None])
def test_numbers_that_no_tensor_has_are_refused(wanted: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        table_of([MATRIX], (0, 0, 0), (0, 0, 24)).numbers(wanted)


def test_numbers_of_tensors_are_taken() -> None:
    assert table_of([MATRIX], (0, 0, 0), (0, 0, 24)).numbers([1, 0, 1]) == [1, 0, 1]
