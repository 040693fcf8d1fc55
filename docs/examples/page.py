"""The report of a run: one page with tables and pictures, in a folder of its own."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import pictures
import torch
from chronicle import Chronicle
from view import in_full

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .claims td { text-align: left; }
.least { color: #777; } .yes { color: #17692c; } .no { color: #c00; font-weight: bold; }
figure { margin: 1.2rem 0; } figcaption, p.note { color: #555; }
img { max-width: 100%; } img[src="traffic.png"] { width: 34rem; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; font-size: 0.8rem; }
"""
HEAD = ("", "read", "written", "received", "least", "of least", "seconds", "floor", "exact")


def write(chronicle: Chronicle, folder: Path) -> Path:
    """Write `index.html` and its pictures into the folder; the path of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = pictures.draw(chronicle, folder)
    claims = list(chronicle.ledger.verdicts())
    held = sum(holds for *_, holds in claims)
    parts = [
        "<h1>shardworks: the demo</h1>",
        f'<p class="{mark(held == len(claims))}">{held} of {len(claims)} claims hold.</p>',
        f'<p class="note">{escape(circumstances(chronicle))}</p>',
        "<h2>The run</h2>",
        *(figure(name, text) for name, text in drawn[:1]),
        "<h2>Bytes and seconds</h2>",
        figures_table(chronicle),
        f'<p class="note">{escape(EXPLANATION)}</p>',
        "<h2>Who does what</h2>",
        *(figure(name, text) for name, text in drawn[1:]),
        "<h2>What was checked</h2>",
        claims_table(claims),
        *(f"<pre>{escape(note)}</pre>" for note in chronicle.notes),
    ]
    head = f'<meta charset="utf-8"><title>shardworks: the demo</title><style>{STYLE}</style>'
    page = folder / "index.html"
    page.write_text(f'<!doctype html><html lang="en">{head}{"".join(parts)}</html>\n')
    return page


EXPLANATION = (
    "Bytes of all ranks together; 'least' is what has to be read, written and received at least. "
    "Seconds are those of the slowest rank. 'floor' is what the same bytes take as one plain read, "
    "write or copy, by all ranks at once, as measured at the start; for OwnerMuon it is the time "
    "of torch.optim.Muon in one process, divided by the cores. 'exact': all that was "
    "claimed of the act holds, bit for bit."
)


def circumstances(chronicle: Chronicle) -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"{chronicle.size} ranks on {cores} cores, {chronicle.elapsed():.0f} s, load average "
        f"{os.getloadavg()[0]:.1f}; torch {torch.__version__}, Python {platform.python_version()}."
    )


def figure(name: str, text: str) -> str:
    caption = escape(text)
    return f'<figure><img src="{name}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'


def figures_table(chronicle: Chronicle) -> str:
    lines = [row_of("th", HEAD)]
    for row in chronicle.ledger.rows():
        cells = [escape(row.name), *in_full(row)]
        exact = f'<td class="{mark(row.exact)}">{"yes" if row.exact else "NO"}</td>'
        lines.append(row_of("td", cells).replace("</tr>", f"{exact}</tr>"))
    return f"<table>{''.join(lines)}</table>"


def row_of(tag: str, cells: Sequence[str]) -> str:
    least = {4, 7}
    inner = (
        f'<{tag} class="least">{cell}</{tag}>' if at in least else f"<{tag}>{cell}</{tag}>"
        for at, cell in enumerate(cells)
    )
    return f"<tr>{''.join(inner)}</tr>"


def claims_table(claims: Iterable[tuple[str, str, bool]]) -> str:
    lines = (
        f'<tr><td>{act}</td><td>{escape(text)}</td><td class="{mark(holds)}">'
        f"{'ok' if holds else 'FAIL'}</td></tr>"
        for act, text, holds in claims
    )
    return f'<table class="claims">{"".join(lines)}</table>'


def mark(holds: bool) -> str:
    return "yes" if holds else "no"
