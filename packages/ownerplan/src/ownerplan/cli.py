"""Command line: `ownerplan plan` shows how well the work of a model can be dealt to ranks."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

from distcore.v1 import PlanError, itemsize
from ownerplan.cost import flop_cost_fn, ns_cost_fn
from ownerplan.layout import GlobalLayout
from ownerplan.plan import plan_owners
from ownerplan.report import OwnerPlan
from ownerplan.shapes import Shapes, group_by_layer, read_shapes
from ownerplan.work import Work, work_in_chunks, works_in_buffer

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    text = "the command needs: pip install 'ownerplan[cli]'"
    raise ModuleNotFoundError(text, name=error.name) from error

app = typer.Typer(help="Who runs the matrix step of which parameter.", no_args_is_help=True)

SHOWN_RANKS = 64
BAR = 16
NS_STEPS = 5
NO_MATRICES = r"embed|wte|wpe|lm_head"


class PolicyName(StrEnum):
    """How owners are chosen."""

    JOINT = "joint"
    GREEDY = "greedy"
    OPTIMAL = "optimal"


class CostName(StrEnum):
    """What a matrix step costs."""

    FLOPS = "flops"
    DOCUMENT = "document"


class LayoutName(StrEnum):
    """How the tensors lie on the ranks."""

    CHUNKS = "chunks"
    BUFFER = "buffer"


class OwnersName(StrEnum):
    """Who may own a matrix."""

    ANY = "any"
    HOLDERS = "holders"


@app.callback()
def main() -> None:
    """Who runs the matrix step of which parameter."""


@app.command()
def plan(
    *,
    shapes: Annotated[
        Path, typer.Option(help="safetensors file, its directory or index, or JSON name -> dims")
    ],
    ranks: Annotated[int, typer.Option(min=1, help="number of ranks")],
    policy: Annotated[PolicyName, typer.Option(help="joint plans all layers at once")] = (
        PolicyName.JOINT
    ),
    cost: Annotated[CostName, typer.Option(help="operations, or the original estimate")] = (
        CostName.FLOPS
    ),
    layout: Annotated[
        LayoutName, typer.Option(help="rows in equal chunks, or one flat buffer per layer")
    ] = LayoutName.CHUNKS,
    owners: Annotated[OwnersName, typer.Option(help="who may own a matrix")] = OwnersName.ANY,
    exclude: Annotated[str, typer.Option(help="names that take no part (regex)")] = NO_MATRICES,
    dtype: Annotated[str, typer.Option(help="dtype of what travels")] = "bfloat16",
    tflops: Annotated[float, typer.Option(min=1e-9, help="speed of one rank, TFLOP/s")] = 600.0,
    bandwidth: Annotated[float, typer.Option(min=1e-9, help="of one rank, GB/s")] = 50.0,
    plot: Annotated[Path | None, typer.Option(help="picture file to draw")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> None:
    """Show load and bytes per rank beside the bounds, and compute beside communication."""
    try:
        itemsize(dtype)
        groups = _groups(read_shapes(shapes), ranks, layout, re.compile(exclude))
        found = plan_owners(
            groups,
            ranks,
            cost_fn=flop_cost_fn(NS_STEPS) if cost is CostName.FLOPS else ns_cost_fn(NS_STEPS),
            candidates="holders" if owners is OwnersName.HOLDERS else None,
            policy=policy.value,
            dtype=dtype,
        )
    except (PlanError, OSError, re.error) as error:
        raise typer.BadParameter(str(error)) from error
    if plot is not None:
        found.plot(str(plot))
    if as_json:
        typer.echo(found.to_json())
        return
    work = plan_owners(groups, ranks, cost_fn=flop_cost_fn(NS_STEPS), candidates=_fixed(found))
    Console().print(_table(found))
    for line in _summary(found, work.makespan / tflops / 1e12, bandwidth):
        typer.echo(line)


def _groups(
    shapes: Shapes, ranks: int, layout: LayoutName, excluded: re.Pattern[str]
) -> list[list[Work]]:
    """The matrices of each layer, as they lie on the ranks."""
    groups = []
    for layer in group_by_layer(shapes):
        names = list(layer)
        taken = [
            at
            for at, (name, shape) in enumerate(layer.items())
            if len(shape) >= 2 and 0 not in shape and not excluded.search(name)
        ]
        if layout is LayoutName.BUFFER and taken:
            placed = [at for at, name in enumerate(names) if layer[name] and 0 not in layer[name]]
            buffer = GlobalLayout.build([layer[names[at]] for at in placed], ranks)
            mesh = SimpleNamespace(mesh=list(range(ranks)))
            works = works_in_buffer(buffer, mesh, [placed.index(at) for at in taken])
        else:
            works = [work_in_chunks(layer[names[at]], ranks) for at in taken]
        groups.append(works)
    return groups


def _fixed(found: OwnerPlan) -> list[list[list[int]]]:
    return [[[owner] for owner in group] for group in found.owners]


def _table(found: OwnerPlan) -> Table:
    table = Table(title=f"{sum(map(len, found.owners))} matrices on {found.num_ranks} ranks")
    for name in ("rank", "matrices", "load", "of bound", "MB received"):
        table.add_column(name, justify="right")
    table.add_column("")
    counts = [0] * found.num_ranks
    for group in found.owners:
        for owner in group:
            counts[owner] += 1
    order = sorted(range(found.num_ranks), key=lambda rank: (-found.loads[rank], rank))
    if found.num_ranks <= SHOWN_RANKS:
        order.sort()
    else:
        table.caption = f"the {SHOWN_RANKS} ranks with the highest load"
    for rank in order[:SHOWN_RANKS]:
        load = found.loads[rank]
        share = load / found.lower_bound if found.lower_bound else 0.0
        table.add_row(
            str(rank),
            str(counts[rank]),
            f"{load:.4g}",
            f"{share:.1%}",
            f"{found.bytes_per_rank[rank] / 1e6:,.2f}",
            "#" * round(BAR * load / max(found.makespan, 1e-300)),
        )
    return table


def _summary(found: OwnerPlan, compute_s: float, bandwidth: float) -> list[str]:
    move_s = max(found.bytes_per_rank) / bandwidth / 1e9
    pace = "compute" if compute_s >= move_s else "communication"
    times = f"compute {1e3 * compute_s:.3f} ms, communication {1e3 * move_s:.3f} ms"
    return [
        f"makespan {found.makespan:.4g}, bound {found.lower_bound:.4g}, ratio {found.ratio:.4f}",
        f"bytes {found.total_bytes / 1e6:,.2f} MB, bound {found.bytes_lower_bound / 1e6:,.2f} MB",
        f"{times}: {pace} sets the pace",
    ]
