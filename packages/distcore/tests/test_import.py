"""Importing the pure half: no torch, no numpy, only the standard library, and quickly."""

from __future__ import annotations

import json
import subprocess
import sys

LIMIT_S = 0.3
TRIES = 5

FRESH = """
import json, sys, time
before = set(sys.modules)
start = time.perf_counter()
import distcore.v1
seconds = time.perf_counter() - start
loaded = sorted({name.partition(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"seconds": seconds, "loaded": loaded}))
"""


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    return done.stdout


def test_the_pure_half_loads_only_the_standard_library() -> None:
    loaded = set(json.loads(fresh(FRESH))["loaded"])
    assert "distcore" in loaded
    assert loaded - {"distcore"} <= sys.stdlib_module_names


def test_the_pure_half_is_imported_quickly() -> None:
    # The best of a few tries: other tests may share the machine.
    seconds = LIMIT_S
    for _ in range(TRIES):
        seconds = min(seconds, json.loads(fresh(FRESH))["seconds"])
        if seconds < LIMIT_S:
            break
    assert seconds < LIMIT_S


def test_layouts_and_plans_are_made_without_torch() -> None:
    used = """
import sys
from distcore.v1 import Layout, Piece, Plan, Region, Transfer
made = Layout.from_mesh(shape=(7,), dtype="int8", mesh=[[0, 1], [2, 3]], placements=["R", "S(0)"])
Layout(shape=(7,), dtype="int8", pieces={rank: made.pieces(rank) for rank in made.ranks}) == made
plan = Plan([Transfer("w", 0, 1, made.pieces(0)[0].region)])
Plan.from_json(plan.to_json()).inverse().digest
print("torch" in sys.modules, "numpy" in sys.modules)
"""
    assert fresh(used).split() == ["False", "False"]
