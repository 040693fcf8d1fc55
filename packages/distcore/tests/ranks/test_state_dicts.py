"""Gathers of state dicts: eager, one dict at a time, without code from a peer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from distcore import all_reduce, gather_state_dicts
from distcore.state_dicts import written
from distcore.testing import RankPool, rank_threads
from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError, PeerError, PlanError
from distcore.v1.runtime import GroupChannel

SOON_S = 3.0


def one(state: dict[Any, Any]) -> dict[Any, Any]:
    """A state as a run of one gathers it."""
    (found,) = gather_state_dicts(state, 0)
    return found


def test_the_destination_gets_every_state_and_the_others_nothing() -> None:
    def gather(channel: Channel) -> list[list[int]]:
        found = gather_state_dicts({"w": torch.tensor([channel.rank])}, 1, channel)
        return [state["w"].tolist() for state in found]

    assert rank_threads(3, gather).values() == ([], [[0], [1], [2]], [])


def test_who_never_iterates_holds_up_nobody() -> None:
    def gather(channel: Channel) -> int:
        found = gather_state_dicts({"w": torch.ones(2)}, 0, channel)
        if channel.rank == 2:
            return -1
        return len(list(found))

    assert rank_threads(3, gather).values() == (3, 0, -1)


def test_one_dict_is_loaded_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    load = torch.load

    def counted(*args: Any, **given: Any) -> Any:
        if given["map_location"] == "cpu":
            loads.append(1)
        return load(*args, **given)

    monkeypatch.setattr(torch, "load", counted)

    def gather(channel: Channel) -> list[int]:
        found = gather_state_dicts({"w": torch.ones(2)}, 0, channel)
        return [len(loads) for _ in found]

    assert rank_threads(3, gather).values() == ([1, 2, 3], [], [])


def test_what_torch_reads_by_weights_only_comes_back() -> None:
    state = {
        "w": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        "f8": torch.ones(2).to(torch.float8_e4m3fn),
        "n": OrderedDict(step=2**70, lr=0.1, names=["a", ("b",)], none=None, blob=b"x"),
        3: {True},
    }
    found = one(state)
    assert type(found["w"]) is torch.nn.Parameter
    assert found["w"].tolist() == [1, 1]
    assert (found["f8"].dtype, found["f8"].float().tolist()) == (torch.float8_e4m3fn, [1, 1])
    assert (found["n"], found[3]) == (state["n"], {True})


def test_a_view_is_sent_without_the_rest_of_its_storage() -> None:
    big = torch.arange(1 << 20)
    assert len(written({"w": big[:1], "n": [{"v": big[5:7]}]})) < 4000
    found = one({"w": big[:1], "n": [{"v": big[5:7]}]})
    assert (found["w"].tolist(), found["n"][0]["v"].tolist()) == ([0], [5, 6])


def test_views_that_make_up_their_storage_are_sent_as_it() -> None:
    flat = torch.arange(6.0)
    found = one({"a": flat[:2], "b": flat[2:]})
    assert (found["a"].tolist(), found["b"].tolist()) == ([0, 1], [2, 3, 4, 5])
    assert found["a"].untyped_storage().data_ptr() == found["b"].untyped_storage().data_ptr()


def test_tied_tensors_stay_tied() -> None:
    tied, part = torch.ones(3), torch.arange(9)[3:5]
    found = one({"a": tied, "b": tied, "c": part, "d": [part]})
    found["a"][0] = 7
    found["c"][0] = 8
    assert (found["b"].tolist(), found["d"][0].tolist()) == ([7, 1, 1], [8, 4])


def refused(state: Any) -> Callable[[Channel], object]:
    def call(channel: Channel) -> object:
        mine = state if channel.rank == 1 else {"w": torch.ones(1)}
        try:
            return gather_state_dicts(mine, 0, channel)
        finally:
            assert all_reduce("next", lambda: 1, list, group=channel) == [1, 1]

    return call


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"p": Path("a")}, "weights_only=True) refuses pathlib."),
        ({"f": lambda: 0}, "cannot be saved"),
        ([1], "expected a dict, got a list"),
    ],
    ids=["path", "function", "list"],
)
def test_what_is_refused_on_one_rank_raises_on_all_at_the_call(state: Any, words: str) -> None:
    for error in rank_threads(2, refused(state)).raised(PeerError, within_s=SOON_S):
        assert list(error.failures) == [1]
        assert words in error.failures[1]


def test_another_destination_raises_on_all() -> None:
    def call(channel: Channel) -> object:
        return gather_state_dicts({}, channel.rank, channel)

    rank_threads(2, call).raised(DisagreementError, within_s=SOON_S)


def test_a_destination_outside_the_group_raises_on_all() -> None:
    def call(channel: GroupChannel) -> object:
        return gather_state_dicts({}, 0, GroupChannel(channel.group, ranks=[1, 3]))

    rank_threads(2, call).raised(PlanError, within_s=SOON_S)
    with pytest.raises(PlanError, match=r"\[0\], got 1"):
        gather_state_dicts({}, 1)


def in_world(channel: Channel) -> list[int]:
    """In the world, in the subgroup of ranks 1 and 3, and with a DTensor."""
    rank = channel.rank
    odd = dist.new_group([1, 3])
    found = [state["r"] for state in gather_state_dicts({"r": rank}, 0)]
    if rank in (1, 3):
        found = [state["r"] for state in gather_state_dicts({"r": rank}, 3, odd)]
    mesh = init_device_mesh("cpu", (4,))
    sharded = distribute_tensor(torch.ones(4), mesh, [Replicate()])
    with pytest.raises(PlanError, match=r"state\['m'\]\[0\]: a DTensor is not gathered"):
        gather_state_dicts({"m": [sharded]}, 0)
    return found


def test_the_default_world_and_a_subgroup_and_no_dtensor(pool: RankPool) -> None:
    assert pool.run(in_world).values() == ([0, 1, 2, 3], [], [], [1, 3])
