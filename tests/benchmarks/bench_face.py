"""What one call of `xferdtensor_python_impl` costs beside `redistribute`, as JSON.

Small tensors on four gloo ranks, rows to columns, in turn in the same processes: there the time
goes into what the ranks tell each other. `redistribute` tells them nothing: it trusts that all
call alike. Seconds are medians of the slowest rank; those of the processor are of all ranks.
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
from torch.distributed.tensor import Shard, distribute_tensor

from distcore.testing import rank_pool
from distcore.v1 import Channel
from distcore.v1.runtime import GroupChannel
from reshard.xferdtensor_python import xferdtensor_python_impl

RANKS = 4
SIDES = (64, 512)  # 16 KiB and 1 MiB in float32
ROUNDS = 15


def measured(channel: Channel, side: int) -> dict[str, Any]:
    """Seconds of each way and round on this rank, and the exchanges of rows of a call."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (RANKS,))
    full = torch.arange(float(side * side)).reshape(side, side)
    rows, columns = [Shard(0)], [Shard(1)]
    src = distribute_tensor(full, mesh, rows, src_data_rank=None)
    dst = distribute_tensor(torch.zeros_like(full), mesh, columns, src_data_rank=None)
    carry: Any = xferdtensor_python_impl

    def by_face() -> None:
        carry(src, mesh, rows, dst, mesh, columns, None)

    def by_redistribute() -> None:
        dst.to_local().copy_(src.redistribute(mesh, columns).to_local())

    by_face()
    assert torch.equal(dst.to_local(), full.chunk(RANKS, 1)[channel.rank])
    exchanges = counted(by_face)
    wall: dict[str, list[float]] = {"face": [], "redistribute": []}
    cpu = {"face": 0.0, "redistribute": 0.0}
    for _ in range(ROUNDS):
        for way, run in (("face", by_face), ("redistribute", by_redistribute)):
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            run()
            wall[way].append(time.perf_counter() - begin)
            cpu[way] += (time.process_time() - begin_cpu) / ROUNDS
    return {"wall": wall, "cpu": cpu, "exchanges": exchanges}


def counted(run: Callable[[], None]) -> int:
    """How often `run` exchanges rows."""
    real, found = GroupChannel.all_gather, 0

    def all_gather(self: GroupChannel, *args: Any, **kwargs: Any) -> tuple[bytes, ...]:
        nonlocal found
        found += 1
        return real(self, *args, **kwargs)

    GroupChannel.all_gather = all_gather  # type: ignore[method-assign]
    run()
    GroupChannel.all_gather = real  # type: ignore[method-assign]
    return found


def main() -> None:
    """Run it and print what came out."""
    rows: list[dict[str, object]] = []
    with rank_pool(RANKS) as pool:
        for side in SIDES:
            ranks = pool.run(measured, side, deadline_s=240).values()
            slowest = {
                way: statistics.median(
                    max(times) for times in zip(*(rank["wall"][way] for rank in ranks), strict=True)
                )
                for way in ("face", "redistribute")
            }
            name = f"one call of the face, {side * side * 4 >> 10} KiB"
            rows += [
                {
                    "name": f"{name}, time over redistribute",
                    "value": slowest["face"] / slowest["redistribute"],
                    "at_most": True,
                    "cpu_s": sum(rank["cpu"]["face"] for rank in ranks),
                },
                {
                    "name": f"{name}, rows exchanged",
                    "value": ranks[0]["exchanges"],
                    "unit": "times",
                },
            ]
    print(json.dumps({"ranks": RANKS, "cpus": os.cpu_count(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
