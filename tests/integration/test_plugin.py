"""A package of somebody else, installed as a wheel, takes part through `distcore.v1` alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from distcore.testing import RankPool, check_resharder, check_transport
from distcore.v1 import Channel, Resharder, providers
from distcore.v1.protocols import StateTransport
from distcore.v1.runtime import execute, layout_of
from reshard import plan_reshard

pytestmark = pytest.mark.skipif(
    find_spec("plainmove") is None, reason="tests/plugin is not installed; nox -s integration does"
)
LIMIT = timedelta(seconds=20)
FULL = torch.arange(77.0).view(11, 7)


def resharder() -> Resharder:
    made = cast("Callable[[], Resharder]", providers("resharder")["zz-plainmove"].load())
    return made()


def transport(folder: Path | str) -> StateTransport:
    made = cast("Callable[[str], StateTransport]", providers("transport")["folder"].load())
    return made(str(folder))


def test_it_is_found_beside_those_of_the_house() -> None:
    assert list(providers("resharder")) == ["reshard", "zz-plainmove"]
    assert list(providers("transport")) == ["folder", "http", "pg"]


def test_its_resharder_keeps_the_contract() -> None:
    check_resharder(resharder())


def test_its_transport_keeps_the_contract(tmp_path: Path) -> None:
    check_transport(lambda rank: transport(tmp_path))


def moved_by_its_plan(channel: Channel) -> list[bool]:
    """Its plan and that of reshard, run by the one executor, from rows to columns."""
    mesh = init_device_mesh("cpu", (channel.size,))
    source = distribute_tensor(FULL, mesh, [Shard(0)], src_data_rank=None)
    held = {"w": layout_of(source, channel)}
    outcome = []
    for number in range(2):
        target = distribute_tensor(torch.zeros(11, 7), mesh, [Shard(1)], src_data_rank=None)
        wanted = {"w": layout_of(target, channel)}
        plan = resharder().plan(held, wanted) if number else plan_reshard(held, wanted).stages[0]
        execute(plan, channel, {"w": source}, {"w": target})
        outcome.append(torch.equal(target.full_tensor(), FULL))
    return outcome


def test_the_executor_runs_its_plan(pool: RankPool) -> None:
    assert pool.run(moved_by_its_plan).values() == ([True, True],) * 4


def healed_by_its_transport(channel: Channel, folder: str) -> bool:
    """Rank 0 offers its state and the other three receive it, each in a process of its own."""
    own = transport(folder)
    if channel.rank == 0:
        own.send_checkpoint([1, 2, 3], 3, {"w": FULL, "step": 3}, LIMIT)
    found = cast("dict[str, torch.Tensor]", own.recv_checkpoint(0, folder, 3, LIMIT))
    channel.all_gather(b"read")
    own.shutdown()
    return torch.equal(found["w"], FULL) and bool(found["step"] == 3)


def test_its_transport_heals_other_processes(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(healed_by_its_transport, str(tmp_path)).values() == (True,) * 4
    assert list(tmp_path.iterdir()) == []
