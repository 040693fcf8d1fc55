"""DTensors: healed part by part in place, rebuilt on the receiver's mesh, refused elsewhere."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from distcore.testing import RankPool
from distcore.v1 import providers
from distcore.v1.runtime import GroupChannel
from fttransport import HTTPTransport, LayoutMismatch, join_metadata

S = timedelta(seconds=20)
FULL = torch.arange(35.0).view(7, 5)


def heal_in_place(channel: GroupChannel) -> None:
    mesh = init_device_mesh("cpu", (2,))
    own = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(0)])}
    source: HTTPTransport[Any] = HTTPTransport(S, 0)
    receiver: HTTPTransport[Any] = HTTPTransport(S, 0, state_dict=lambda: own)
    source.send_checkpoint([], 1, {"w": distribute_tensor(FULL, mesh, [Shard(0)])}, S)
    found = receiver.recv_checkpoint(0, source.metadata(), 1, S)
    assert found["w"] is own["w"]
    assert torch.equal(own["w"].full_tensor(), FULL)
    source.shutdown()
    receiver.shutdown()


def rebuild(channel: GroupChannel) -> None:
    mesh = init_device_mesh("cpu", (2,))
    transport: HTTPTransport[Any] = HTTPTransport(S, 0)
    transport.send_checkpoint([], 1, {"w": distribute_tensor(FULL, mesh, [Shard(1)])}, S)
    found = transport.recv_checkpoint(0, transport.metadata(), 1, S)["w"]
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(1),)
    assert found.shape == (7, 5)
    assert torch.equal(found.full_tensor(), FULL)
    transport.shutdown()


def relayout(channel: GroupChannel) -> None:
    """Rows from two ranks become columns, a whole DTensor, and a plain tensor."""
    mesh = init_device_mesh("cpu", (2,))
    source: HTTPTransport[Any] = HTTPTransport(S, 0)
    state = {"w": distribute_tensor(FULL, mesh, [Shard(0)]), "n": 5, "b": torch.ones(3)}
    source.send_checkpoint([], 1, state, S)
    rows = channel.all_gather(source.metadata().encode().ljust(200))
    metadata = join_metadata([row.decode().strip() for row in rows])
    for target in (
        distribute_tensor(torch.zeros(7, 5), mesh, [Shard(1)]),
        distribute_tensor(torch.zeros(7, 5), mesh, [Replicate()]),
        torch.zeros(7, 5),
    ):
        own = {"w": target, "b": torch.zeros(3)}
        receiver: HTTPTransport[Any] = HTTPTransport(S, 0, state_dict=own.copy)
        if providers("resharder"):
            found = receiver.recv_checkpoint(0, metadata, 1, S)
            assert found["w"] is target
            assert found["n"] == 5
            assert own["b"].tolist() == [1, 1, 1]
            whole = target.full_tensor() if isinstance(target, DTensor) else target
            assert torch.equal(whole, FULL)
        with pytest.raises(LayoutMismatch, match=r"\['w'\]"):
            receiver.recv_checkpoint(0, source.metadata(), 1, S)
        receiver.shutdown()
    channel.all_gather(b"done")
    source.shutdown()


@pytest.mark.parametrize("case", [heal_in_place, rebuild, relayout])
def test_dtensors(pool: RankPool, case: Any) -> None:
    pool.run(case).values()


def test_without_such_ranks_a_dtensor_is_refused_with_what_to_do() -> None:
    from fttransport.placements import make_dtensor
    from fttransport.table import Entry

    layout = {
        "rank": 0,
        "format": 1,
        "shape": [4],
        "dtype": "float32",
        "ranks": [0, 1],
        "mesh": [2],
        "placements": ["S(0)"],
        "reading": "order",
    }
    entry = Entry(0, 0, (2,), (1,), "float32", 0, layout)
    with pytest.raises(LayoutMismatch, match="state_dict="):
        make_dtensor(entry, torch.zeros(2), "['w']")
    for change in ({"rank": 5}, {"mesh": [3]}, {"format": 9}):
        spoiled = entry._replace(layout=layout | change)
        with pytest.raises(LayoutMismatch, match=r"layout|rank"):
            make_dtensor(spoiled, torch.zeros(2), "['w']")
