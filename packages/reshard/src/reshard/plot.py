"""Plot: who sends how much to whom, as a picture. Needs matplotlib (the extra `cli`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distcore.v1 import itemsize
from reshard.stats import sizes_of

if TYPE_CHECKING:
    from reshard.plan import ReshardPlan


def traffic_of(plan: ReshardPlan) -> list[list[int]]:
    """The bytes from each rank (row) to each rank (column), both in the order of `plan.ranks`.

    All stages together; what stays on a rank is on the diagonal.
    """
    place = {rank: at for at, rank in enumerate(plan.ranks)}
    table = [[0] * len(place) for _ in place]
    sizes = {key: itemsize(layout.dtype) for key, layout in plan.src.items()}
    for stage in plan.stages:
        columns = (column.tolist() for column in sizes_of(stage, sizes))
        for src, dst, nbytes in zip(*columns, strict=True):
            table[place[src]][place[dst]] += nbytes
    return table


def plot_traffic(plan: ReshardPlan, path: str) -> None:
    """Draw the traffic matrix into a picture file at `path`; its ending says of which kind.

    ImportError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib; run: pip install 'reshard[cli]'") from error
    table = traffic_of(plan)
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    megabytes = [[nbytes / 1e6 for nbytes in row] for row in table]
    image = axes.imshow(megabytes, cmap="viridis", interpolation="nearest")
    figure.colorbar(image, label="MB")
    stats, bounds = plan.stats(), plan.bounds()
    axes.set_title(
        f"{stats.wire_bytes / 1e6:,.1f} MB between ranks (bound {bounds.wire_bytes / 1e6:,.1f})\n"
        f"busiest sender {stats.max_egress_bytes / 1e6:,.1f} MB "
        f"(bound {bounds.max_egress_bytes / 1e6:,.1f})"
    )
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    if len(table) <= 32:
        axes.set_xticks(range(len(table)), [str(rank) for rank in plan.ranks])
        axes.set_yticks(range(len(table)), [str(rank) for rank in plan.ranks])
    figure.savefig(path)
