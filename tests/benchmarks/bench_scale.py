"""How planning grows with the number of ranks, and how a transfer does with ranks that are there.

The planners run for 256 to 16 384 ranks, which need not exist: one process, processor seconds. The
transfer is that of a whole state dict from rows to columns over 2, 4 and 8 ranks, which are threads
of one process over real gloo groups. No network is between them, so their seconds say nothing of
one; bytes and messages are those of any machine.

    python tests/benchmarks/bench_scale.py [--docs docs/scale] [--from FILE]

prints JSON. With `--docs` the table and the plots of the page on scale are written from it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ckptx import plan_load
from ckptx.stored import Chunk, StoredTensor
from distcore.testing import rank_threads
from distcore.v1 import Channel, Layout, Region, balance
from ownerplan import flop_cost_fn, plan_owners
from reshard import Placed, Resharder, plan_reshard

SIMULATED = (256, 1024, 4096, 16_384)
THREADS = (2, 4, 8)
LAYERS = 32
ATTENTION = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096))
FEED_FORWARD = ((14_336, 4096), (14_336, 4096), (4096, 14_336))
LAYER = ATTENTION + FEED_FORWARD
TENSORS, SIDE = 64, 512
ROUNDS = 5


def shapes() -> dict[str, tuple[int, ...]]:
    """The matrices of a model with 8 billion parameters."""
    ends = {"embed": (128_256, 4096), "head": (128_256, 4096)}
    layers = {f"{i}.{j}": shape for i in range(LAYERS) for j, shape in enumerate(LAYER)}
    return {**ends, **layers}


def cut(ranks: range, placement: str) -> dict[str, Layout]:
    """Every matrix over all of some ranks; equal layouts are one object."""
    made: dict[tuple[int, ...], Layout] = {}
    found = {}
    for key, shape in shapes().items():
        if shape not in made:
            made[shape] = Layout.from_mesh(
                shape=shape, dtype="bfloat16", mesh=list(ranks), placements=[placement]
            )
        found[key] = made[shape]
    return found


def reshard_to_eight(ranks: int) -> object:
    return plan_reshard(cut(range(ranks), "S(0)"), cut(range(ranks, ranks + 8), "S(1)"))


def load_one_file(ranks: int) -> object:
    stored, offset = {}, 0
    for key, shape in shapes().items():
        chunk = Chunk(Region((0, 0), shape), "model.safetensors", offset)
        stored[key] = StoredTensor(shape, "bfloat16", (chunk,))
        offset += stored[key].nbytes
    return plan_load(cut(range(ranks), "S(0)"), stored, range(ranks))


def own_matrices(ranks: int) -> object:
    return plan_owners([LAYER] * LAYERS, ranks, cost_fn=flop_cost_fn(5), dtype="bfloat16")


def balance_items(ranks: int) -> object:
    costs = [1 + i * 7919 % 1_000_003 for i in range(100_000)]
    return balance(range(100_000), costs, [range(ranks)] * 100_000, ranks)


PLANNERS: dict[str, Callable[[int], object]] = {
    "plan_reshard, FSDP on all ranks to TP 8": reshard_to_eight,
    "plan_load, FSDP on all ranks, one file": load_one_file,
    "plan_owners, 224 matrices": own_matrices,
    "balance, 100 000 items": balance_items,
}


def cpu_s(act: Callable[[int], object], ranks: int) -> float:
    begin = time.process_time()
    act(ranks)
    return round(time.process_time() - begin, 3)


def transfer(channel: Channel) -> dict[str, Any]:
    """Rows to columns on one thread rank."""
    mesh = list(channel.ranks)
    sides: list[dict[str, Placed]] = []
    for placement in ("S(0)", "S(1)"):
        layout = Layout.from_mesh(
            shape=(SIDE, SIDE), dtype="float32", mesh=mesh, placements=[placement]
        )
        local = layout.local_shape(channel.rank)
        sides.append({f"w{i}": Placed(torch.ones(local), layout) for i in range(TENSORS)})
    seconds = []
    with Resharder(sides[0], sides[1], channel) as resharder:
        report = resharder.run()
        for _ in range(ROUNDS):
            channel.all_gather(b"ready")
            begin = time.perf_counter()
            report = resharder.run()
            seconds.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(seconds),
        "received": report.nbytes_received,
        "bound": report.bound_received_nbytes,
        "messages": report.messages,
    }


def threads(size: int) -> dict[str, Any]:
    """The transfer on so many thread ranks; the slowest one, and the bytes of all."""
    torch.set_num_threads(1)
    found = rank_threads(size, transfer).values()
    return {
        "seconds": round(max(one["seconds"] for one in found), 4),
        "received": sum(one["received"] for one in found),
        "bound": sum(one["bound"] for one in found),
        "messages": sum(one["messages"] for one in found),
    }


def measured() -> dict[str, Any]:
    """All figures."""
    return {
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "planners": {
            name: {str(ranks): cpu_s(act, ranks) for ranks in SIMULATED}
            for name, act in PLANNERS.items()
        },
        "threads": {str(size): threads(size) for size in THREADS},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def rows(found: dict[str, Any]) -> list[dict[str, object]]:
    """The largest case of each planner, and the bytes of each transfer beside their bound."""
    most = str(max(SIMULATED))
    return [
        {"name": f"{name}, {most} ranks", "value": seconds[most], "unit": "CPU s"}
        for name, seconds in found["planners"].items()
    ] + [
        {
            "name": f"rows to columns, {size} thread ranks, bytes over bound",
            "value": one["received"] / one["bound"],
            "target": 1.0,
            "at_most": True,
            "nbytes": one["received"],
            "bound_nbytes": one["bound"],
        }
        for size, one in found["threads"].items()
    ]


def write_docs(found: dict[str, Any], folder: Path) -> None:
    """The table and the plots of the page on scale."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| processor seconds for so many ranks |" + "".join(f" {n} |" for n in SIMULATED)]
    lines.append("|---|" + "---|" * len(SIMULATED))
    for name, seconds in found["planners"].items():
        lines.append(f"| {name} |" + "".join(f" {value:.2f} |" for value in seconds.values()))
    lines += ["", "| thread ranks | seconds | bytes received | lower bound | messages |"]
    lines.append("|---|---|---|---|---|")
    for size, one in found["threads"].items():
        counts = f"{one['received']:,} | {one['bound']:,} | {one['messages']}"
        lines.append(f"| {size} | {one['seconds']:.3f} | {counts} |")
    around = f"Measured on {found['cores']} cores at a load of {found['load']}"
    around += f"; the process held {found['peak_mib']:,} MiB at most."
    text = "\n".join([*lines, "", around, ""])
    (folder / "figures.inc").write_text(text, encoding="ascii")
    plot(found, folder)


def plot(found: dict[str, Any], folder: Path) -> None:
    """Two pictures: planning over ranks, and bytes of a transfer over ranks."""
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(6.4, 4), layout="constrained")
    for (name, seconds), mark in zip(found["planners"].items(), "os^D", strict=True):
        axes.plot([int(n) for n in seconds], list(seconds.values()), marker=mark, label=name)
    axes.set(xscale="log", yscale="log", xlabel="ranks (simulated)", ylabel="processor seconds")
    axes.set_xticks(SIMULATED, [f"{n:,}" for n in SIMULATED], minor=False)
    axes.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylim(top=1000)  # room for the legend
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="upper left")
    figure.savefig(folder / "planning.png", dpi=110)
    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    sizes = list(found["threads"])
    received = [one["received"] / 1e6 for one in found["threads"].values()]
    bound = [one["bound"] / 1e6 for one in found["threads"].values()]
    axes.bar(sizes, received, width=0.5, label="received by all ranks together")
    axes.plot(sizes, bound, "k_", markersize=60, label="lower bound")
    axes.set(xlabel="ranks (threads of one process)", ylabel="MB")
    axes.set_ylim(0, 1.45 * max(received))
    axes.legend(fontsize="small", loc="upper left", markerscale=0.3)
    figure.savefig(folder / "transfer.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description="planning and transfer over the number of ranks")
    parser.add_argument("--docs", type=Path, help="write the table and plots of the page here")
    parser.add_argument("--from", dest="recorded", type=Path, help="take recorded figures")
    given = parser.parse_args()
    found = json.loads(given.recorded.read_text()) if given.recorded else measured()
    print(json.dumps({"benchmark": "scale", **found, "rows": rows(found)}))
    if given.docs:
        write_docs(found, given.docs)


if __name__ == "__main__":
    main()
