"""One step of OwnerMuon beside one of torch.optim.Muon, on the same DTensors.

    python tests/benchmarks/bench_muon.py --ranks 2 4 --steps 3

Prints one JSON object per number of ranks: 24 matrices of 512x512 and 512x2048, Shard(0) over
gloo, one thread per rank for both. The two take steps in turn; a figure is the median of the
slowest rank's times. `cpu_ratio` compares the processor time of all ranks together, which other
programs on the machine disturb less. `bound_ratio` is what the owners' balance allows where
Newton-Schulz is all that takes time: torch's work on every rank, by the share of the busiest owner.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import asdict
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from distcore.testing import rank_pool
from distcore.v1 import Channel
from ownerplan import OwnerMuon, StepReport, plan_owners

SHAPES = ((512, 512), (512, 2048)) * 12
TARGETS = {2: 1.2, 4: 1.8}
Timed = dict[str, list[float]]


def sharded(mesh: DeviceMesh, seed: int) -> list[DTensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        distribute_tensor(
            torch.randn(shape, generator=generator), mesh, [Shard(0)], src_data_rank=None
        )
        for shape in SHAPES
    ]


def rank_main(channel: Channel, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Time the steps of one rank."""
    torch.set_num_threads(1)
    mesh = DeviceMesh("cpu", list(range(channel.size)))
    ours, theirs = ([torch.nn.Parameter(one) for one in sharded(mesh, 1)] for _ in range(2))
    owner = OwnerMuon(ours, **options)
    optimizers = {"owner": owner, "torch": torch.optim.Muon(theirs)}
    seconds: Timed = {"owner": [], "torch": []}
    cpu: Timed = {"owner": [], "torch": []}
    calls = 0
    for step in range(steps + 1):
        grads = sharded(mesh, 100 + step)
        for name, params in (("owner", ours), ("torch", theirs)):
            for param, gradient in zip(params, grads, strict=True):
                param.grad = gradient.clone()
            channel.all_gather(b"ready")
            started, cpu_started = perf_counter(), process_time()
            with CommDebugMode() if not step else nullcontext() as counted:
                optimizers[name].step()
            if step:  # the first one warms up
                seconds[name].append(perf_counter() - started)
                cpu[name].append(process_time() - cpu_started)
            elif name == "torch" and counted is not None:
                calls = counted.get_total_counts()
    report = owner.last_report or StepReport()
    return {"seconds": seconds, "cpu": cpu, "torch_calls": calls, "report": asdict(report)}


def measure(ranks: int, steps: int, options: dict[str, Any]) -> dict[str, Any]:
    """Run on so many ranks; the result is plain JSON."""
    with rank_pool(ranks) as pool:
        found = pool.run(rank_main, steps, options, deadline_s=1200.0).values()
    slowest = {
        name: [max(one["seconds"][name][at] for one in found) for at in range(steps)]
        for name in ("owner", "torch")
    }
    figures = {name: median(times) for name, times in slowest.items()}
    cpu = {
        name: median(sum(one["cpu"][name][at] for one in found) for at in range(steps))
        for name in ("owner", "torch")
    }
    plan = plan_owners([SHAPES], ranks)
    numel = sum(rows * cols for rows, cols in SHAPES)
    return {
        "ranks": ranks,
        "steps": steps,
        "options": options,
        "seconds": {name: round(value, 4) for name, value in figures.items()},
        "cpu_seconds": {name: round(value, 4) for name, value in cpu.items()},
        "cpu_ratio": round(cpu["torch"] / cpu["owner"], 2),
        "torch_collectives": found[0]["torch_calls"],
        "ratio": round(figures["torch"] / figures["owner"], 2),
        "ratios": [
            round(t / o, 2) for o, t in zip(slowest["owner"], slowest["torch"], strict=True)
        ],
        "bound_ratio": round(sum(map(sum, plan.costs)) / plan.makespan, 2),
        "nbytes_moved": sum(one["report"]["nbytes_received"] for one in found),
        "nbytes_moved_bound": 2 * 2 * numel * (ranks - 1) // ranks,
        "per_rank": [one["report"] for one in found],
    }


def rows(found: dict[str, Any]) -> list[dict[str, object]]:
    """The figures beside their targets."""
    name, ranks = f"OwnerMuon.step, {found['ranks']} ranks", found["ranks"]
    return [
        {
            "name": f"{name}, over torch.optim.Muon",
            "value": found["ratio"],
            **({"target": TARGETS[ranks]} if ranks in TARGETS else {}),
            "nbytes": found["nbytes_moved"],
            "bound_nbytes": found["nbytes_moved_bound"],
            "cpu_s": found["cpu_seconds"]["owner"],
            "peak_nbytes": max(report["held_nbytes"] for report in found["per_rank"]),
        },
        {"name": f"{name}, CPU of torch.optim.Muon over ours", "value": found["cpu_ratio"]},
    ]


def main() -> None:
    """Measure for each number of ranks and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--bucket-bytes", type=int, default=8 << 20)
    parser.add_argument("--slots", type=int, default=2)
    given = parser.parse_args()
    options = {"bucket_bytes": given.bucket_bytes, "slots": given.slots}
    for ranks in given.ranks:
        found = measure(ranks, given.steps, options)
        print(json.dumps({**found, "rows": rows(found)}, indent=2))


if __name__ == "__main__":
    main()
