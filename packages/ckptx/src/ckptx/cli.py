"""The command line: inspect, plan, verify and convert checkpoints. Needs the extra `cli`."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from rich.table import Table
except ImportError as error:
    text = "the command line needs more; run: pip install 'ckptx[cli]'"
    raise ModuleNotFoundError(text, name=error.name) from error

from ckptx.checkpoint import Checkpoint, open_checkpoint
from ckptx.errors import CheckpointingException
from ckptx.plan import LoadPlan, plan_load
from ckptx.savejob import Format
from ckptx.stored import StoredTensor
from distcore.v1 import Layout

app = typer.Typer(
    help="Inspect, plan, verify and convert checkpoints.",
    no_args_is_help=True,
    add_completion=False,
)
_BAR = 40
PathArgument = Annotated[str, typer.Argument(help="A directory, a file, or an index of files.")]


@contextmanager
def _told() -> Iterator[None]:
    """Print an error and leave with status 1, instead of a traceback."""
    try:
        yield
    except (CheckpointingException, ImportError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


@app.command()
def inspect(
    path: PathArgument,
    *,
    match: Annotated[str, typer.Option(help="Only keys that fit this pattern.")] = "*",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint holds: keys, shapes, dtypes, bytes and format."""
    with _told():
        checkpoint = open_checkpoint(path)
    keys = [key for key in checkpoint if fnmatch.fnmatchcase(key, match)]
    if as_json:
        typer.echo(json.dumps(_described(checkpoint, keys)))
        return
    table = Table("key", "dtype", "shape", "bytes", "chunks")
    for key in keys:
        entry = checkpoint[key]
        if isinstance(entry, StoredTensor):
            shape = "x".join(map(str, entry.shape)) or "scalar"
            table.add_row(key, entry.dtype, shape, f"{entry.nbytes:,}", str(len(entry.chunks)))
        else:
            table.add_row(key, "value", "", f"{entry.nbytes:,}", "")
    console = Console()
    console.print(table)
    console.print(
        f"{checkpoint.format}: {len(checkpoint.tensors)} tensors of {checkpoint.nbytes:,} bytes, "
        f"{len(checkpoint.objects)} values, "
        f"{'with' if checkpoint.integrity else 'without'} digests"
    )


def _described(checkpoint: Checkpoint, keys: list[str]) -> dict[str, object]:
    tensors = {
        key: {"dtype": stored.dtype, "shape": stored.shape, "nbytes": stored.nbytes}
        for key, stored in checkpoint.tensors.items()
        if key in keys
    }
    return {
        "format": checkpoint.format,
        "nbytes": checkpoint.nbytes,
        "digests": checkpoint.integrity is not None,
        "tensors": tensors,
        "values": [key for key in checkpoint.objects if key in keys],
    }


@app.command()
def plan(
    path: PathArgument,
    *,
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks load it.")] = 8,
    replicas: Annotated[
        int, typer.Option(min=1, help="Copies of the model; it is sharded along dim 0 in each.")
    ] = 1,
    plot: Annotated[str, typer.Option(help="Draw a picture into this file, too.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show who would read what, with a bar per rank and the lower bound."""
    if ranks % replicas:
        raise typer.BadParameter(f"{ranks} ranks cannot hold {replicas} copies evenly")
    with _told():
        found = _plan(open_checkpoint(path), ranks, replicas)
        if plot:
            from ckptx.plot import plot_reads

            plot_reads(found, plot)
    read = [found.read_nbytes(rank) for rank in range(ranks)]
    received = [found.lower_bound_received[rank] for rank in range(ranks)]
    if as_json:
        bounds = {"read": found.lower_bound_read, "slowest": found.lower_bound_slowest}
        typer.echo(json.dumps({"read": read, "received": received, "lower_bound": bounds}))
        return
    table = Table("rank", "reads", "", "receives")
    most = max(*read, 1) if len(read) > 1 else max(read[0], 1)
    for rank in range(ranks):
        bar = "#" * round(_BAR * read[rank] / most)
        table.add_row(str(rank), f"{read[rank]:,}", bar, f"{received[rank]:,}")
    console = Console()
    console.print(table)
    console.print(
        f"together {sum(read):,} bytes, at least {found.lower_bound_read:,} are needed; the rank "
        f"that reads most reads {max(read):,}, at least {found.lower_bound_slowest:,}"
    )


def _plan(checkpoint: Checkpoint, ranks: int, replicas: int) -> LoadPlan:
    shards = ranks // replicas
    mesh = [list(range(i * shards, (i + 1) * shards)) for i in range(replicas)]
    layouts = {}
    for key, stored in checkpoint.tensors.items():
        last = "S(0)" if stored.shape else "R"
        layouts[key] = Layout.from_mesh(
            shape=stored.shape, dtype=stored.dtype, mesh=mesh, placements=["R", last]
        )
    return plan_load(layouts, checkpoint.tensors, tuple(range(ranks)))


@app.command()
def verify(path: PathArgument) -> None:
    """Check coverage, bounds and digests; leaves with status 1 where anything is damaged."""
    from ckptx.proof import prove

    with _told():
        checkpoint = open_checkpoint(path)
    with _bar("verifying") as progress:
        found = prove(checkpoint, progress=progress)
    console = Console()
    for text in found.damage:
        console.print(f"[bold red]damaged:[/] {text}", highlight=False, soft_wrap=True)
    proven = ", ".join(f"{nbytes:,} bytes by {kind}" for kind, nbytes in found.proven.items())
    console.print(f"{len(checkpoint)} entries, proven: {proven or 'nothing has a digest'}")
    if found.damage:
        raise typer.Exit(1)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="The checkpoint to be read.")],
    target: Annotated[str, typer.Argument(help="The directory to be written.")],
    *,
    to: Annotated[str, typer.Option(help="safetensors or dcp.")] = "safetensors",
    overwrite: Annotated[bool, typer.Option(help="Replace a checkpoint at the target.")] = False,
    split: Annotated[bool, typer.Option(help="Let ranks share tensors out in parts.")] = False,
    max_staging_mib: Annotated[int, typer.Option(min=1, help="Memory per process.")] = 64,
) -> None:
    """Write a checkpoint anew in another format, on one process or under torchrun."""
    from ckptx.converter import convert as converted

    kinds: dict[str, Format] = {"safetensors": "safetensors", "dcp": "dcp"}
    if to not in kinds:
        raise typer.BadParameter(f"expected safetensors or dcp, got {to}")
    with _told(), _ranks() as is_first, _bar("converting", is_shown=is_first) as progress:
        report = converted(
            source,
            target,
            format=kinds[to],
            overwrite=overwrite,
            split=split,
            max_staging_bytes=max_staging_mib << 20,
            progress=progress,
        )
    if is_first:
        Console().print(f"{target}: {report.total_bytes:,} bytes in {report.seconds:.2f} s")


@contextmanager
def _ranks() -> Iterator[bool]:
    """Join the other ranks where torchrun has started some; gives whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield True
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


@contextmanager
def _bar(text: str, *, is_shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, as a function of the bytes done and all bytes."""
    columns = (TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


if __name__ == "__main__":
    app()
