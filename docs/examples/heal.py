"""A rank was killed in training; a new process takes its place and heals from all live ranks.

Every rank is a replica, so each that lives has all that the new one needs. They offer it over
HTTP to whoever shows the token; the new one fetches from all of them at once, straight into its
own tensors.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from figures import Act, Moved
from launch import TOKEN
from source import Source
from tell import Teller
from train import Trainer, differing_from
from world import World

from fttransport import HTTPTransport, Report, Security, join_metadata

LIMIT = timedelta(seconds=90)
STREAMS = 3


def act(world: World, before: Trainer | None, source: Source, tell: Teller) -> tuple[Trainer, Act]:
    """A trainer that goes on from the last step that was done. Collective.

    `before` is the trainer of a rank that lives on, None on one that is new. Afterwards all ranks
    hold the same, and nobody reads it any more.
    """
    tell.doing("heal", "sets up again")
    fresh = Trainer(source.sharded(world.mesh_of_replicas()), source)
    transport: HTTPTransport[dict[str, object]] = HTTPTransport(
        LIMIT,
        STREAMS,
        state_dict=lambda: {"tensors": fresh.held()},
        security=Security(token=os.environ[TOKEN]),
        bind="127.0.0.1",
        progress=tell.progress,
    )
    found = Act("heal")
    try:
        if before is None:
            found.moved.append(receive(transport, world, fresh, tell))
        else:
            fresh.take_over(before)
            before.close()
            offer(transport, world, fresh, tell)
        dist.barrier()
        transport.disallow_checkpoint()
    finally:
        transport.shutdown()
    live = next(rank for rank in range(world.size) if rank not in world.lost)
    expected = fresh.held() if world.rank == live else None
    wrong = differing_from(live, expected, fresh.held())
    claim = f"the new process has the state of those that live, bit-equal: {wrong} tensors differ"
    found.verdicts.append((claim, wrong == 0))
    return fresh, found


def offer(
    transport: HTTPTransport[dict[str, object]], world: World, trainer: Trainer, tell: Teller
) -> None:
    """Serve what this rank holds, as the state of the last step."""
    tell.doing("heal", "offers its state")
    state: dict[str, object] = {"tensors": trainer.held(), "losses": trainer.losses}
    transport.send_checkpoint(list(world.lost), trainer.steps, state, LIMIT)
    world.publish("step", str(trainer.steps))
    world.publish("source", transport.metadata())


def receive(
    transport: HTTPTransport[dict[str, object]], world: World, trainer: Trainer, tell: Teller
) -> Moved:
    """Fetch all from all that live, into the trainer's own tensors."""
    live = [rank for rank in range(world.size) if rank not in world.lost]
    tell.doing("heal", f"receives from ranks {', '.join(map(str, live))}")
    sources = [world.published("source", rank) for rank in live]
    step = int(world.published("step", live[0]))
    state = transport.recv_checkpoint(live[0], join_metadata(sources), step, LIMIT)
    losses = state["losses"]
    trainer.losses = list(losses) if isinstance(losses, list) else []
    report = transport.last_report
    if report is None:
        raise RuntimeError("the transport tells nothing of what it received")
    tell.note(said(report, dict(zip(sources, live, strict=True))))
    return Moved(
        f"heal from {len(live)} ranks",
        received=report.moved_bytes,
        least=report.nbytes,
        seconds=report.seconds,
    )


def said(report: Report, ranks: dict[str, int]) -> str:
    """Which rank gave how much."""
    given = sorted((ranks[name], n) for name, n in report.per_source.items())
    parts = [f"{n / 1e6:.1f} MB from rank {rank}" for rank, n in given]
    return f"healed with {', '.join(parts)}, at {report.bytes_per_s / 1e6:.0f} MB/s"
