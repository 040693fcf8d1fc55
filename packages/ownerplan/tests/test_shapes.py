"""Shapes from files, without the data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ownerplan.shapes import group_by_layer, read_shapes


def test_json_names_them(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text('{"b": [2, 3], "a": [], "c": [0]}')
    shapes = read_shapes(path)
    assert shapes == {"b": (2, 3), "a": (), "c": (0,)}
    assert list(shapes) == ["b", "a", "c"]


def test_a_safetensors_file_has_them_in_its_header(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(())}, path)
    assert read_shapes(path) == {"a": (2, 3), "b": ()}


def test_a_directory_and_an_index_name_several_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}, "metadata": {}})
    )
    assert read_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}
    assert read_shapes(index) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be one object"),
        ('{"a": [1, "2"]}', r"a: \[1, '2'\] is not a list of dims"),
        ('{"a": [-1]}', "not a list of dims"),
        ('{"a": [true]}', "not a list of dims"),
        ('{"a": 3}', "not a list of dims"),
    ],
)
def test_other_json_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "model.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_shapes(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"none")
    with pytest.raises(ValueError, match="is no safetensors file"):
        read_shapes(path)
    with pytest.raises(ValueError, match="has no safetensors files"):
        read_shapes(tmp_path.parent)


def test_a_layer_is_what_is_named_alike_up_to_a_number() -> None:
    shapes = {
        "tok.weight": (9, 2),
        "model.layers.0.q": (2, 2),
        "model.layers.10.q": (2, 2),
        "model.layers.1.q": (2, 2),
        "model.layers.0.experts.3.up": (2, 4),
        "head1.weight": (2, 9),
    }
    assert [list(group) for group in group_by_layer(shapes)] == [
        ["tok.weight", "head1.weight"],
        ["model.layers.0.q", "model.layers.0.experts.3.up"],
        ["model.layers.10.q"],
        ["model.layers.1.q"],
    ]


def test_without_the_library_the_reader_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'ownerplan\[cli\]'"):
        read_shapes(tmp_path / "model.safetensors")
