"""Time `balance` beside the plain loops that it replaces; print the figures as JSON.

    python tests/benchmarks/bench_balance.py [--items 100000] [--ranks 1024] [--repeats 3]

Two loops stand for what is common elsewhere: one looks at every candidate of the item, the other
goes through all ranks and asks of each whether it is a candidate. The second is timed on a part
of the items and scaled up, since each of its steps costs the same. Product and loops run in turn.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from distcore.v1 import Assignment, balance

PART = 50
SECONDS_AT_MOST = 2.0
OVER_CANDIDATES = "times faster than the loop over candidates"
RATIOS = "makespan / lower bound"


@dataclass(frozen=True)
class Case:
    """Items with their costs and candidates."""

    name: str
    costs: list[int]
    candidates: list[Sequence[int]]
    num_ranks: int


def make_cases(num_items: int, num_ranks: int) -> list[Case]:
    """Random costs in few large sets, in sets of neighbours, and for any rank."""
    rng = random.Random(0)
    costs = [rng.randint(1, 10**6) for _ in range(num_items)]
    low, high = max(1, num_ranks // 16), max(1, num_ranks // 2)
    large = [rng.sample(range(num_ranks), rng.randint(low, high)) for _ in range(64)]
    width = min(16, num_ranks)
    near = [range(first, first + width) for first in range(num_ranks - width + 1)]
    sets: dict[str, list[Sequence[int]]] = {
        "64 overlapping sets": [sorted(ranks) for ranks in large],
        "sets of neighbours": [*near],
        "any rank": [range(num_ranks)],
    }
    return [
        Case(name, costs, [rng.choice(found) for _ in costs], num_ranks)
        for name, found in sets.items()
    ]


def over_candidates(case: Case, count: int) -> list[int]:
    """The plain loop over the candidates of each item."""
    loads, owners = [0] * case.num_ranks, []
    for cost, ranks in zip(case.costs[:count], case.candidates, strict=False):
        rank = min(ranks, key=loads.__getitem__)
        loads[rank] += cost
        owners.append(rank)
    return owners


def over_ranks(case: Case, count: int) -> list[int]:
    """The plain loop over all ranks, with a look into the candidates for each of them."""
    loads, owners = [(0, rank) for rank in range(case.num_ranks)], []
    for cost, ranks in zip(case.costs[:count], case.candidates, strict=False):
        load, rank = min(entry for entry in loads if entry[1] in ranks)
        loads[rank] = (load + cost, rank)
        owners.append(rank)
    return owners


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Times of the product and of the loops, in turn, and how good the results are."""
    count = len(case.costs)
    part = max(1, count // PART)
    found: dict[str, Assignment[int]] = {}

    def run(name: str, **more: object) -> None:
        found[name] = balance(range(count), case.costs, case.candidates, case.num_ranks, **more)  # type: ignore[arg-type]

    ways: dict[str, Callable[[], object]] = {
        "greedy": lambda: run("greedy"),
        "greedy divided": lambda: run("greedy divided", splittable=True),
        "optimal": lambda: run("optimal", policy="optimal"),
        "optimal divided": lambda: run("optimal divided", policy="optimal", splittable=True),
        "loop over candidates": lambda: over_candidates(case, count),
        "loop over ranks, part": lambda: over_ranks(case, part),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, function in ways.items():
            times[name].append(seconds(function))
    typical = {name: median(taken) for name, taken in times.items()}
    scaled = typical.pop("loop over ranks, part") * count / part
    if list(found["greedy"].owner.values()) != over_candidates(case, count):
        raise SystemExit(f"{case.name}: greedy differs from the plain loop")
    return {
        "case": case.name,
        "seconds": {name: round(taken, 4) for name, taken in typical.items()},
        "loop over ranks, seconds scaled up": round(scaled, 1),
        OVER_CANDIDATES: round(typical["loop over candidates"] / typical["greedy"], 1),
        "times faster than the loop over ranks": round(scaled / typical["greedy"], 1),
        RATIOS: {name: round(a.ratio, 6) for name, a in found.items()},
        "shares of divided items": {
            name: sum(len(shares) for shares in a.shares.values() if len(shares) > 1)
            for name, a in found.items()
            if "divided" in name
        },
    }


def rows(case: dict[str, Any]) -> list[dict[str, object]]:
    """The figures of one case beside their targets; those are for the default size."""
    name = f"balance, {case['case']}"
    seconds = {"value": case["seconds"]["greedy"], "unit": "s"}
    return [
        {"name": name, **seconds, "target": SECONDS_AT_MOST, "at_most": True},
        {"name": f"{name}, over the loop", "value": case[OVER_CANDIDATES]},
        {"name": f"{name}, makespan over bound", "value": case[RATIOS]["optimal"]},
    ]


def main() -> None:
    """Measure every case and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    cases = [measure(case, given.repeats) for case in make_cases(given.items, given.ranks)]
    found = {"items": given.items, "ranks": given.ranks, "cases": cases}
    print(json.dumps({**found, "rows": [row for case in cases for row in rows(case)]}, indent=2))


if __name__ == "__main__":
    main()
