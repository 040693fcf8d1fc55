"""Headers and indexes: right ones as literals and from the safetensors library, wrong ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptx.errors import FormatError, ReadError
from ckptx.files import FileReader
from ckptx.formats.safetensors import DTYPES, files_of_directory, read_header, read_index
from ckptx.stored import Chunk
from distcore.v1 import Region, itemsize

# One F32 (2, 2), one empty BF16 and one 0-d U8: the file as bytes.
HEADER = (
    b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
    b'"b":{"dtype":"BF16","shape":[0,3],"data_offsets":[16,16]},'
    b'"c":{"dtype":"U8","shape":[],"data_offsets":[16,17]}}'
)
GOOD = len(HEADER).to_bytes(8, "little") + HEADER + bytes(range(17))


def file_of(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_file_written_by_hand(tmp_path: Path) -> None:
    file = str(tmp_path / "x.safetensors")
    Path(file).write_bytes(GOOD)
    with FileReader() as reader:
        header = read_header(reader, file)
    begin = 8 + len(HEADER)
    assert header.nbytes == reader.nbytes == begin
    assert list(header.tensors) == ["a", "b", "c"]
    a, b, c = header.tensors.values()
    assert (a.shape, a.dtype, a.nbytes) == ((2, 2), "float32", 16)
    assert a.chunks == (Chunk(Region((0, 0), (2, 2)), file, begin),)
    assert (b.shape, b.dtype, b.nbytes) == ((0, 3), "bfloat16", 0)
    assert (c.shape, c.dtype, c.nbytes) == ((), "uint8", 1)
    assert c.chunks[0].offset == begin + 16


def test_metadata_and_padding_are_taken(tmp_path: Path) -> None:
    raw = b'{"__metadata__":{"format":"pt"},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}   '
    file = tmp_path / "x"
    file.write_bytes(file_of(raw, b"\x07"))
    with FileReader() as reader:
        header = read_header(reader, str(file))
    assert dict(header.metadata) == {"format": "pt"}
    assert list(header.tensors) == ["a"]


def zeros(count: int, name: str) -> torch.Tensor:
    return torch.zeros(count * itemsize(name), dtype=torch.uint8).view(getattr(torch, name))


def test_every_dtype_as_the_library_writes_it(tmp_path: Path) -> None:
    young = {"F8_E4M3FNUZ", "F8_E5M2FNUZ", "C64"}  # not in every release of the library
    names = {word: name for word, name in DTYPES.items() if word not in young}
    file = str(tmp_path / "x.safetensors")
    save_file({word: zeros(3, name) for word, name in names.items()}, file)
    with FileReader() as reader:
        header = read_header(reader, file)
    assert {word: stored.dtype for word, stored in header.tensors.items()} == names


@pytest.mark.parametrize(("word", "name"), DTYPES.items())
def test_every_dtype_has_its_size(tmp_path: Path, word: str, name: str) -> None:
    nbytes = 5 * itemsize(name)
    file = tmp_path / "x"
    file.write_bytes(file_of({"a": entry(word, [5], 0, nbytes)}, bytes(nbytes)))
    with FileReader() as reader:
        stored = read_header(reader, str(file)).tensors["a"]
    assert (stored.dtype, stored.nbytes) == (name, zeros(5, name).nbytes)


F32 = entry("F32", [2], 0, 8)
WRONG: dict[str, tuple[bytes, str, str | None, int | None]] = {
    "empty": (b"", "0 bytes are too few", None, 0),
    "seven bytes": (bytes(7), "7 bytes are too few", None, 0),
    "header longer than the file": (file_of({"a": F32})[:20], "header would have", None, 0),
    "header of an exabyte": (b"\xff" * 8 + b"{}", "header would have", None, 0),
    "no JSON": (file_of(b"{nope"), "not JSON", None, 8),
    "no UTF-8": (file_of(b'{"\xff":1}'), "not JSON", None, 8),
    "NaN": (file_of(b'{"a":NaN}'), "not JSON", None, 8),
    "deep": (file_of(b'{"a":' + b"[" * 100_000), "not JSON", None, 8),
    "a list": (file_of(b"[]"), "not a JSON object", None, 8),
    "space before": (file_of(b" {}"), "not a JSON object", None, 8),
    "a key twice": (
        file_of(b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{}}'),
        "'a' stands in it twice",
        None,
        8,
    ),
    "metadata": (file_of({"__metadata__": {"a": 1}}), "__metadata__", None, 8),
    "entry": (file_of({"a": 3}), "its entry is not", "a", None),
    "extra field": (file_of({"a": {**F32, "x": 1}}, bytes(8)), "its entry is not", "a", None),
    "dtype": (file_of({"a": entry("F31", [2], 0, 8)}, bytes(8)), "unknown dtype 'F31'", "a", None),
    "dtype of a wrong type": (
        file_of({"a": {**F32, "dtype": ["F32"]}}, bytes(8)),
        "unknown dtype ['F32']",
        "a",
        None,
    ),
    "negative size": (file_of({"a": entry("U8", [-1], 0, 0)}), "not a list of sizes", "a", None),
    "true as a size": (
        file_of({"a": {**entry("U8", [1], 0, 1), "shape": [True]}}, b"x"),
        "not a list of sizes",
        "a",
        None,
    ),
    "float size": (
        file_of({"a": {**entry("U8", [1], 0, 1), "shape": [1.0]}}, b"x"),
        "not a list of sizes",
        "a",
        None,
    ),
    "offsets turned round": (
        file_of({"a": entry("F32", [2], 8, 0)}, bytes(8)),
        "not a begin and an end",
        "a",
        None,
    ),
    "three offsets": (
        file_of({"a": {**F32, "data_offsets": [0, 4, 8]}}, bytes(8)),
        "not a begin and an end",
        "a",
        None,
    ),
    "bytes for another shape": (
        file_of({"a": entry("F32", [3], 0, 8)}, bytes(8)),
        "8 bytes for shape [3] of F32, which takes 12",
        "a",
        8 + 61,
    ),
    "a shape that overflows": (
        file_of({"a": entry("F32", [2**62, 2**62], 0, 0)}),
        "0 bytes for shape",
        "a",
        None,
    ),
    "cut off": (
        file_of({"a": F32}, bytes(7)),
        "its bytes end at 77, the file at 76",
        "a",
        8 + 61,
    ),
    "overlap": (
        file_of({"a": F32, "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "overlap",
        "b",
        None,
    ),
    "hole": (
        file_of({"a": F32, "b": entry("F32", [1], 12, 16)}, bytes(16)),
        "4 bytes before it belong to no tensor",
        "b",
        None,
    ),
    "hole at the front": (
        file_of({"a": entry("U8", [1], 1, 2)}, bytes(2)),
        "1 bytes before it",
        "a",
        None,
    ),
    "bytes at the end": (file_of({"a": F32}, bytes(9)), "last 1 bytes belong to no", None, None),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_with_file_key_and_offset(tmp_path: Path, name: str) -> None:
    data, text, key, offset = WRONG[name]
    file = tmp_path / "wrong.safetensors"
    file.write_bytes(data)
    with FileReader() as reader, pytest.raises(FormatError) as caught:
        read_header(reader, str(file))
    assert caught.value.file == str(file)
    assert caught.value.key == key
    if offset is not None:
        assert caught.value.offset == offset
    assert text in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_file_that_is_not_there_is_a_read_error(tmp_path: Path) -> None:
    with FileReader() as reader, pytest.raises(ReadError) as caught:
        read_header(reader, str(tmp_path / "none"))
    assert caught.value.errno == 2
    assert caught.value.filename == str(tmp_path / "none")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["model.safetensors"], (None, "model.safetensors")),
        (
            ["a-1.safetensors", "consolidated.safetensors", "model.safetensors.index.json"],
            ("model.safetensors.index.json", None),
        ),
        (["model.safetensors", "consolidated.safetensors"], (None, "model.safetensors")),
        (["adapter.safetensors", "config.json"], (None, "adapter.safetensors")),
        (
            ["x.safetensors.index.json", "x-1.safetensors", "x-2.safetensors"],
            ("x.safetensors.index.json", None),
        ),
    ],
)
def test_what_counts_in_a_directory(
    tmp_path: Path, names: list[str], found: tuple[str | None, str | None]
) -> None:
    for name in names:
        (tmp_path / name).touch()
    index, single = files_of_directory(str(tmp_path))
    assert index == (found[0] and str(tmp_path / found[0]))
    assert single == (found[1] and str(tmp_path / found[1]))


@pytest.mark.parametrize(
    ("names", "text"),
    [([], "no safetensors file"), (["a.safetensors", "b.safetensors"], "more than one")],
)
def test_a_directory_that_does_not_say_which_is_refused(
    tmp_path: Path, names: list[str], text: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(FormatError, match=text):
        files_of_directory(str(tmp_path))


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "x-1.safetensors"}}))
    with FileReader() as reader:
        assert read_index(reader, str(index)) == {"a": str(tmp_path / "x-1.safetensors")}


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/b", "..", ".", "", "a\x00b", 3, None])
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with FileReader() as reader, pytest.raises(FormatError, match="not the name of a file") as e:
        read_index(reader, str(index))
    assert e.value.key == "a"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"a": 1, "a": 2}'])
def test_a_wrong_index_is_refused(tmp_path: Path, text: str) -> None:
    index = tmp_path / "i.index.json"
    index.write_text(text)
    with FileReader() as reader, pytest.raises(FormatError, match=r"not JSON|no weight_map"):
        read_index(reader, str(index))
