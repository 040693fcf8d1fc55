"""Plot: what each rank reads and receives, as a picture. Needs matplotlib (the extra `cli`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptx.plan import LoadPlan


def plot_reads(plan: LoadPlan, path: str) -> None:
    """Draw a load plan into a picture file at `path`; its ending says of which kind.

    ImportError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib; run: pip install 'ckptx[cli]'") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    ranks = sorted(plan.needed)
    read = [plan.read_nbytes(rank) for rank in ranks]
    above.bar(ranks, [nbytes / 1e6 for nbytes in read], width=0.9)
    above.axhline(
        plan.lower_bound_slowest / 1e6, color="black", linestyle="--", label="lower bound"
    )
    above.set_title(f"{sum(read) / 1e6:.1f} MB read once by {len(ranks)} ranks")
    above.set_ylabel("read (MB)")
    above.legend(loc="lower right")
    below.bar(ranks, [plan.lower_bound_received[rank] / 1e6 for rank in ranks], width=0.9)
    below.set_ylabel("received (MB)")
    below.set_xlabel("rank")
    figure.savefig(path)
