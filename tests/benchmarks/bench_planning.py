"""What it takes to plan between many ranks, and to have the plan again from a cache, as JSON.

One process, no ranks: a tensor from 1 024 ranks to 1 024, and a trillion parameters in about
100 000 tensors from 2 048 ranks to 1 024. Seconds are of the processor, medians of several runs
but for the plan of the whole model, which is made once. The layouts that the cache is asked with
are the same objects, or equal ones that were made anew.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Mapping

from reshard import Layout, PlanCache, plan_reshard
from reshard.models import model_of
from reshard.strategy import Strategy

RUNS = 5
MODEL, SOURCE, DESTINATION = "moe-1t", "pp=8,ep=32,fsdp=8", "ep=128,tp=8@2048"
Sides = tuple[Mapping[str, Layout], Mapping[str, Layout]]


def cpu_s(act: Callable[[], object]) -> float:
    """The processor seconds of this process for one call."""
    begin = time.process_time()
    act()
    return time.process_time() - begin


def median_s(act: Callable[[], object]) -> float:
    """The median of several calls."""
    return statistics.median(cpu_s(act) for _ in range(RUNS))


def model_sides() -> Sides:
    """The layouts of the model, made anew."""
    model = model_of(MODEL)
    return Strategy.parse(SOURCE).layouts(model), Strategy.parse(DESTINATION).layouts(model)


def one_tensor() -> Sides:
    """One tensor that no number of ranks divides."""
    src, dst = (
        Layout.from_mesh(
            shape=(1_049_353,),
            dtype="bfloat16",
            mesh=list(range(first, first + 1024)),
            placements=["S(0)"],
        )
        for first in (0, 1024)
    )
    return {"w": src}, {"w": dst}


def main() -> None:
    """Run it and print what came out."""
    single = one_tensor()
    single_s = median_s(lambda: plan_reshard(*single))
    sides, cache = model_sides(), PlanCache()
    plan_s = cpu_s(lambda: plan_reshard(*sides, cache=cache))
    same_s = median_s(lambda: plan_reshard(*sides, cache=cache))
    again = model_sides()
    anew_s = median_s(lambda: plan_reshard(*again, cache=cache))
    if (cache.hits, cache.misses) != (2 * RUNS, 1):
        raise RuntimeError(f"{cache.hits} hits and {cache.misses} misses")
    tensors = len(sides[0])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rows: list[dict[str, object]] = [
        {"name": "plan 1 tensor, 1 024 to 1 024 ranks", "value": 1e3 * single_s, "unit": "ms"},
        {"name": f"plan {MODEL}, 2 048 to 1 024 ranks", "value": plan_s, "unit": "s"},
        {"name": "from the cache, a tensor", "value": 1e6 * same_s / tensors, "unit": "us"},
        {"name": "the same, layouts made anew", "value": 1e6 * anew_s / tensors, "unit": "us"},
    ]
    for row, target in zip(rows, (50.0, 60.0, 5.0, 5.0), strict=True):
        row |= {"target": target, "at_most": True}
    rows[1]["peak_nbytes"] = peak
    print(json.dumps({"tensors": tensors, "cpus": os.cpu_count(), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
