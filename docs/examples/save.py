"""Ranks save what they hold, each byte once, in two formats, and others read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import load
import torch.distributed as dist
from bert import Bert
from figures import Act, Moved, Verdict, highest, total
from safetensors import safe_open
from source import Source, differing, same_bits
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh

import ckptx
from ckptx import SaveReport

Format = Literal["safetensors", "dcp"]
READERS = {"safetensors": "the safetensors library", "dcp": "torch's dcp.load"}


def act(model: Bert, source: Source, mesh: DeviceMesh, folder: Path) -> Act:
    """Save the model in both formats, and read it back with ckptx and with the format's owner.

    `folder` is the same on all ranks.
    """
    found = Act("save")
    for kind in ("safetensors", "dcp"):
        found += save_and_read(model, source, mesh, folder / kind, kind)
    return found


def save_and_read(model: Bert, source: Source, mesh: DeviceMesh, path: Path, kind: Format) -> Act:
    whole = source.whole()
    saved = ckptx.save(model.state_dict(), path, format=kind)
    fresh = source.sharded(mesh)
    loaded = ckptx.load(fresh.state_dict(), path)
    wrong = differing(fresh, whole)
    if kind == "dcp":
        other = source.sharded(mesh)
        dcp_load(other.state_dict(), checkpoint_id=path)
        wrong_elsewhere = differing(other, whole)
    else:
        wrong_elsewhere = differing_in_files(path, whole) if dist.get_rank() == 0 else 0
    return Act(
        "save",
        [moved(f"save, {kind}", saved, whole), load.moved(f"load, {kind}", loaded)],
        [
            written_once(saved.bytes_written, whole, kind),
            verdict(f"saved as {kind} and loaded again, bit-equal", wrong),
            verdict(f"the same, as {READERS[kind]} reads it", wrong_elsewhere),
        ],
    )


def moved(name: str, report: SaveReport, whole: Mapping[str, Tensor]) -> Moved:
    """The figures of a save. What all must write together counts on the first rank."""
    least = nbytes_of(whole) if dist.get_rank() == 0 else 0
    return Moved(name, written=report.bytes_written, least=least, seconds=report.seconds)


def nbytes_of(whole: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in whole.values())


def written_once(nbytes: int, whole: Mapping[str, Tensor], kind: str) -> Verdict:
    written, least = total(nbytes), nbytes_of(whole)
    return f"bytes written as {kind}, each once: {written / least:.4f} times", written == least


def verdict(text: str, wrong: int) -> Verdict:
    count = int(highest(wrong))
    return f"{text}: {count} tensors differ", count == 0


def differing_in_files(path: Path, whole: Mapping[str, Tensor]) -> int:
    """How many tensors the safetensors library does not read as they are.

    The files hold parts, and say where in its tensor each of them begins.
    """
    wrong, seen = set(), dict.fromkeys(whole, 0)
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            places = json.loads(opened.metadata().get("DCP_SHARDING_INFO", "{}"))
            for key in opened.keys():  # noqa: SIM118 - this is no dict
                part = opened.get_tensor(key)
                start = places[key]["saved_offsets"] if key in places else [0] * part.ndim
                box = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
                seen[key] += part.numel()
                if not same_bits(part, whole[key][box]):
                    wrong.add(key)
    return len(wrong | {key for key, count in seen.items() if count != whole[key].numel()})
