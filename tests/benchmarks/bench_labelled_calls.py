"""What a labelled call costs beside torch's `all_gather_object` of the same values, as JSON.

The calls run in turn in the same two processes, which torchrun starts, so that whatever else the
machine does falls on all alike. `ratio` is that of the medians; less than 1 is cheaper.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

import distcore

RANKS = 2
ROUNDS = 300
WARM_UP = 30
TIMES_AT_MOST = 1.2
VALUES: dict[str, object] = {
    "int": 8,
    "dict": {"rank": 1, "shape": [4096, 1024], "dtype": "bfloat16", "ok": True},
    "list of 10 000 ints": list(range(10_000)),
    "tensor of 1 MiB": torch.arange(1 << 18, dtype=torch.float32),
}


def first(values: list[object]) -> object:
    """Combine as a function of the caller's own would: the ranks compare what it returned."""
    return values[0]


def median_ms(value: object) -> dict[str, float]:
    """Median milliseconds of each way, on this rank."""

    def gather_object() -> None:
        found: list[object] = [None] * RANKS
        dist.all_gather_object(found, value)

    ways: dict[str, Callable[[], object]] = {
        "all_gather_object": gather_object,
        "all_reduce, known combine": lambda: distcore.all_reduce("bench", lambda: value, list),
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


def run_rank() -> None:
    """Measure as one of the ranks; rank 0 prints one JSON object."""
    with distcore.distributed_run(device="cpu") as state:
        figures = {}
        for name, value in VALUES.items():
            found = median_ms(value)
            base = found["all_gather_object"]
            figures[name] = {
                way: {"median_ms": round(ms, 3), "ratio": round(ms / base, 2)}
                for way, ms in found.items()
            }
        if state.is_main:
            printed = {"ranks": RANKS, "figures": figures, "rows": rows(figures)}
            print(json.dumps({"benchmark": "labelled_calls", **printed}))


def rows(figures: dict[str, dict[str, dict[str, float]]]) -> list[dict[str, object]]:
    """Each way over `all_gather_object`, beside what it may cost."""
    return [
        {
            "name": f"{way}, {name}, times all_gather_object",
            "value": cost["ratio"],
            "target": TIMES_AT_MOST,
            "at_most": True,
        }
        for name, ways in figures.items()
        for way, cost in ways.items()
        if way != "all_gather_object"
    ]


def main() -> None:
    """Start the ranks, or be one."""
    if distcore.is_distributed_launch():
        run_rank()
        return
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*launch, "--nproc-per-node", str(RANKS), __file__],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=300,
    )


if __name__ == "__main__":
    main()
