"""The command line: plan a transfer and play it. Needs the extra `cli`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError as error:
    text = "the command line needs more; run: pip install 'reshard[cli]'"
    raise ModuleNotFoundError(text, name=error.name) from error

from distcore.v1 import PlanError
from reshard.models import MODELS, Model, model_of
from reshard.options import Options
from reshard.plan import ReshardPlan, plan_reshard
from reshard.strategy import Strategy

if TYPE_CHECKING:
    from reshard.rehearsal import Rehearsal

app = typer.Typer(
    help="Plan transfers of whole models between meshes, and play them in one process.",
    no_args_is_help=True,
    add_completion=False,
)

_MESH = (
    "How the model lies on ranks: axes of pp, ep, dp, fsdp, tp and the first rank, as dp=2,tp=4@8."
)
Shapes = Annotated[
    str,
    typer.Option(
        help=f"A .json or .safetensors file with the tensors, or one of {', '.join(MODELS)}."
    ),
]
Source = Annotated[str, typer.Option("--src", help=f"The source. {_MESH}")]
Destination = Annotated[str, typer.Option("--dst", help="The destination, in the same form.")]


@contextmanager
def _told() -> Iterator[None]:
    """Print an error and leave with status 1, instead of a traceback."""
    try:
        yield
    except (PlanError, ImportError, OSError, ValueError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def plan(
    *,
    shapes: Shapes,
    src: Source,
    dst: Destination,
    ranks_per_node: Annotated[int, typer.Option(help="0: nothing is known of nodes.")] = 0,
    node_cost: Annotated[float, typer.Option(help="A byte between nodes, in bytes within.")] = 1.0,
    fan_out: Annotated[
        Literal["auto", "direct", "stripe", "node"], typer.Option(help="How replicas are reached.")
    ] = "auto",
    max_peers: Annotated[int, typer.Option(help="0: any number.")] = 0,
    plot: Annotated[str, typer.Option(help="Draw the traffic matrix into this file.")] = "",
    output: Annotated[str, typer.Option(help="Write the plan as JSON into this file.")] = "",
    explain: Annotated[str, typer.Option(help="List the transfers of this tensor.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what it takes to carry a model from one mesh to another, beside the lower bounds."""
    with _told():
        options = Options(fan_out=fan_out, node_cost=node_cost, max_peers=max_peers or None)
        model, made = _planned(shapes, src, dst, options, ranks_per_node)
        if output:
            Path(output).write_text(made.to_json())
        if plot:
            made.plot(plot)
        if explain:
            typer.echo(made.explain(explain))
            return
        if as_json:
            typer.echo(json.dumps({"stats": dict(made.stats()), "bounds": dict(made.bounds())}))
            return
        _show(model, made, f"{shapes}: {src} -> {dst}")


@app.command()
def simulate(
    *,
    shapes: Shapes,
    src: Source,
    dst: Destination,
    max_nbytes: Annotated[
        int, typer.Option(help="Leave out tensors that take more, over all ranks.")
    ] = 256 << 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play the plan in one process, tensor by tensor, and check every element on every rank."""
    from reshard.rehearsal import rehearse  # late, so that to plan needs no torch

    with _told():
        _, made = _planned(shapes, src, dst, Options(), 0)
        found = rehearse(made, max_nbytes=max_nbytes)
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        _tell(found)
    if found.wrong:
        raise typer.Exit(1)


def _planned(
    shapes: str, src: str, dst: str, options: Options, ranks_per_node: int
) -> tuple[Model, ReshardPlan]:
    model = model_of(shapes)
    sides = Strategy.parse(src), Strategy.parse(dst)
    last = max(side.first + side.num_ranks for side in sides)
    nodes = [rank // ranks_per_node for rank in range(last)] if ranks_per_node else None
    layouts = [side.layouts(model) for side in sides]
    return model, plan_reshard(layouts[0], layouts[1], nodes=nodes, options=options)


def _show(model: Model, made: ReshardPlan, title: str) -> None:
    stats, bounds = made.stats(), made.bounds()
    table = Table("", "planned", "lower bound", "ratio", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, text in (
        ("wire_bytes", "bytes between ranks"),
        ("max_egress_bytes", "of the busiest sender"),
        ("max_ingress_bytes", "of the busiest receiver"),
    ):
        ratio = f"{stats[name] / bounds[name]:.4f}" if bounds[name] else ""
        table.add_row(text, f"{stats[name]:,}", f"{bounds[name]:,}", ratio)
    relayed = f"{bounds.relayed_egress_bytes:,}"
    table.add_row("of the busiest sender, if receivers pass on", "", relayed, "")
    for name, text in (
        ("local_bytes", "bytes that stay on their rank"),
        ("messages", "transfers between ranks"),
        ("max_peers", "peers of a rank, at most"),
        ("rounds", "rounds"),
        ("stages", "stages"),
    ):
        table.add_row(text, f"{stats[name]:,}", "", "")
    console = Console()
    console.print(table)
    console.print(f"{len(model.weights):,} tensors of {model.nbytes:,} bytes; digest {made.digest}")


def _tell(found: Rehearsal) -> None:
    console = Console()
    console.print(
        f"{found.tensors:,} tensors played on {found.ranks:,} ranks: "
        f"{found.elements:,} elements checked, {len(found.wrong)} tensors wrong, "
        f"{found.skipped:,} left out for their size"
    )
    for key in found.wrong[:20]:
        console.print(f"[red]wrong:[/] {key}", highlight=False)


if __name__ == "__main__":
    app()
