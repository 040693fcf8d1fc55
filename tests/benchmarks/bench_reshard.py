"""What it takes to carry 200 tensors of 256 MB from rows to columns on four ranks, as JSON.

Beside `Resharder.run` the two ways that torch offers: the full tensor of each, sliced, and
`redistribute`, tensor by tensor. They run in turn in the same four processes, so that whatever
else the machine does falls on all alike. A ratio is that of the medians of the slowest rank.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from distcore.testing import rank_pool
from distcore.v1 import Channel
from reshard import Resharder

RANKS = 4
TENSORS = 200
SHAPE = (640, 500)  # 1.28 MB in float32
ROUNDS = 5
TIMES_AT_LEAST = 5.0
STAGING_NBYTES = 64 << 20


def measured(channel: Channel) -> dict[str, object]:
    """Seconds of each way and round on this rank, and what the Resharder reports."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    src: dict[str, DTensor] = {}
    dst: dict[str, DTensor] = {}
    for number in range(TENSORS):
        values = full + number
        src[f"w{number}"] = distribute_tensor(values, mesh, [Shard(0)], src_data_rank=None)
        zeros = torch.zeros_like(values)
        dst[f"w{number}"] = distribute_tensor(zeros, mesh, [Shard(1)], src_data_rank=None)
    width = SHAPE[1] // RANKS
    mine = slice(channel.rank * width, (channel.rank + 1) * width)

    def by_full_tensor() -> None:
        for key, tensor in src.items():
            dst[key].to_local().copy_(tensor.full_tensor()[:, mine])

    def by_redistribute() -> None:
        for key, tensor in src.items():
            dst[key].to_local().copy_(tensor.redistribute(mesh, [Shard(1)]).to_local())

    def by_resharder() -> None:
        resharder.run()

    begin = time.perf_counter()
    with Resharder(src, dst, max_staging_bytes=STAGING_NBYTES) as resharder:
        setup = time.perf_counter() - begin
        report = resharder.run()
        for number in (0, TENSORS - 1):
            expected = (full + number)[:, mine]
            assert torch.equal(dst[f"w{number}"].to_local(), expected)
        seconds = timed(
            {
                "resharder": by_resharder,
                "full_tensor": by_full_tensor,
                "redistribute": by_redistribute,
            }
        )
    return {
        "setup_s": setup,
        "seconds": seconds,
        "nbytes_received": report.nbytes_received,
        "bound_received_nbytes": report.bound_received_nbytes,
        "staging_nbytes": report.staging_nbytes,
        "messages": report.messages,
    }


def timed(ways: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """The seconds of each way, in turn; all ranks begin together."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            run()
            dist.barrier()
            seconds[way].append(time.perf_counter() - begin)
    return seconds


def rows(table: dict[str, Any]) -> list[dict[str, object]]:
    """The figures beside their targets; bytes are those of all ranks."""
    return [
        {
            "name": f"Resharder.run, 200 tensors, over {way}",
            "value": times,
            "target": TIMES_AT_LEAST,
            "nbytes": sum(table["nbytes_received"]),
            "bound_nbytes": sum(table["bound_received_nbytes"]),
            "peak_nbytes": max(table["staging_nbytes"]),
        }
        for way, times in table["times_as_fast"].items()
    ]


def main() -> None:
    """Run it and print what came out."""
    with rank_pool(RANKS) as pool:
        ranks = pool.run(measured, deadline_s=540).values()
    slowest: dict[str, float] = {}
    for way in ("resharder", "full_tensor", "redistribute"):
        rounds = zip(*(rank["seconds"][way] for rank in ranks), strict=True)  # type: ignore[index]
        slowest[way] = statistics.median(max(row) for row in rounds)
    table = {
        "ranks": RANKS,
        "tensors": TENSORS,
        "nbytes": TENSORS * SHAPE[0] * SHAPE[1] * 4,
        "rounds": ROUNDS,
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "setup_s": round(max(float(str(rank["setup_s"])) for rank in ranks), 3),
        "median_s": {way: round(value, 4) for way, value in slowest.items()},
        "times_as_fast": {
            way: round(slowest[way] / slowest["resharder"], 2)
            for way in ("full_tensor", "redistribute")
        },
        "nbytes_received": [rank["nbytes_received"] for rank in ranks],
        "bound_received_nbytes": [rank["bound_received_nbytes"] for rank in ranks],
        "staging_nbytes": [rank["staging_nbytes"] for rank in ranks],
        "staging_budget_nbytes": STAGING_NBYTES,
        "messages": [rank["messages"] for rank in ranks],
    }
    print(json.dumps({**table, "rows": rows(table)}, indent=2))


if __name__ == "__main__":
    main()
