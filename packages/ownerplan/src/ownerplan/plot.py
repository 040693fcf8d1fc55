"""Plot: the load and the bytes of each rank, as a picture. Needs matplotlib (the extra `cli`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ownerplan.report import OwnerPlan


def plot_loads(plan: OwnerPlan, path: str) -> None:
    """Draw the plan into a picture file at `path`; its ending says of which kind.

    ImportError where matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("a plot needs matplotlib; run: pip install 'ownerplan[cli]'") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    ranks = range(plan.num_ranks)
    above.bar(ranks, plan.loads, width=0.9)
    above.axhline(plan.lower_bound, color="black", linestyle="--", label="lower bound")
    above.set_title(
        f"{sum(map(len, plan.owners))} matrices on {plan.num_ranks} ranks, policy {plan.policy}: "
        f"{plan.ratio:.3f} of the bound"
    )
    above.set_ylabel("load (cost)")
    above.legend(loc="lower right")
    below.bar(ranks, [nbytes / 1e6 for nbytes in plan.bytes_per_rank], width=0.9)
    below.axhline(plan.bytes_lower_bound / plan.num_ranks / 1e6, color="black", linestyle="--")
    below.set_ylabel("received per step (MB)")
    below.set_xlabel("rank")
    figure.savefig(path)
