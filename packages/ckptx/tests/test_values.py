"""values: plain data as text, there and back."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptx import FormatError
from ckptx.files import FileReader
from ckptx.stored import StoredValue
from ckptx.values import foreign_names, from_json, read_value, to_json

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.float8_e5m2]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.just("__ckptx__"), inner)
        | st.sets(st.integers())
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(PLAIN)
def test_there_and_back(value: object) -> None:
    found = from_json(to_json(value), "x")
    assert found == value
    assert type(found) is type(value)


def test_what_cannot_be_written() -> None:
    with pytest.raises(TypeError, match="a Tensor is no plain data"):
        to_json({"a": [torch.ones(1)]})


@pytest.mark.parametrize("text", ["{", '{"__ckptx__": "code", "of": 1}', '{"__ckptx__": "bytes"}'])
def test_damaged_text(text: str) -> None:
    with pytest.raises(FormatError, match="a value is damaged"):
        from_json(text, "x")


def of(value: object, path: Path, **options: bool) -> object:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    path.write_bytes(b"before" + buffer.getvalue())
    with FileReader() as reader:
        return read_value(StoredValue(str(path), 6, len(buffer.getvalue()), "torch"), reader)


def test_tensors_inside_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    value = {"a": [base.t(), base[1]], 5: (torch.tensor(2), torch.zeros(0, 2)), "d": torch.half}
    found = of(value, tmp_path / "x")
    assert isinstance(found, dict)
    assert torch.equal(found["a"][0], base.t())
    assert torch.equal(found["a"][1], base[1])
    assert (found[5][0].item(), found[5][1].shape, found["d"]) == (2, (0, 2), torch.float16)
    assert foreign_names(found) == []


def test_other_objects_are_records(tmp_path: Path) -> None:
    found = of({"a": [argparse.Namespace(lr=0.5)]}, tmp_path / "x")
    assert foreign_names(found) == ["argparse.Namespace"]
    assert isinstance(found, dict)
    assert found["a"][0].get("lr") == 0.5


def test_objects_inside_buffers(tmp_path: Path) -> None:
    inner = io.BytesIO()
    torch.save({"rng": torch.arange(3), "step": 7}, inner)
    found = of({"object": inner, "raw": io.BytesIO(b"abc")}, tmp_path / "x")
    assert isinstance(found, dict)
    assert (found["object"]["step"], found["raw"]) == (7, b"abc")
    assert torch.equal(found["object"]["rng"], torch.arange(3))


def test_a_value_that_its_file_does_not_hold(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    with FileReader() as reader, pytest.raises(FormatError, match="its item ends at byte 9"):
        read_value(StoredValue(str(tmp_path / "x"), 1, 8, "torch"), reader)
