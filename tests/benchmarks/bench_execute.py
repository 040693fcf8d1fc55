"""Execute against one broadcast per tensor, on ranks of one host; prints JSON.

Tensor i belongs to rank i modulo the number of ranks, and every other rank needs it. Four ways
take turns within one run: `execute` with the short ways between ranks of one host, `execute` over
sockets alone, one `dist.broadcast` per tensor, and a plain copy of as many bytes on each rank. A
time is that of the slowest rank, from a barrier on. Ratios are those of medians (on a machine with
other work those of the best times tell more); above 1 means that execute is faster.

    python tests/benchmarks/bench_execute.py [--ranks 4] [--repeats 7] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import platform
import pstats
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import start_processes

from distcore.v1 import Plan, Region, Transfer
from distcore.v1.runtime import ExecuteReport, GroupChannel, execute

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """`count` square float32 tensors; `target` is the ratio that the short ways shall reach."""

    name: str
    count: int
    side: int
    target: float


CASES = (
    Case("2000 tensors of 16 KiB", 2000, 64, 8.0),
    Case("32 tensors of 16 MiB", 32, 2048, 4.0),
)


def plan_of(case: Case, size: int) -> Plan:
    region = Region((0, 0), (case.side, case.side))
    return Plan(
        Transfer(f"layers.{i}.weight", i % size, rank, region)
        for i in range(case.count)
        for rank in range(size)
        if rank != i % size
    )


def timed(move: Callable[[], object]) -> tuple[float, float]:
    """The seconds of the slowest rank, and the processor seconds of all."""
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    move()
    seconds = torch.tensor([time.perf_counter() - begin])
    cpu_seconds = torch.tensor([time.process_time() - cpu])
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu_seconds)
    return float(seconds), float(cpu_seconds)


class Rank:
    """One rank with its tensors, and the ways to fill those of the others."""

    def __init__(self, case: Case, channel: GroupChannel) -> None:
        self.case = case
        self.channel = channel
        self.plan = plan_of(case, channel.size)
        self.owners = {f"layers.{i}.weight": i % channel.size for i in range(case.count)}
        self.sources: Tensors = {}
        self.destinations: Tensors = {}
        for key, owner in self.owners.items():
            side = self.sources if owner == channel.rank else self.destinations
            side[key] = torch.empty(case.side, case.side)
        self.reports: dict[str, ExecuteReport] = {}

    def execute(self, same_host: Literal["auto", "off"]) -> None:
        self.reports[same_host] = execute(
            self.plan, self.channel, self.sources, self.destinations, same_host=same_host
        )

    def broadcast(self) -> None:
        for key, owner in self.owners.items():
            own = owner == self.channel.rank
            dist.broadcast((self.sources if own else self.destinations)[key], src=owner)

    def memcpy(self) -> None:
        """As many bytes, from this rank's own memory."""
        source = next(iter(self.sources.values()))
        for tensor in self.destinations.values():
            tensor.copy_(source)

    def forget(self, value: int) -> None:
        """Write the sources anew, and something wrong into the destinations."""
        for i, tensor in enumerate(self.sources.values()):
            tensor.fill_(value + i)
        for tensor in self.destinations.values():
            tensor.fill_(-1)

    def has_all(self) -> bool:
        return not any(bool((tensor == -1).any()) for tensor in self.destinations.values())

    def ways(self) -> dict[str, Callable[[], None]]:
        return {
            "same_host": lambda: self.execute("auto"),
            "sockets": lambda: self.execute("off"),
            "broadcast": self.broadcast,
            "memcpy": self.memcpy,
        }


def measured(case: Case, channel: GroupChannel, repeats: int) -> dict[str, Any]:
    rank = Rank(case, channel)
    seconds: dict[str, list[float]] = {name: [] for name in rank.ways()}
    cpu: dict[str, list[float]] = {name: [] for name in rank.ways()}
    for repeat in range(repeats + 1):
        for name, move in rank.ways().items():
            rank.forget(repeat)
            taken, cpu_taken = timed(move)
            if not rank.has_all():
                raise RuntimeError(f"{name} left a tensor unfilled")
            if repeat:  # the first round warms up: connections, handshakes, pages
                seconds[name].append(taken)
                cpu[name].append(cpu_taken)
    report = rank.reports["auto"]
    medians = {name: median(found) for name, found in seconds.items()}
    return {
        "case": case.name,
        "target_ratio": case.target,
        "ratio_same_host": round(medians["broadcast"] / medians["same_host"], 2),
        "ratio_sockets": round(medians["broadcast"] / medians["sockets"], 2),
        "ratio_memcpy": round(medians["memcpy"] / medians["same_host"], 2),
        "cpu_s": {name: round(median(found), 4) for name, found in cpu.items()},
        "ratio_of_best_same_host": round(min(seconds["broadcast"]) / min(seconds["same_host"]), 2),
        "ratio_of_best_sockets": round(min(seconds["broadcast"]) / min(seconds["sockets"]), 2),
        "median_s": {name: round(value, 5) for name, value in medians.items()},
        "all_s": {name: [round(s, 5) for s in found] for name, found in seconds.items()},
        "nbytes_received_per_rank": report.nbytes_received,
        "nbytes_lower_bound_per_rank": sum(t.nbytes for t in rank.destinations.values()),
        "staging_nbytes": {key: found.staging_nbytes for key, found in rank.reports.items()},
        "rounds": {key: found.rounds for key, found in rank.reports.items()},
        "carriers": carriers(channel),
    }


def rows(found: dict[str, Any]) -> list[dict[str, object]]:
    """The figures of one case beside their targets."""
    name = f"execute, {found['case']}"
    nbytes = {
        "nbytes": found["nbytes_received_per_rank"],
        "bound_nbytes": found["nbytes_lower_bound_per_rank"],
    }
    ways = {"": "same_host", ", sockets alone": "sockets"}
    over = f"{name}, over one broadcast per tensor"
    return [
        {
            "name": f"{over}{text}",
            "value": found[f"ratio_{way}"],
            **({"target": found["target_ratio"]} if way == "same_host" else {}),
            **nbytes,
            "cpu_s": found["cpu_s"][way],
            "peak_nbytes": found["staging_nbytes"]["auto" if way == "same_host" else "off"],
        }
        for text, way in ways.items()
    ] + [{"name": f"{name}, over memcpy", "value": found["ratio_memcpy"]}]


def carriers(channel: GroupChannel) -> list[str]:
    """How the pairs of ranks are joined where the short ways are allowed."""
    short = channel.same_host()
    return sorted({short.carrier(0, rank) for rank in channel.ranks if rank})


def profiled(case: Case, channel: GroupChannel) -> dict[str, str]:
    """Where rank 0 spends its time in one call of each way."""
    rank = Rank(case, channel)
    found = {}
    for name, move in rank.ways().items():
        move()
        profile = cProfile.Profile()
        dist.barrier()
        if channel.rank == 0:
            profile.runcall(move)
            text = io.StringIO()
            pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(25)
            found[name] = text.getvalue()
        else:
            move()
    return found


def run_rank(rank: int, size: int, store: str, repeats: int, profile: bool) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        store=FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=120),
    )
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("there is no default group")
    channel = GroupChannel(group)
    if profile:
        for case in CASES:
            for name, text in profiled(case, channel).items():
                print(f"{case.name}, {name}\n{text}")
    else:
        results = [measured(case, channel, repeats) for case in CASES]
        if rank == 0:
            found = {"benchmark": "execute", **surroundings(size), "cases": results}
            print(json.dumps({**found, "rows": [row for case in results for row in rows(case)]}))
    channel.close()
    dist.destroy_process_group()


def surroundings(size: int) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": processor(),
            "cores": os.cpu_count(),
            "load": [round(value, 2) for value in os.getloadavg()],
            "system": platform.platform(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
        "backend": "gloo",
        "ranks": size,
    }


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description="execute against one broadcast per tensor")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="show where rank 0 spends its time")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        start_processes(
            run_rank,
            args=(args.ranks, f"{folder}/store", args.repeats, args.profile),
            nprocs=args.ranks,
            start_method="spawn",
        )


if __name__ == "__main__":
    main()
