"""megatron: the directory names its format, and the common state is a key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint as dcp

from ckptx import FormatError, open_checkpoint
from ckptx.files import FileReader
from ckptx.formats.megatron import hashes

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    state = {"layer.weight": torch.arange(6.0).reshape(2, 3), "rng/shard_0_1": [1, "a"]}
    dcp.state_dict_saver.save(state, checkpoint_id=tmp_path, no_dist=True)
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (tmp_path / "metadata.json").write_text(json.dumps(config))
    return tmp_path


def test_the_common_state_has_a_key(directory: Path) -> None:
    torch.save({"iteration": 7, "args": None}, directory / "common.pt")
    found = open_checkpoint(directory)
    assert found.format == "megatron"
    assert found.value("common_state/shard_0_1") == {"iteration": 7, "args": None}
    assert found.value("rng/shard_0_1") == [1, "a"]
    assert torch.equal(found.read("layer.weight"), torch.arange(6.0).reshape(2, 3))


def test_another_backend_is_refused(directory: Path) -> None:
    (directory / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(FormatError, match="'zarr' is not read"):
        open_checkpoint(directory)
    (directory / "metadata.json").write_text("{")
    with pytest.raises(FormatError, match="not JSON"):
        open_checkpoint(directory)


def test_the_hashes_of_the_files(directory: Path) -> None:
    with FileReader() as reader:
        assert hashes(reader, str(directory)) == {}
    table = {"files": {"__0_0.distcp": "ab" * 32, "x": 5}}
    (directory / "integrity.json").write_text(json.dumps(table))
    with FileReader() as reader:
        assert hashes(reader, str(directory)) == {"__0_0.distcp": "ab" * 32}
