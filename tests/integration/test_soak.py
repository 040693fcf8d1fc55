"""The soak in small: some rounds with one kill, and what counts as growth."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

SOAK = Path(__file__).parents[1] / "soak" / "soak.py"


def load_soak() -> Any:
    spec = spec_from_file_location("soak", SOAK)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["soak"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def samples(**by_name: list[int]) -> list[dict[str, int]]:
    steady = {"rss_kib": 400_000, "descriptors": 20, "threads": 9, "python_threads": 3}
    count = len(next(iter(by_name.values())))
    return [{**steady, **{k: v[i] for k, v in by_name.items()}} for i in range(count)]


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("rss_kib", [100, *range(400_000, 500_000, 1000)], {"rss_kib": (407_000, 490_000)}),
        ("rss_kib", [100_000] * 5 + [400_000] * 95, {}),
        ("descriptors", list(range(50)), {"descriptors": (9, 45)}),
        ("descriptors", [20, 24] * 25, {}),
        ("threads", [9] * 30 + [13] * 20, {"threads": (9, 13)}),
        ("threads", [9] * 30 + [40] + [9] * 20, {}),
    ],
)
def test_what_counts_as_growth(
    name: str, values: list[int], expected: dict[str, tuple[int, int]]
) -> None:
    found = load_soak().grown(samples(**{name: values}))
    assert found.keys() == expected.keys()
    for key, (first, last) in expected.items():
        assert found[key] == pytest.approx((first, last), rel=0.02)


def test_two_ranks_live_through_a_kill() -> None:
    command = [sys.executable, "-I", str(SOAK), "--ranks", "2", "--rounds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] >= 1
    assert found["groups"] == found["kills"] + 1
    assert sum(found["errors of those who lived"].values()) == found["kills"]
    assert found["slowest error, s"] < 20
