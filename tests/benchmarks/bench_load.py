"""What loading a checkpoint reads from storage, and how long it takes, beside torch's own loader.

One run, product and peer in turn, on processes with gloo: (1) an HSDP model, two copies of two
shards, from a directory that torch wrote; (2) eight slices of one tensor on eight ranks; (3) the
memory that a load takes beside the tensors. Bytes read are what the processes asked the system
for, headers and metadata too. The lower bound is the bytes of the checkpoint.

    python tests/benchmarks/bench_load.py [--mib 512] [--memory-mib 2048] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

import ckptx
from ckptx.dcp import ReadOnceReader
from distcore.testing import RankPool, rank_pool
from distcore.v1 import Channel

MIB = 1 << 20
LAYERS = 16
READ_AT_MOST = 1.02
SLICES_AT_MOST = 1.01
AS_FAST_AT_LEAST = 1.0
PEAK_AT_MOST_MIB = 128
WAYS = ("torch", "ckptx.load", "torch with ReadOnceReader")


def bytes_asked_for() -> int:
    """The bytes that this process has read from files and pipes so far."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def sharded(mib: int) -> dict[str, DTensor]:
    """A model of `mib` MiB, two copies of two shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    rows = mib * MIB // LAYERS // (2048 * 4)
    return {
        f"layer.{number}": zeros(rows, 2048, device_mesh=mesh, placements=[Replicate(), Shard(0)])
        for number in range(LAYERS)
    }


def quiet() -> None:
    """Leave out what torch warns of its own use."""
    warnings.simplefilter("ignore")


def save(_: Channel, path: str, mib: int) -> None:
    """Save with torch."""
    quiet()
    state = sharded(mib)
    for number, tensor in enumerate(state.values()):
        tensor.to_local().fill_(number + 1)
    state_dict_saver.save(state, checkpoint_id=path)


def load(channel: Channel, path: str, mib: int, way: str) -> tuple[int, float]:
    """Load one way; the bytes read and the seconds of this rank."""
    quiet()
    state = sharded(mib)
    channel.all_gather(b"start")
    before, started = bytes_asked_for(), time.monotonic()
    if way == "ckptx.load":
        ckptx.load(state, path, group=channel)
    else:
        reader = ReadOnceReader(path) if way != "torch" else None
        state_dict_loader.load(state, checkpoint_id=path, storage_reader=reader)
    seconds = time.monotonic() - started
    for number, tensor in enumerate(state.values()):
        if not bool((tensor.to_local() == number + 1).all()):
            raise ValueError(f"layer {number} is wrong")
    return bytes_asked_for() - before, seconds


def save_one(channel: Channel, path: str) -> None:
    """Save one tensor of 4 MiB whole."""
    quiet()
    state_dict_saver.save({"w": torch.arange(MIB, dtype=torch.float32)}, checkpoint_id=path)
    channel.all_gather(b"done")


def load_slice(channel: Channel, path: str, way: str) -> int:
    """Load an eighth of it; the bytes read by this rank."""
    quiet()
    mesh = init_device_mesh("cpu", (channel.size,))
    state = {"w": zeros(MIB, device_mesh=mesh, placements=[Shard(0)])}
    channel.all_gather(b"start")
    before = bytes_asked_for()
    if way == "ckptx.load":
        ckptx.load(state, path, group=channel)
    else:
        reader = ReadOnceReader(path) if way != "torch" else None
        state_dict_loader.load(state, checkpoint_id=path, storage_reader=reader)
    return bytes_asked_for() - before


class Peak:
    """The most memory that this process held, looked at every millisecond."""

    def __init__(self) -> None:
        self.nbytes = self.before = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def growth(self) -> int:
        """End the watch, and return the growth in bytes."""
        self._done.set()
        self._thread.join()
        return self.nbytes - self.before

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.nbytes = max(self.nbytes, self._now())

    def _now(self) -> int:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def load_watched(channel: Channel, path: str, mib: int) -> int:
    """The memory that a load of one large tensor takes beside it, on this rank."""
    state = {"w": torch.ones(mib * MIB // 4)}
    peak = Peak()
    ckptx.load(state, path, group=channel, max_staging_bytes=64 * MIB)
    return peak.growth()


def measure_model(pool: RankPool, path: str, mib: int, rounds: int) -> dict[str, object]:
    """Each way in turn, as often as asked for."""
    pool.run(save, path, mib).values()
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    read: dict[str, int] = {}
    for _ in range(rounds):
        for way in WAYS:
            found = pool.run(load, path, mib, way).values()
            read[way] = sum(nbytes for nbytes, _ in found)
            seconds[way].append(max(s for _, s in found))
    best = {way: min(found) for way, found in seconds.items()}
    return {
        way: {
            "bytes_read_over_bound": round(read[way] / (mib * MIB), 4),
            "seconds": round(best[way], 3),
            "times_as_fast_as_torch": round(best["torch"] / best[way], 2),
        }
        for way in WAYS
    }


def model_rows(ways: dict[str, Any], mib: int) -> list[dict[str, object]]:
    """Bytes read and time of each way beside their targets; torch's own has none."""
    found: list[dict[str, object]] = []
    for way in WAYS:
        over, name = ways[way]["bytes_read_over_bound"], f"load, HSDP 2x2, {way}"
        nbytes = {"nbytes": round(over * mib * MIB), "bound_nbytes": mib * MIB}
        limit = {} if way == "torch" else {"target": READ_AT_MOST, "at_most": True}
        found.append({"name": f"{name}, bytes read over bound", "value": over, **limit, **nbytes})
        if way != "torch":
            speed = {"value": ways[way]["times_as_fast_as_torch"], "target": AS_FAST_AT_LEAST}
            found.append({"name": f"{name}, times as fast as torch", **speed})
    return found


def slice_rows(over: dict[str, float]) -> list[dict[str, object]]:
    """Bytes that eight slices of one tensor read."""
    limit = {"target": SLICES_AT_MOST, "at_most": True}
    return [
        {
            "name": f"load, 8 slices of 4 MiB, {way}, bytes read over bound",
            "value": value,
            **({} if way == "torch" else limit),
            "nbytes": round(value * 4 * MIB),
            "bound_nbytes": 4 * MIB,
        }
        for way, value in over.items()
    ]


def main() -> None:
    """Run, and print JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--memory-mib", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        with rank_pool(4) as pool:
            model = measure_model(pool, f"{directory}/model", options.mib, options.rounds)
        found = {"hsdp_2x2_mib": options.mib, "ways": model}
        print(json.dumps({**found, "rows": model_rows(model, options.mib)}), flush=True)
        with rank_pool(8) as pool:
            pool.run(save_one, f"{directory}/one").values()
            for way in WAYS:  # what each imports late is no part of the checkpoint
                pool.run(load_slice, f"{directory}/one", way).values()
            slices = {
                way: sum(pool.run(load_slice, f"{directory}/one", way).values()) / (4 * MIB)
                for way in WAYS
            }
        over = {way: round(times, 4) for way, times in slices.items()}
        rows = slice_rows(over)
        print(json.dumps({"eight_slices_bytes_read_over_bound": over, "rows": rows}), flush=True)
        large = {"w": torch.zeros(options.memory_mib * MIB // 4)}
        ckptx.save(large, f"{directory}/large")
        del large
        with rank_pool(2) as pool:
            growth = pool.run(load_watched, f"{directory}/large", options.memory_mib).values()
        peaks = [round(nbytes / MIB, 1) for nbytes in growth]
        row = {
            "name": f"load, {options.memory_mib} MiB file, peak beside the tensors",
            "value": max(peaks),
            "unit": "MiB",
            "target": PEAK_AT_MOST_MIB,
            "at_most": True,
        }
        found = {"file_mib": options.memory_mib, "peak_beside_tensors_mib": peaks}
        print(json.dumps({**found, "rows": [row]}))


if __name__ == "__main__":
    main()
