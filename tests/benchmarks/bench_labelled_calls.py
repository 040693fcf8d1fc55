"""What a labelled call costs beside torch's `all_gather_object` of the same values, as JSON.

The calls run in turn in the same two processes, so that whatever else the machine does falls on
all alike. `ratio` is that of the medians.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import distcore
from distcore.testing import rank_pool
from distcore.v1 import Channel

RANKS = 2
ROUNDS = 400
WARM_UP = 40
VALUES: dict[str, object] = {
    "int": 8,
    "dict": {"rank": 1, "shape": [4096, 1024], "dtype": "bfloat16", "ok": True},
    "list of 10 000 ints": list(range(10_000)),
    "tensor of 1 MiB": torch.arange(1 << 18, dtype=torch.float32),
}


def first(values: list[object]) -> object:
    """Combine as a function of the caller's own would: the ranks compare what it returned."""
    return values[0]


def measured(channel: Channel, name: str) -> dict[str, float]:
    """Median milliseconds of each way, on this rank."""
    torch.set_num_threads(1)
    value = VALUES[name]

    def gather_object() -> None:
        found: list[object] = [None] * channel.size
        dist.all_gather_object(found, value)

    ways: dict[str, Callable[[], object]] = {
        "all_gather_object": gather_object,
        "all_reduce": lambda: distcore.all_reduce("bench", lambda: value, list),
        "all_reduce, own combine": lambda: distcore.all_reduce("bench", lambda: value, first),
        "broadcast_from": lambda: distcore.broadcast_from("bench", lambda: value),
        "barrier": distcore.barrier,
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS + WARM_UP):
        for way, call in ways.items():
            begin = time.perf_counter()
            call()
            seconds[way].append(time.perf_counter() - begin)
    return {way: statistics.median(found[WARM_UP:]) * 1e3 for way, found in seconds.items()}


def main() -> None:
    """Print one JSON object."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    figures = {}
    with rank_pool(RANKS) as pool:
        for name in VALUES:
            median_ms = pool.run(measured, name).values()[0]
            base = median_ms["all_gather_object"]
            figures[name] = {
                way: {"median_ms": round(ms, 3), "ratio": round(ms / base, 2)}
                for way, ms in median_ms.items()
            }
    json.dump({"benchmark": "labelled_calls", "ranks": RANKS, "figures": figures}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
