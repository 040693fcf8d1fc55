"""Pictures of a run: the load of each rank, who sent what to whom, and when what was done."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from chronicle import ACTS, Chronicle, Span
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = {
    "start": "#d0d0d0",
    "load": "#4477aa",
    "save": "#66ccee",
    "train": "#228833",
    "rollout": "#aa3377",
    "spread": "#ccbb44",
    "heal": "#ee7733",
    "compare": "#a6761d",
    "shrink": "#332288",
}
RED = "#cc0000"


def draw(chronicle: Chronicle, folder: Path) -> list[tuple[str, str]]:
    """Draw what there are figures for into PNG files; their names, and what they show."""
    found = [(timeline(chronicle), "timeline.png", TIMELINE)]
    if "load" in chronicle.pictures:
        found.append((load(chronicle.pictures["load"]), "load.png", LOAD))
    if "traffic" in chronicle.pictures:
        matrix = next(iter(chronicle.pictures["traffic"].values()))["matrix"]
        row = next(row for row in chronicle.ledger.rows() if row.act == "spread")
        found.append((traffic(matrix, row.received, row.least), "traffic.png", TRAFFIC))
    for figure, name, _ in found:
        figure.savefig(folder / name, dpi=130)
    return [(name, text) for _, name, text in found]


TIMELINE = (
    "What each rank did, and when. A rank that is killed stops in the middle of a step; the others "
    "notice, wait for the process that takes its place, and offer it their state. "
    "The step that was cut short is made again."
)
LOAD = (
    "Matrices have one owner each, who orthogonalizes them for all: the work of each owner, and "
    "the bytes that reach each rank in a step, while ranks are sharded. No plan can have a highest "
    "bar below the dashed line."
)
TRAFFIC = (
    "From two replicas of two shards to replicas of the whole: each rank fetches the half that it "
    "lacks from the other rank of its replica, and keeps the half that it has (grey)."
)


def timeline(chronicle: Chronicle) -> Figure:
    figure = Figure(figsize=(11, 1.9 + 0.6 * chronicle.size), layout="constrained")
    axes = figure.subplots()
    for span in chronicle.spans:
        if span.act in COLOURS:
            bar(axes, span)
    end = max((span.stop for span in chronicle.spans), default=1.0)
    axes.set_title(f"What {chronicle.size} ranks did, and when", pad=12)
    for rank, at in chronicle.kills:
        axes.plot([at], [rank], marker="X", markersize=15, color=RED, mec="white", zorder=5)
        moment(axes, at, f"SIGKILL to rank {rank} at {at:.1f} s ", color=RED, align="right")
        spans = (span for span in chronicle.spans if span.rank == rank and span.start > at)
        again = [span.start for span in spans if span.act == "train"]
        if again:
            text = f" healed, trains on at {min(again):.1f} s"
            moment(axes, min(again), text, color=COLOURS["train"], align="left")
    axes.set_yticks(range(chronicle.size), [f"rank {rank}" for rank in range(chronicle.size)])
    axes.set_ylim(chronicle.size - 0.5, -0.9)
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds since the start")
    axes.spines[["top", "right"]].set_visible(False)
    there = [act for act in chronicle.acts() if act in COLOURS]
    patches = [Patch(color=COLOURS[act], label=f"{act}: {ACTS[act]}") for act in there]
    patches.append(Patch(facecolor="white", edgecolor="#888888", hatch="////", label="waits"))
    figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def bar(axes: Axes, span: Span) -> None:
    colour = COLOURS[span.act]
    axes.barh(
        span.rank,
        span.stop - span.start,
        left=span.start,
        height=0.62,
        color="white" if span.is_waiting else colour,
        hatch="////" if span.is_waiting else None,
        edgecolor=colour if span.is_waiting else "white",
        linewidth=0.4,
    )


def moment(
    axes: Axes, at: float, text: str, *, color: str, align: Literal["left", "right"]
) -> None:
    """A line through all ranks, and what happened then."""
    axes.axvline(at, color=color, linewidth=1, linestyle="--", zorder=4)
    axes.text(at, -0.62, text, ha=align, va="center", color=color, clip_on=False)


def load(figures: dict[int, dict[str, Any]]) -> Figure:
    """Bars of work and of bytes, each with the even share."""
    ranks = sorted(figures)
    steps = figures[ranks[0]]["steps"]
    work = [figures[rank]["flops"] / steps / 1e9 for rank in ranks]
    megabytes = [figures[rank]["received"] / steps / 1e6 for rank in ranks]
    least = figures[ranks[0]]["least"] / steps / len(ranks) / 1e6
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    bars(left, ranks, work, sum(work) / len(ranks))
    left.set_title("Work of each owner, per step")
    left.set_ylabel("Newton-Schulz (GFLOP)")
    bars(right, ranks, megabytes, least)
    right.set_title("Received by each rank, per step")
    right.set_ylabel("MB")
    return figure


def bars(axes: Axes, ranks: Sequence[int], heights: Sequence[float], bound: float) -> None:
    found = axes.bar([str(rank) for rank in ranks], heights, width=0.6, color="#4477aa")
    axes.bar_label(found, fmt="%.2f", padding=2)
    axes.axhline(bound, color="black", linestyle="--", label=f"even share, {bound:.2f}")
    axes.set_xlabel("rank")
    axes.set_ylim(0, max(*heights, bound) * 1.3 or 1.0)
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def traffic(matrix: list[list[int]], moved: int, least: int) -> Figure:
    """Who sent how much to whom; what stayed on its rank is grey."""
    size = len(matrix)
    between = [
        [n / 1e6 if row != column else float("nan") for column, n in enumerate(line)]
        for row, line in enumerate(matrix)
    ]
    figure = Figure(figsize=(6.4, 5.4), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("#e4e4e4")
    sent = (n / 1e6 for i, line in enumerate(matrix) for j, n in enumerate(line) if i != j)
    top = max(sent, default=0.0)
    image = axes.imshow(between, cmap="Blues", vmin=0, vmax=top * 1.25 or 1.0)
    figure.colorbar(image, label="MB", shrink=0.85)
    for row, line in enumerate(matrix):
        for column, n in enumerate(line):
            text = f"{n / 1e6:.1f}" if n else "0"
            stays = row == column
            axes.text(
                column,
                row,
                f"{text}\nstays" if stays else text,
                ha="center",
                va="center",
                color="#666666" if stays or not n else "white",
            )
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title(f"{moved / 1e6:.1f} MB between ranks, at least {least / 1e6:.1f} MB")
    return figure
