"""dcp_files: what torch's own reader makes of the files, and places that are known beforehand."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckptx import plan_save
from ckptx.formats import dcp_files
from ckptx.formats.dcp_files import dcp_format
from ckptx.outfile import OutFormat
from distcore.v1 import Layout, Region

LAYOUTS = {
    "w": Layout.replicated(shape=(6, 4), dtype="float32", ranks=(0, 1)),
    "none": Layout.replicated(shape=(0, 3), dtype="bfloat16", ranks=(0, 1)),
}


def formatted(values: dict[str, object] | None = None) -> OutFormat:
    plan = plan_save(LAYOUTS, (0, 1), min_split=1)
    paths: dict[str, tuple[str | int, ...]] = {"lr": ("opt", 0, "lr")}
    return dcp_format(plan, LAYOUTS, values or {}, ranks=(0, 1), paths=paths)


def metadata(found: OutFormat) -> Any:
    return pickle.loads(found.last[".metadata"])


def test_torch_unpickles_the_metadata() -> None:
    found = metadata(formatted({"lr": 0.5}))
    assert isinstance(found, Metadata)
    entry: Any = found.state_dict_metadata["w"]
    assert (entry.size, entry.properties.dtype) == (torch.Size((6, 4)), torch.float32)
    chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    assert chunks == [((0, 0), (3, 4)), ((3, 0), (3, 4))]
    assert found.planner_data == {"lr": ("opt", 0, "lr"), "w": ("w",), "none": ("none",)}
    assert found.version == "1.0.0"
    assert len(found.storage_data) == 4


def test_files_hold_exactly_what_their_sizes_say() -> None:
    for file in formatted({"lr": 0.5, "names": ["a"]}).files:
        end = len(file.head)
        for part in file.parts:
            assert part.frame is not None
            assert part.begin == end + part.frame.head_nbytes
            end += part.frame.total_nbytes
        assert end == file.nbytes


def test_large_boxes_become_several_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_files, "MAX_ITEM_NBYTES", 20)
    parts = [part for file in formatted().files for part in file.parts if part.key == "w"]
    assert max(part.nbytes for part in parts) <= 24
    assert sum(part.region.numel for part in parts) == 24
    assert all(Region.of_shape((6, 4)).contains(part.region) for part in parts)
