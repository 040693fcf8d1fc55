"""The table of the benchmarks, from figures that were recorded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPORT = Path(__file__).parents[1] / "benchmarks" / "report.py"
ROWS = [
    {"name": "reached", "value": 9.71, "target": 5.0, "nbytes": 2048, "bound_nbytes": 1024},
    {"name": "missed", "value": 1.21, "target": 1.2, "at_most": True, "cpu_s": 0.5},
    {"name": "no promise", "value": 3.0, "unit": "MiB", "peak_nbytes": 1 << 20},
    {"name": "absent", "target": 2.0, "skipped": "torchft is not installed"},
]


def record(**other: object) -> dict[str, object]:
    return {"file": "bench_one.py", "seconds": 1.0, "failed": False, **other}


def report(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(REPORT), *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def printed_of(folder: Path, *records: dict[str, object]) -> subprocess.CompletedProcess[str]:
    path = folder / "bench.json"
    around = {"cores": 2, "load": [0.1, 0.2, 0.3], "date": "2026-01-02 03:04"}
    path.write_text(json.dumps({**around, "benchmarks": records}))
    return report("--from", str(path))


def test_a_figure_stands_beside_its_target(tmp_path: Path) -> None:
    done = printed_of(tmp_path, record(printed=[{"other": 1}, {"rows": ROWS}]))
    assert done.returncode == 0, done.stderr
    rows = [re.split(r" *\u2502 *", line)[1:-1] for line in done.stdout.splitlines()]
    assert [row for row in rows if row and row[0] in {"reached", "missed", "no promise"}] == [
        ["reached", "9.71", ">= 5", "yes", "2,048", "1,024", "", ""],
        ["missed", "1.21", "<= 1.2", "no", "", "", "0.50", ""],
        ["no promise", "3 MiB", "", "", "", "", "", "1.0"],
    ]
    assert "not installed" in done.stdout
    assert "1 below their target: missed" in done.stdout
    assert "2 cores, load 0.10 0.20 0.30, 2026-01-02 03:04" in done.stdout


def test_a_benchmark_that_failed_is_told(tmp_path: Path) -> None:
    done = printed_of(tmp_path, record(printed=[], failed=True))
    assert done.returncode == 1
    assert "bench_one.py" in done.stdout
    assert "a benchmark failed" in done.stderr


@pytest.mark.parametrize("row", [{"name": "nothing"}, {"name": "n", "value": 1.0, "skipped": "s"}])
def test_a_row_has_a_value_or_a_reason(row: dict[str, object], tmp_path: Path) -> None:
    done = printed_of(tmp_path, record(printed=[{"rows": [row]}]))
    assert "needs a value, or a reason" in done.stderr


def test_what_was_printed_is_kept(tmp_path: Path) -> None:
    bench = tmp_path / "bench_x.py"
    bench.write_text(
        "import json\nprint('note')\n"
        "print(json.dumps({'rows': [{'name': 'first', 'value': 1.0}]}, indent=1))\n"
        "print(json.dumps({'rows': [{'name': 'second', 'value': 2.0}]}))\nraise SystemExit(3)\n"
    )
    done = report("--out", str(tmp_path / "out"), str(bench))
    assert done.returncode == 1
    for name in ("first", "second", "the benchmark failed"):
        assert name in done.stdout
    kept = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [len(found["rows"]) for found in kept["benchmarks"][0]["printed"]] == [1, 1]
