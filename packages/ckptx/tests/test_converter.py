"""convert: every format into every other, bit for bit, and never what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import ckptx
from ckptx import CheckpointPeerError, FormatError
from ckptx.savejob import Format
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout

STATE = {
    "w": torch.arange(60000, dtype=torch.float32).reshape(300, 200),
    "t": torch.arange(12.0).reshape(3, 4).t(),
    "f8": torch.arange(9.0).to(torch.float8_e5m2),
    "scalar": torch.tensor(2.5),
    "none": torch.zeros(0, 2),
    "opt": {"lr": 0.5, "betas": (0.9, 0.99)},
}


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("one", "other"), [("dcp", "safetensors"), ("safetensors", "dcp")])
def test_there_and_back(tmp_path: Path, one: Format, other: Format, size: int) -> None:
    ckptx.save(STATE, tmp_path / "a", format=one)
    seen: list[tuple[int, int]] = []

    def job(channel: Channel) -> None:
        for source, target, kind in (("a", "b", other), ("b", "c", one)):
            ckptx.convert(
                tmp_path / source,
                tmp_path / target,
                group=channel,
                format=kind,
                max_staging_bytes=128 << 10,
                progress=lambda done, total: seen.append((done, total)),
            )

    rank_threads(size, job).values()
    before, after = (ckptx.open_checkpoint(tmp_path / name) for name in "ac")
    assert before.format == after.format
    assert dict.fromkeys(before) == dict.fromkeys(after) or set(before) == set(after)
    for key in before.tensors:
        assert bits(before.read(key)) == bits(after.read(key))
    assert [after.value(key) for key in ("opt.lr", "opt.betas")] == [0.5, (0.9, 0.99)]
    assert all(done <= total for done, total in seen)
    assert any(done == total for done, total in seen)


def test_what_is_damaged_is_not_converted(tmp_path: Path) -> None:
    ckptx.save(STATE, tmp_path / "a")
    file = tmp_path / "a" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(bytes(data))

    def job(channel: Channel) -> None:
        ckptx.convert(tmp_path / "a", tmp_path / "b", group=channel, format="dcp")

    for error in rank_threads(2, job).raised(CheckpointPeerError, within_s=5):
        assert "damaged" in str(error)
    assert not (tmp_path / "b").exists()
    with pytest.raises(FormatError, match="incomplete"):
        ckptx.open_checkpoint(tmp_path / "b.partial")


def test_pytorch_192485_parts_of_any_dtype_and_scalars_are_joined(tmp_path: Path) -> None:
    """Integers and booleans are joined like floats, and a scalar keeps its value."""
    state = {
        "ids": torch.arange(30).reshape(6, 5),
        "mask": torch.arange(12).reshape(6, 2) % 3 == 0,
        "scale": torch.tensor(2.5),
        "step": torch.tensor(7),
    }
    layouts = {
        key: Layout.from_mesh(
            shape=tuple(state[key].shape), dtype=dtype, mesh=[0, 1, 2], placements=["S(0)"]
        )
        for key, dtype in (("ids", "int64"), ("mask", "bool"))
    }

    def save(channel: Channel) -> None:
        low = 2 * channel.rank
        mine = state | {key: state[key][low : low + 2] for key in layouts}
        ckptx.save(mine, tmp_path / "parts", group=channel, layouts=layouts)

    rank_threads(3, save).values()
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) == 3
    ckptx.convert(tmp_path / "parts", tmp_path / "whole", format="safetensors")
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    found = load_file(file)
    assert {key: value.dtype for key, value in found.items()} == {
        key: value.dtype for key, value in state.items()
    }
    assert all(torch.equal(found[key], value) for key, value in state.items())
