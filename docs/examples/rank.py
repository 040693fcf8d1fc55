"""One rank of the demo, from its first act to the last; `launch.py` starts it."""

from __future__ import annotations

import argparse
import io
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import gauge
import heal
import load
import save
import shrink
import spread
from bert import Bert
from figures import Act, Moved
from rich.console import Console
from rollout import Rollout
from source import Source
from tell import Teller
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from train import Trainer, alone, compared, floor, is_exact
from world import World

STORE_LIMIT = timedelta(seconds=120)
# What a rank meets in the middle of a step when another one goes: of torch's, and of ours.
LOSSES = (RuntimeError, OSError)


class Story:
    """What one rank goes through: so many steps of training, in which `victim` is killed."""

    def __init__(
        self, source: Source, steps: int, victim: int, *, folder: Path, tell: Teller
    ) -> None:
        self.source = source
        self.steps = steps
        self.victim = victim
        self.folder = folder
        self.tell = tell

    def begin(self, world: World) -> None:
        """The story of a rank that is there from the start."""
        mesh, tell = world.mesh(), self.tell
        tell.doing("load", "measures the machine")
        gauge.measure(self.source, self.folder, tell)
        tell.doing("load", "reads its part and exchanges")
        model = self.source.sharded(mesh)
        console = Console(file=io.StringIO(), width=80)
        tell.act(load.act(model, self.source, mesh, console))
        if world.rank == 0 and isinstance(console.file, io.StringIO):
            tell.note(console.file.getvalue().rstrip())
        tell.doing("save", "writes two formats, reads them back")
        tell.act(save.act(model, self.source, mesh, self.folder))
        trainer = self.train_sharded(world, model)
        if trainer is None:
            self.shrink(world, {f"weights.{k}": v for k, v in model.state_dict().items()}, None)
            return
        self.tell.doing("spread", "carries all state to replicas")
        mesh = world.mesh_of_replicas()
        wide, found, traffic = spread.act(trainer, self.source, mesh)
        tell.act(found)
        if world.rank == 0:
            tell.picture("traffic", matrix=traffic)
        trainer.close()
        self.end(world, wide)

    def train_sharded(self, world: World, model: Bert) -> Trainer | None:
        """Train, and send the weights to a second model: half-way, as training goes on, and then.

        None where training is not exact; then only untrained weights are sent.
        """
        tell, steps = self.tell, self.sharded_steps
        rollout = Rollout(model, self.source)
        if not steps:
            tell.doing("rollout", "sends a version")
            rollout.start()
            tell.act(rollout.finish())
            rollout.close()
            return None
        trainer = Trainer(model, self.source)
        moved: list[Moved] = []
        for step in range(steps):
            tell.doing("train", f"step {step + 1}")
            loss = trainer.backward()
            tell.act(rollout.finish())
            moved.append(trainer.update(loss))
            tell.act(Act("train", [moved[-1]]))
            if step + 1 == steps // 2:
                rollout.start()
        tell.doing("rollout", "sends a version")
        tell.act(rollout.finish())
        rollout.start()
        tell.act(rollout.finish())
        rollout.close()
        received, least = (sum(getattr(one, key) for one in moved) for key in ("received", "least"))
        tell.picture("load", flops=trainer.flops, received=received, least=least, steps=steps)
        return trainer

    def end(self, world: World, trainer: Trainer | None) -> None:
        """The rest of the story, for a rank that trains already (or not: one that is new)."""
        world, trainer = self.train_on(world, trainer)
        tell = self.tell
        if self.fatal_step(world.size):
            claim = f"rank {self.victim} was killed in a step, and replaced"
            tell.act(Act("heal", [], [(claim, world.lost == (self.victim,))]))
        never_hurt = None
        if world.rank == 0:
            tell.doing("compare", "trains alone, never hurt")
            never_hurt = alone(self.source, self.steps)
            tell.floor("OwnerMuon", floor(never_hurt))
        else:
            tell.doing("compare", "waits for rank 0")
        tell.act(compared(trainer, never_hurt))
        trainer.close()
        self.shrink(world, trainer.state(), never_hurt)

    def train_on(self, world: World, trainer: Trainer | None) -> tuple[World, Trainer]:
        """Train on replicas to the last step, over the loss of a rank."""
        tell = self.tell
        if trainer is None:
            trainer, healed = heal.act(world, None, self.source, tell)
            tell.act(healed)
        while trainer.steps < self.steps:
            tell.doing("train", f"step {trainer.steps + 1}")
            found = self.attempt(world, trainer)
            if found is not None:
                tell.act(Act("train", [found]))
                continue
            tell.doing("heal", "waits for one in the place of the lost rank")
            world = world.after_loss()
            trainer, healed = heal.act(world, trainer, self.source, tell)
            tell.act(healed)
        return world, trainer

    def attempt(self, world: World, trainer: Trainer) -> Moved | None:
        """Make one step; None where a peer was lost on the way."""
        try:
            return trainer.step(self.doom(world, trainer.steps + 1))
        except LOSSES as error:
            if world.number:  # one loss is told of in this story; another one is a mistake
                raise
            print(f"rank {world.rank} has lost a peer: {error}", file=sys.stderr, flush=True)
            return None

    def shrink(self, world: World, state: dict[str, Tensor], never_hurt: Trainer | None) -> None:
        """Save on all ranks and load on one less; the last rank has nothing more to do."""
        tell = self.tell
        tell.doing("shrink", f"saves with {shrink.counted(world.size)}")
        tell.act(shrink.save_all(state, self.folder))
        fewer = world.shrunk(max(1, world.size - 1))
        if fewer is None:
            return
        tell.doing("shrink", f"loads with {shrink.counted(fewer.size)}")
        model = self.source.sharded(fewer.mesh())
        if self.sharded_steps:
            trainer = Trainer(model, self.source)
            expected = never_hurt.held() if never_hurt is not None else None
            tell.act(shrink.load_all(trainer.state(), fewer, self.folder, expected))
            trainer.close()
        else:
            fresh = {f"weights.{key}": value for key, value in model.state_dict().items()}
            whole = self.source.whole() if fewer.rank == 0 else {}
            expected = {f"weights.{key}": value for key, value in whole.items()} or None
            tell.act(shrink.load_all(fresh, fewer, self.folder, expected))
        fewer.leave()

    @property
    def sharded_steps(self) -> int:
        """How many of the steps run on sharded ranks: the larger half."""
        return -(-self.steps // 2)

    def fatal_step(self, size: int) -> int:
        """The step in which a rank is killed; 0 where no rank is, since none would be left."""
        left = self.steps - self.sharded_steps
        if not left or size == 1 or self.victim not in range(size):
            return 0
        return self.sharded_steps + min(2, left)

    def doom(self, world: World, step: int) -> Callable[[], None] | None:
        """What ends this rank, if it is the one that is killed in this step."""
        if world.rank != self.victim or world.number or step != self.fatal_step(world.size):
            return None
        return self.wait_for_the_end

    def wait_for_the_end(self) -> None:
        self.tell.doing("train", "half-way through a step")
        self.tell.doomed()
        time.sleep(60)
        raise SystemExit("this rank should have been killed")


def end_with_the_launcher() -> None:
    """End this process if the one that started it ends, however that comes about."""

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> int:
    end_with_the_launcher()
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("rank", "size", "number", "port", "pipe", "steps", "victim"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    given = parser.parse_args()
    tell = Teller(given.rank, given.pipe)
    tell.doing("start" if not given.number else "heal", "starts a process")
    source = Source.open(given.model)
    steps = given.steps if is_exact(source, given.size) else 0
    story = Story(source, steps, given.victim, folder=given.folder, tell=tell)
    store = TCPStore("127.0.0.1", given.port, is_master=False, timeout=STORE_LIMIT)
    if given.number:
        story.end(World.announced(store, given.rank, given.number), None)
    else:
        world = World(store, given.rank, given.size)
        world.join()
        story.begin(world)
    tell.doing("end")
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:  # noqa: BLE001 - said, and the process ends
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what is left of groups with lost peers is not waited for
