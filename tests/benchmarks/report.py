"""Run the benchmarks and print one table of their ratios, targets, bytes, CPU time and memory.

    python tests/benchmarks/report.py [--from FILE] [--out FOLDER] [bench_x.py ...]

A benchmark prints JSON objects. Where one of them has a list `rows`, each entry is a row here:

    name       what was measured
    value      the figure, a ratio where no unit is said; left out where nothing was measured
    unit       "x" (a ratio) unless said otherwise
    target     what it shall reach; left out where nothing was promised
    at_most    true where less is better
    nbytes, bound_nbytes   what was moved or read, and the least that is possible
    cpu_s, peak_nbytes     processor seconds of all ranks, memory beside the tensors
    skipped    why there is no value: mostly a peer that is not installed

The targets stand in the benchmarks, beside the cases that they belong to. All that was printed
goes to `FOLDER/bench.json`, from which `--from` prints the table again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HOME = Path(__file__).resolve().parent
LIMIT_S = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure beside its target."""

    name: str
    value: float | None = None
    unit: str = "x"
    target: float | None = None
    at_most: bool = False
    nbytes: int | None = None
    bound_nbytes: int | None = None
    cpu_s: float | None = None
    peak_nbytes: int | None = None
    skipped: str = ""

    def __post_init__(self) -> None:
        if (self.value is None) != bool(self.skipped):
            raise ValueError(f"row {self.name!r} needs a value, or a reason why it has none")

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None where there is no target or no value."""
        if self.target is None or self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    def cells(self) -> list[str]:
        """The row as texts, in the order of the table's columns."""
        bound = "<=" if self.at_most else ">="
        verdict = {True: "yes", False: "[bold red]no[/]", None: ""}[self.met]
        return [
            self.name,
            f"[dim]{self.skipped}[/]" if self.value is None else quantity(self.value, self.unit),
            "" if self.target is None else f"{bound} {quantity(self.target, self.unit)}",
            verdict,
            *("" if count is None else f"{count:,}" for count in (self.nbytes, self.bound_nbytes)),
            "" if self.cpu_s is None else f"{self.cpu_s:.2f}",
            "" if self.peak_nbytes is None else f"{self.peak_nbytes / (1 << 20):.1f}",
        ]


def quantity(value: float, unit: str) -> str:
    return f"{value:.4g}" if unit == "x" else f"{value:.4g} {unit}"


def objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in what a benchmark printed, one after another."""
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0:
        found, at = decoder.raw_decode(text, at)
        yield found
        at = text.find("{", at)


def run(path: Path) -> dict[str, Any]:
    """Run one benchmark; what it printed, how long it took, and whether it failed."""
    begin = time.monotonic()
    command = [sys.executable, "-I", str(path)]
    around = {**os.environ, "PYTHONWARNINGS": "ignore"}  # the peers warn of themselves
    pipe = subprocess.PIPE
    try:
        done = subprocess.run(
            command, stdout=pipe, text=True, timeout=LIMIT_S, check=False, env=around
        )
        printed, failed = list(objects(done.stdout)), done.returncode != 0
    except subprocess.TimeoutExpired:
        printed, failed = [], True
    seconds = round(time.monotonic() - begin, 1)
    return {"file": path.name, "seconds": seconds, "failed": failed, "printed": printed}


def rows_of(record: dict[str, Any]) -> list[Row]:
    """The rows in what one benchmark printed; one that says so where it failed."""
    rows = [Row(**row) for found in record["printed"] for row in found.get("rows", ())]
    if record["failed"]:
        rows.append(Row(name=record["file"], skipped="the benchmark failed"))
    return rows


def table_of(records: Sequence[dict[str, Any]], surroundings: dict[str, Any]) -> Table:
    """The table of all rows, with a line under each benchmark."""
    loads = " ".join(f"{load:.2f}" for load in surroundings["load"])
    machine = f"{surroundings['cores']} cores, load {loads}, {surroundings['date']}"
    table = Table(title=f"Benchmarks ({machine})", title_justify="left")
    table.add_column("what", overflow="fold", ratio=1)
    for heading in ("figure", "target", "met", "bytes", "lower bound", "CPU s", "peak MiB"):
        table.add_column(heading, justify="right", overflow="fold")
    for record in records:
        for row in rows_of(record):
            table.add_row(*row.cells())
        table.add_section()
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the benchmarks and print one table.")
    parser.add_argument("--from", dest="recorded", type=Path, help="print recorded figures")
    parser.add_argument("--out", type=Path, default=Path("bench-report"), help="for bench.json")
    parser.add_argument("files", nargs="*", help="in this folder, or paths; all, unless given")
    given = parser.parse_args()
    if given.recorded:
        found = json.loads(given.recorded.read_text(encoding="utf-8"))
    else:
        found = {"cores": os.cpu_count(), "load": list(os.getloadavg())}
        found["date"] = time.strftime("%Y-%m-%d %H:%M")
        found["benchmarks"] = [
            run(HOME / name) for name in given.files or sorted(HOME.glob("bench_*.py"))
        ]
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "bench.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    records = found["benchmarks"]
    # A file or a pipe has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table_of(records, found))
    if missed := [row.name for record in records for row in rows_of(record) if row.met is False]:
        console.print(f"{len(missed)} below their target: {'; '.join(missed)}")
    if any(record["failed"] for record in records):
        raise SystemExit("a benchmark failed")


if __name__ == "__main__":
    main()
