"""What is seen of a run: live tables on a terminal, lines elsewhere; and a table at the end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Self

from chronicle import ACTS, Chronicle
from figures import Row, shown
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tell import Event


class View(AbstractContextManager["View"]):
    """Shows a chronicle as it grows."""

    def __init__(self, chronicle: Chronicle, console: Console) -> None:
        self._chronicle = chronicle
        self._console = console
        self._live = (
            Live(console=console, get_renderable=self._tables, refresh_per_second=4, transient=True)
            if console.is_terminal
            else None
        )
        self._acts: set[str] = set()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, event: Event) -> None:
        """Say what is worth a line of its own."""
        rank, fields = event.rank, event.fields
        if event.kind == "note":
            self._line(fields["text"])
        elif event.kind == "killed":
            self._line(
                f"rank {rank}: SIGKILL, process {fields['pid']}; another one takes its place"
            )
        elif event.kind == "doing" and fields["act"] in ACTS.keys() - self._acts:
            self._acts.add(fields["act"])
            if self._live is None:
                self._line(f"{fields['act']}: {ACTS[fields['act']]}")

    def _line(self, text: str) -> None:
        at = f"[{self._chronicle.elapsed():5.1f} s] " if "\n" not in text else ""
        self._console.print(at + text, markup=False, highlight=False, soft_wrap=True)

    def _tables(self) -> Group:
        chronicle = self._chronicle
        nbytes = chronicle.ledger.nbytes
        title = Text(f"shardworks   {chronicle.elapsed():.0f} s   {nbytes / 1e6:,.0f} MB moved")
        return Group(title, "", self._acts_table(), "", self._ranks_table())

    def _acts_table(self) -> Table:
        chronicle = self._chronicle
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        begun = chronicle.acts()
        for act, text in ACTS.items():
            if act not in begun:
                table.add_row("", act, text, "", style="dim")
                continue
            running = chronicle.is_running(act)
            mark = "[yellow]now[/]" if running else "[green]done[/]"
            table.add_row(mark, f"[bold]{act}[/]", text, f"{chronicle.seconds(act):.1f} s")
        return table

    def _ranks_table(self) -> Table:
        chronicle = self._chronicle
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("rank", "act", "does"):
            table.add_column(name)
        table.add_column("received so far", justify="right")
        for rank, span in chronicle.now.items():
            done = chronicle.ledger.received(rank) + chronicle.progress.get(rank, (0, 0))[0]
            killed = any(rank == lost for lost, _ in chronicle.kills)
            name = f"[red]{rank}[/] (new)" if killed else str(rank)
            table.add_row(name, span.act, span.what, f"{done / 1e6:,.1f} MB")
        return table


def summary(rows: list[Row]) -> Table:
    """One row per step: bytes of all ranks together, and the time of the slowest."""
    title = "MB of all ranks, seconds of the slowest, and the least possible"
    # Without lines, so that it fits into 80 characters.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    table.add_column("")
    for name in ("read", "written", "received", "least", "sec", "floor", "exact"):
        style = "dim" if name in ("least", "floor") else ""
        table.add_column(name, justify="right", style=style, no_wrap=True)
    for row in rows:
        figures = [megabytes(n) for n in (row.read, row.written, row.received, row.least)]
        floor = "" if row.floor is None else f"{row.floor:.3f}"
        exact = "[green]yes[/]" if row.exact else "[red]NO[/]"
        table.add_row(row.name, *figures, f"{row.seconds:.3f}", floor, exact)
    return table


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f}" if nbytes else "-"


def in_full(row: Row) -> list[str]:
    """The figures of a row in bytes, and how far they are from what is least."""
    ratio = f"{row.nbytes / row.least:.4f}" if row.least else ""
    figures = [shown(n) for n in (row.read, row.written, row.received, row.least)]
    floor = "" if row.floor is None else f"{row.floor:.3f}"
    return [*figures, ratio, f"{row.seconds:.3f}", floor]
