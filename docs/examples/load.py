"""Ranks load real weights together: each byte read once, and exchanged."""

from __future__ import annotations

import torch
import torch.distributed as dist
from bert import Bert
from figures import Act, Moved, Verdict, shown
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from source import Source, differing
from text import SENTENCES, closest_pairs
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import ckptx
from ckptx import LoadReport

TOLERANCE = 1e-5


def load(model: Bert, source: Source) -> LoadReport:
    """Fill the model: one call, on every rank. A nested dict stands for a prefix of the names."""
    weights = model.state_dict()
    if not source.prefix:
        return ckptx.load(weights, source.directory)
    nested = {source.prefix.removesuffix("."): weights}
    return ckptx.load(nested, source.directory, strict=False)


def act(model: Bert, source: Source, mesh: DeviceMesh, console: Console) -> Act:
    """Fill the model, and compare it with the file as one process loads it."""
    report = load(model, source)
    whole = source.whole()
    wrong = differing(model, whole)
    embeddings = source.embed(model)
    distance = (embeddings - source.embed(source.alone())).abs().max().item()

    rows = gathered(report, wrong, distance)
    copies, shards = mesh.shape
    size = decimal(report.lower_bound_read)
    title = f"Bytes of {len(whole)} tensors, {size}, into {copies} x {shards} (replicas x shards)"
    console.print(traffic_table(rows, report, title), "")
    print_pairs(console, embeddings)
    return Act("load", [moved("load", report)], verdicts(rows, report))


def moved(name: str, report: LoadReport) -> Moved:
    """The figures of a load. What all must read together counts on the first rank."""
    least = report.lower_bound_received
    if dist.get_rank() == 0:
        least += report.lower_bound_read
    return Moved(
        name,
        read=report.bytes_read,
        received=report.bytes_received,
        least=least,
        seconds=report.seconds,
    )


def gathered(report: LoadReport, wrong: int, distance: float) -> Tensor:
    """One row of figures per rank, on every rank: no object is pickled."""
    row = torch.tensor(
        [
            report.bytes_read,
            report.bytes_sent,
            report.bytes_received,
            report.lower_bound_received,
            report.seconds,
            wrong,
            distance,
        ],
        dtype=torch.float64,
    )
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def traffic_table(rows: Tensor, report: LoadReport, title: str) -> Table:
    """Bytes read, sent and received per rank, each beside the least possible.

    What a rank must read or send depends on the others, so there its least is an even share.
    """
    # Without lines, so that eight columns of bytes fit into 80 characters.
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in ("rank", "read", "least", "sent", "least", "received", "least", "seconds"):
        table.add_column(name, justify="right", style="dim" if name == "least" else "")
    received = rows[:, 3].sum().item()
    for rank, (read, sent, got, least, seconds, *_) in enumerate(rows.tolist()):
        figures = [read, report.lower_bound_read / len(rows), sent, received / len(rows)]
        table.add_row(str(rank), *map(shown, [*figures, got, least]), f"{seconds:.3f}")
    read, sent, got, *_ = rows.sum(0).tolist()
    figures = [read, report.lower_bound_read, sent, received, got, received]
    table.add_row("all", *map(shown, figures), f"{rows[:, 4].max():.3f}", style="bold")
    return table


def verdicts(rows: Tensor, report: LoadReport) -> list[Verdict]:
    """What must hold, and whether it does."""
    read = rows[:, 0].sum().item()
    wrong, distance = int(rows[:, 5].max().item()), rows[:, 6].max().item()
    exact = bool((rows[:, 2] == rows[:, 3]).all())
    return [
        (
            f"bytes read are those needed, each once: {read / report.lower_bound_read:.4f} times",
            read <= 1.01 * report.lower_bound_read,
        ),
        ("bytes received are the lower bound exactly, on every rank", exact),
        (f"weights bit-equal to one process: {wrong} tensors differ", wrong == 0),
        (f"embeddings equal to one process: {distance:.1e} apart at most", distance < TOLERANCE),
    ]


def print_pairs(console: Console, embeddings: Tensor) -> None:
    table = Table(title="Sentences most alike", title_justify="left", show_header=False, box=None)
    for cosine, first, second in closest_pairs(embeddings, 4):
        table.add_row(f"{cosine:.3f}", SENTENCES[first])
        table.add_row("", SENTENCES[second])
    console.print(table, "")
