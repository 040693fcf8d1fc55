"""archive: the directory of what torch saves, and archives that torch loads."""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path

import pytest
import torch

from ckptx.errors import FormatError
from ckptx.files import FileReader
from ckptx.formats.archive import Archive, Frame, archive_of
from ckptx.formats.pickling import pickled
from ckptx.formats.structure import tensor_structure


def saved(value: object, path: Path, before: bytes = b"") -> tuple[str, int, int]:
    """The file, the offset and the size of an archive that torch wrote."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    path.write_bytes(before + buffer.getvalue() + b"behind")
    return str(path), len(before), len(buffer.getvalue())


def test_members_of_what_torch_saves_lie_where_they_are_said_to(tmp_path: Path) -> None:
    tensor = torch.arange(100, dtype=torch.int16)
    place = saved(tensor, tmp_path / "x", b"something before")
    with FileReader() as reader:
        archive = Archive.read(reader, *place)
        data = archive.contents(reader, "data/0")
        assert archive.contents(reader, "byteorder") == b"little"
    assert data == bytes(tensor.view(torch.uint8).tolist())
    assert archive.members["data/0"].crc == zlib.crc32(data)
    with FileReader() as reader, pytest.raises(FormatError, match="no data/7"):
        archive.place(reader, "data/7")


def test_a_directory_longer_than_the_tail_that_is_read_first(tmp_path: Path) -> None:
    place = saved([torch.full((3,), i) for i in range(50)], tmp_path / "x", b"z")
    with FileReader() as reader:
        archive = Archive.read(reader, *place)
        found = archive.contents(reader, "data/49")
    assert found == bytes(torch.full((3,), 49).view(torch.uint8).tolist())


@pytest.mark.parametrize("cut", [0, 10, 21, 22, 60, 300])
def test_a_cut_archive_is_refused_with_its_place(tmp_path: Path, cut: int) -> None:
    file, offset, _ = saved(torch.ones(5), tmp_path / "x", b"abc")
    with FileReader() as reader, pytest.raises(FormatError, match="no archive of torch") as caught:
        Archive.read(reader, file, offset, cut)
    assert (caught.value.file, caught.value.offset) == (file, 3)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"a" * 1000)
    size = (tmp_path / "x").stat().st_size
    with FileReader() as reader, pytest.raises(FormatError, match="compressed"):
        Archive.read(reader, str(tmp_path / "x"), 0, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.uint16, torch.bool])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 3), (7,)])
def test_torch_loads_a_frame_around_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = bytes(i % 2 for i in range(torch.Size(shape).numel() * dtype.itemsize))
    frame = Frame(tensor_structure(str(dtype).removeprefix("torch."), shape), len(raw))
    head, tail = frame.around(zlib.crc32(raw))
    data = head + raw + tail
    assert (len(head), len(data)) == (frame.head_nbytes, frame.total_nbytes)
    assert len(head) % 64 == 0
    found = torch.load(io.BytesIO(data), weights_only=True)
    assert (tuple(found.shape), found.dtype) == (shape, dtype)
    assert bytes(found.flatten().view(torch.uint8).tolist()) == raw
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None


def test_torch_loads_an_archive_without_tensors() -> None:
    value = {"lr": 0.1, "betas": (0.9, 0.99)}
    assert torch.load(io.BytesIO(archive_of(pickled(value))), weights_only=True) == value
