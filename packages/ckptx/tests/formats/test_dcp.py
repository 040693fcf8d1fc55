"""dcp: directories that torch itself wrote, read without executing anything; and damaged ones."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import ckptx
from ckptx import CheckpointPlanError, FormatError, open_checkpoint
from ckptx.stored import StoredTensor
from distcore.v1 import Region

pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


def numbered(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    raw = (torch.arange(torch.Size(shape).numel() * dtype.itemsize) * 37 % 251).to(torch.uint8)
    return (raw % 2 if dtype == torch.bool else raw).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).tolist())


STATE: dict[str, Any] = {
    "w": numbered((30, 40)),
    "transposed": numbered((5, 6)).t(),
    "channels_last": numbered((2, 3, 4, 5)).to(memory_format=torch.channels_last),
    "view": numbered((10, 8))[2:7, ::2],
    "parameter": torch.nn.Parameter(numbered((3,))),
    "scalar": torch.tensor(3),
    "empty": torch.zeros(0, 3),
    "none": None,
    "epoch": 5,
    "name": "x",
    "opt": {
        "state": {0: {"step": torch.tensor(1.0)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}],
    },
    "ordered": collections.OrderedDict(a=1),
    "list": [1, 2],
} | {str(dtype): numbered((4, 3), dtype) for dtype in DTYPES}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dcp")
    dcp.state_dict_saver.save(STATE, checkpoint_id=path, no_dist=True)
    return path


def test_every_tensor_and_value_is_found(directory: Path) -> None:
    found = open_checkpoint(directory)
    assert found.format == "dcp"
    for key, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert (found.meta(key).shape, str(value.dtype)) == (
                tuple(value.shape),
                f"torch.{found.meta(key).dtype}",
            )
            assert bits(found.read(key)) == bits(value), key
    assert bits(found.read("opt.state.0.step")) == bits(torch.tensor(1.0))
    values = {key: found.value(key) for key in found.objects}
    assert values == {
        "none": None,
        "epoch": 5,
        "name": "x",
        "opt.param_groups.0.lr": 0.1,
        "opt.param_groups.0.betas": (0.9, 0.99),
        "opt.param_groups.0.params": [0],
        "ordered.a": 1,
        "list": [1, 2],
    }
    assert found.paths["opt.param_groups.0.lr"] == ("opt", "param_groups", 0, "lr")


def test_boxes_are_read_where_they_lie(directory: Path) -> None:
    found = open_checkpoint(directory)
    box = Region((3, 5), (20, 33))
    assert bits(found.read("w", box)) == bits(STATE["w"][box.slices()])
    box = Region((1, 2), (5, 4))
    assert bits(found.read("transposed", box)) == bits(STATE["transposed"][box.slices()])
    box = Region((0, 1, 1, 2), (2, 3, 3, 5))
    assert bits(found.read("channels_last", box)) == bits(STATE["channels_last"][box.slices()])


def test_tensors_are_stored_as_they_lay_in_memory(directory: Path) -> None:
    found = open_checkpoint(directory)
    orders = {key: found.meta(key).chunks[0].order for key in ("w", "transposed", "channels_last")}
    assert orders == {"w": (), "transposed": (1, 0), "channels_last": (0, 2, 3, 1)}


def test_load_fills_a_state_dict(directory: Path) -> None:
    tensors = {key: value for key, value in STATE.items() if isinstance(value, torch.Tensor)}
    state = {key: torch.zeros_like(value) for key, value in tensors.items()}
    ckptx.load(state, directory, strict=False)
    assert all(bits(state[key]) == bits(value) for key, value in tensors.items())


class Evil:
    """Leaves a trace where a pickle of it is executed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def edited(directory: Path, path: Path) -> tuple[Path, Any]:
    """A copy of a directory, and its metadata to be changed."""
    copy = path / "copy"
    copy.mkdir()
    for file in directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy, pickle.loads((copy / ".metadata").read_bytes())


def put(directory: Path, metadata: object) -> None:
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def test_pytorch_189308_code_in_the_metadata_is_not_run(directory: Path, tmp_path: Path) -> None:
    copy, metadata = edited(directory, tmp_path)
    metadata.planner_data = Evil(str(tmp_path / "trace"))
    put(copy, metadata)
    assert bits(open_checkpoint(copy).read("w")) == bits(STATE["w"])
    put(copy, Evil(str(tmp_path / "trace")))
    with pytest.raises(FormatError, match="does not hold the metadata"):
        open_checkpoint(copy)
    assert not (tmp_path / "trace").exists()
    # The same file runs code in a reader that unpickles it.
    pickle.loads((copy / ".metadata").read_bytes())
    assert (tmp_path / "trace").exists()


def test_automodel_3240_code_in_a_value_is_not_run(tmp_path: Path) -> None:
    dcp.state_dict_saver.save(
        {"v": Evil(str(tmp_path / "trace"))}, checkpoint_id=tmp_path / "x", no_dist=True
    )
    assert "mkdir" in str(open_checkpoint(tmp_path / "x").value("v"))
    assert not (tmp_path / "trace").exists()


def test_a_hole_in_the_chunks_is_refused(directory: Path, tmp_path: Path) -> None:
    copy, metadata = edited(directory, tmp_path)
    entry = metadata.state_dict_metadata["w"]
    entry.size = torch.Size((60, 40))
    put(copy, metadata)
    state = {"w": torch.full((60, 40), 7.0)}
    with pytest.raises(CheckpointPlanError, match="not stored once"):
        ckptx.load(state, copy, strict=False)
    assert bool((state["w"] == 7).all())


@pytest.mark.parametrize("name", ["../x", "/etc/x", "", "..", "a/b"])
def test_a_name_that_leads_elsewhere_is_refused(directory: Path, tmp_path: Path, name: str) -> None:
    copy, metadata = edited(directory, tmp_path)
    next(iter(metadata.storage_data.values())).relative_path = name
    put(copy, metadata)
    with pytest.raises(FormatError, match="not the name of a file beside it"):
        open_checkpoint(copy)


def test_damaged_places_are_named(directory: Path, tmp_path: Path) -> None:
    copy, metadata = edited(directory, tmp_path)
    (place,) = (p for index, p in metadata.storage_data.items() if index.fqn == "w")
    place.offset += 8
    put(copy, metadata)
    with pytest.raises(FormatError, match="no archive of torch") as caught:
        open_checkpoint(copy)
    assert caught.value.offset == place.offset
    place.offset = 1 << 40
    put(copy, metadata)
    with pytest.raises(FormatError, match="its item ends at byte") as caught:
        open_checkpoint(copy)
    assert caught.value.key == "w"
    place.transform_descriptors = ["zstd"]
    put(copy, metadata)
    with pytest.raises(FormatError, match="stored transformed"):
        open_checkpoint(copy)


def test_an_item_of_another_shape_is_refused(directory: Path, tmp_path: Path) -> None:
    copy, metadata = edited(directory, tmp_path)
    entry = metadata.state_dict_metadata["w"]
    entry.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((30, 39)))
    put(copy, metadata)
    with pytest.raises(FormatError, match=r"expected float32 \(30, 39\), the item holds"):
        open_checkpoint(copy)
    entry.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((30, 41)))
    put(copy, metadata)
    with pytest.raises(FormatError, match="lies outside the shape"):
        open_checkpoint(copy)


def test_an_unfinished_directory_is_said_to_be_one(directory: Path, tmp_path: Path) -> None:
    copy, _ = edited(directory, tmp_path)
    (copy / ".metadata").unlink()
    with pytest.raises(FormatError, match=r"incomplete: it has \.distcp files, but no \.metadata"):
        open_checkpoint(copy)


def test_metadata_of_each_rank_alone(directory: Path, tmp_path: Path) -> None:
    copy, _ = edited(directory, tmp_path)
    data = (copy / ".metadata").read_bytes()
    (copy / ".metadata").unlink()
    for rank in (0, 1):
        (copy / f"__{rank}.metadata").write_bytes(data)
    found = open_checkpoint(copy)
    assert len(found.meta("w").chunks) == 1
    assert bits(found.read("w")) == bits(STATE["w"])


@pytest.mark.parametrize("cut", [0, 1, 100, 2000])
def test_cut_metadata(directory: Path, tmp_path: Path, cut: int) -> None:
    copy, _ = edited(directory, tmp_path)
    (copy / ".metadata").write_bytes((copy / ".metadata").read_bytes()[:cut])
    with pytest.raises(FormatError, match="not a pickle") as caught:
        open_checkpoint(copy)
    assert caught.value.file == str(copy / ".metadata")


def test_the_digest_knows_the_values(directory: Path, tmp_path: Path) -> None:
    copy, metadata = edited(directory, tmp_path)
    assert open_checkpoint(copy).digest == open_checkpoint(directory).digest
    (place,) = (p for index, p in metadata.storage_data.items() if index.fqn == "epoch")
    place.length += 1
    put(copy, metadata)
    assert open_checkpoint(copy).digest != open_checkpoint(directory).digest


def test_entries_are_tensors_or_values(directory: Path) -> None:
    found = open_checkpoint(directory)
    assert isinstance(found["w"], StoredTensor)
    assert set(found) == {*found.tensors, *found.objects}
    assert len(found) == len(set(found))
    with pytest.raises(KeyError, match="not a tensor"):
        found.meta("epoch")
    with pytest.raises(KeyError, match="not a value"):
        found.value("w")
