"""The face on thread ranks: the worked examples, all algorithms, and their failing twins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import ProcessGroup

import ckptx
from ckptx import (
    CheckpointDisagreement,
    CheckpointingException,
    CheckpointPeerError,
    exchange_utils,
)
from ckptx.exchange_utils import (
    _build_shard_distribution,
    _gather_shards_metadata,
    _get_empty_tensor_for_exchange,
    _shard_size,
    determine_main_replica_uniform_distribution,
    exchange_by_distribution,
    exchange_loaded_objects_gather_object,
    exchange_loaded_tensors_broadcast,
    exchange_loaded_tensors_gather_object,
    exchange_loaded_tensors_gather_rounds,
)
from ckptx.sharded import ShardedTensor, ShardId
from distcore.testing import rank_threads
from distcore.v1 import Channel, DisagreementError, PeerError, PlanError
from distcore.v1.runtime import GroupChannel

Tensors = dict[ShardId, torch.Tensor]
State = dict[str, ShardedTensor]
rank_offsets = ShardedTensor.from_rank_offsets
NEED_ONLY = pytest.mark.parametrize("algorithm", ["broadcast", "gather_rounds", "planned"])
ALL = pytest.mark.parametrize(
    "algorithm", ["broadcast", "gather_rounds", "gather_object", "planned"]
)


@pytest.fixture(autouse=True)
def fresh_memo() -> Iterator[None]:
    exchange_utils._PG_DIST_CACHE.clear()
    yield
    exchange_utils._PG_DIST_CACHE.clear()


def group_of(channel: GroupChannel) -> ProcessGroup:
    """The process group itself, as users of the face hand it in."""
    return cast("ProcessGroup", channel.group)


def dealt(state: State, channel: Channel) -> ckptx.exchange_utils.ShardDistribution:
    found = determine_main_replica_uniform_distribution(
        state, channel, ignore_groups=True, timeout=5
    )
    assert found is not None
    return found


def split(state: State, channel: Channel) -> tuple[Tensors, dict[ShardId, ShardedTensor], Any]:
    """What this rank loads (its own data), and what it needs from others (without data)."""
    distribution = dealt(state, channel)
    loaded: Tensors = {}
    needed: dict[ShardId, ShardedTensor] = {}
    for shard in state.values():
        if distribution.main_rank_for_shard[shard.shard_id] == channel.index:
            assert shard.data is not None
            loaded[shard.shard_id] = shard.data
        else:
            needed[shard.shard_id] = shard.without_data()
    return loaded, needed, distribution


def three_ranks(rank: int) -> State:
    """Example 8: A on all ranks, B on two, U on each its own. Rank r loads 10 * r + 1."""
    state = {
        "A": rank_offsets("A", torch.full((2,), 10.0 * rank + 1), replica_id=rank),
        "U": rank_offsets("U", torch.full((1,), 10.0 * rank + 1), (0, rank, 3)),
    }
    if rank < 2:
        state["B"] = rank_offsets("B", torch.full((3,), 10.0 * rank + 1), replica_id=rank)
    return state


# Worked example 8


@ALL
def test_example_three_ranks_partial_need(algorithm: str) -> None:
    def job(channel: GroupChannel) -> dict[str, list[float]]:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        found = exchange_by_distribution(
            loaded, needed, distribution, group_of(channel), algorithm, timeout=5
        )
        return {f"{name[0]}{name[1][0]}": tensor.tolist() for name, tensor in found.items()}

    found = rank_threads(3, job).values()
    if algorithm == "gather_object":
        everything = {"U0": [1.0], "B0": [1.0] * 3, "U1": [11.0], "A0": [11.0] * 2, "U2": [21.0]}
        assert all(result == everything for result in found)
    else:
        assert found[0] == {"U0": [1.0], "B0": [1.0] * 3, "A0": [11.0, 11.0]}
        assert found[1] == {"U1": [11.0], "A0": [11.0, 11.0], "B0": [1.0] * 3}
        assert found[2] == {"U2": [21.0], "A0": [11.0, 11.0]}


def test_the_named_functions_are_the_algorithms() -> None:
    def job(channel: GroupChannel) -> list[list[str]]:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        return [
            sorted(f"{name[0]}{name[1][0]}" for name in run(loaded, needed, distribution, channel))
            for run in (
                exchange_loaded_tensors_broadcast,
                exchange_loaded_tensors_gather_rounds,
                exchange_loaded_tensors_gather_object,
            )
        ]

    found = rank_threads(3, job).values()
    assert found[2] == [["A0", "U2"], ["A0", "U2"], ["A0", "B0", "U0", "U1", "U2"]]


@ALL
def test_the_default_is_the_default_group_of_one_rank(algorithm: str) -> None:
    shard = rank_offsets("w", torch.arange(4.0))
    distribution = _build_shard_distribution([[shard]], True)
    assert shard.data is not None
    loaded = {shard.shard_id: shard.data}
    found = exchange_by_distribution(loaded, {}, distribution, exchange_algo=algorithm)
    assert found == loaded


# Errors of the examples


@ALL
def test_the_errors_of_the_examples(algorithm: str) -> None:
    shard = rank_offsets("w", torch.zeros(2))
    name = shard.shard_id
    with pytest.raises(NotImplementedError, match="'ring' is none of broadcast"):
        exchange_by_distribution({}, {}, _build_shard_distribution([[]], True), None, "ring")
    if algorithm == "gather_object":
        return
    with pytest.raises(AssertionError, match="shard_distribution") as caught:
        exchange_by_distribution({}, {}, None, None, algorithm)
    assert isinstance(caught.value, CheckpointingException)
    distribution = _build_shard_distribution([[shard], []], True)
    strange = distribution._replace(main_rank_for_shard={name: 1})

    def alone(channel: Channel) -> None:
        loaded = {name: torch.zeros(2)} if channel.rank == 1 else {}
        needed = {} if channel.rank == 1 else {name: shard.without_data()}
        exchange_by_distribution(loaded, needed, strange, channel, algorithm, timeout=5)

    errors = rank_threads(2, alone).raised(AssertionError, within_s=5)
    assert all("rank 0 alone needs it, but rank 1 loads it" in str(error) for error in errors)


@NEED_ONLY
def test_a_loader_without_its_tensor_fails_all_ranks(algorithm: str) -> None:
    def job(channel: Channel) -> None:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        if channel.rank == 1:
            del loaded["A", (0,), None]
        exchange_by_distribution(loaded, needed, distribution, channel, algorithm, timeout=5)

    errors = rank_threads(3, job).raised(CheckpointPeerError, within_s=5)
    for error in errors:
        assert list(error.failures) == [1]
        assert "A at [0]" in error.failures[1]
        assert isinstance(error, PeerError)
    assert isinstance(errors[1].__cause__, AssertionError)


def test_a_shard_that_two_ranks_loaded_is_named_on_all() -> None:
    def job(channel: Channel) -> None:
        loaded: Tensors = {("w", (0,), None): torch.zeros(1)} if channel.rank < 2 else {}
        exchange_loaded_tensors_gather_object(loaded, {}, None, channel)

    errors = rank_threads(3, job).raised(CheckpointingException, within_s=5)
    assert all("Duplicate shard ids: loaded by ranks [0, 1]" in str(error) for error in errors)


@NEED_ONLY
def test_vllm_50959_a_rank_that_lacks_a_key_hangs_nobody(algorithm: str) -> None:
    """Rank 1 does not ask for a shard that is dealt out to it: all name rank and key."""

    def job(channel: Channel) -> None:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        if channel.rank == 1:
            del needed["B", (0,), None]
        exchange_by_distribution(loaded, needed, distribution, channel, algorithm, timeout=5)

    for error in rank_threads(3, job).raised(CheckpointPeerError, within_s=5):
        assert "B at [0]" in error.failures[1]


@ALL
def test_a_shard_that_nobody_deals_out_is_not_dropped(algorithm: str) -> None:
    def job(channel: Channel) -> None:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        if channel.rank == 2:
            needed["new", (0,), None] = rank_offsets("new", torch.zeros(1)).without_data()
        exchange_by_distribution(loaded, needed, distribution, channel, algorithm, timeout=5)

    for error in rank_threads(3, job).raised(CheckpointPeerError, within_s=5):
        assert "new at [0]" in error.failures[2]


@NEED_ONLY
def test_ranks_with_different_distributions_disagree(algorithm: str) -> None:
    def job(channel: Channel) -> None:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        if channel.rank == 1:
            name = ("B", (0,), None)
            distribution.all_ranks_for_shard[name].remove(1)
            del needed[name]
        exchange_by_distribution(loaded, needed, distribution, channel, algorithm, timeout=5)

    errors = rank_threads(3, job).raised(CheckpointDisagreement, within_s=5)
    assert all(isinstance(error, DisagreementError) for error in errors)


@NEED_ONLY
def test_dtypes_that_differ_between_ranks_are_found(algorithm: str) -> None:
    """A broadcast of float32 into int32 delivers other numbers, and no error."""

    def job(channel: Channel) -> None:
        dtype = torch.int32 if channel.rank == 1 else torch.float32
        shard = rank_offsets("w", torch.ones(4, dtype=dtype), replica_id=channel.rank)
        distribution = _build_shard_distribution([[shard], [shard]], True)
        name = shard.shard_id
        mine = distribution.main_rank_for_shard[name] == channel.rank
        exchange_by_distribution(
            {name: torch.ones(4, dtype=dtype)} if mine else {},
            {} if mine else {name: shard.without_data()},
            distribution,
            channel,
            algorithm,
            timeout=5,
        )

    rank_threads(2, job).raised(CheckpointDisagreement, within_s=5)


def test_a_tensor_that_does_not_fit_its_shard_fails_all_ranks() -> None:
    def job(channel: Channel) -> None:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        if channel.rank == 0:
            loaded["B", (0,), None] = torch.zeros(4)
        exchange_by_distribution(loaded, needed, distribution, channel, "planned", timeout=5)

    for error in rank_threads(3, job).raised(CheckpointPeerError, within_s=5):
        assert "B at [0]: expected torch.float32 (3,), loaded torch.float32 (4,)" in str(error)


def test_algorithms_that_differ_between_ranks_are_found() -> None:
    def job(channel: Channel) -> None:
        loaded, needed, distribution = split(three_ranks(channel.rank), channel)
        algorithm = "planned" if channel.rank else "broadcast"
        exchange_by_distribution(loaded, needed, distribution, channel, algorithm, timeout=5)

    errors = rank_threads(3, job).raised(CheckpointDisagreement, within_s=5)
    assert "'algorithm': 'broadcast'" in str(errors[0]) or "broadcast" in str(errors[0])


# Metadata and distributions


def test_the_gathered_shards_are_those_of_every_rank() -> None:
    def job(channel: GroupChannel) -> list[list[ShardedTensor]]:
        state = {
            "nested": [{"w": rank_offsets("w", torch.ones(2, 3), (0, channel.rank, 2))}],
            "tuple": (rank_offsets("hidden", torch.ones(1)),),
            "n": 3,
        }
        return _gather_shards_metadata(state, group_of(channel), timeout=5)

    expected = [
        [rank_offsets("w", torch.ones(2, 3), (0, rank, 2)).without_data()] for rank in range(2)
    ]
    for found in rank_threads(2, job).values():
        assert found == expected


def test_gathering_fails_on_all_ranks_where_it_fails_on_one() -> None:
    class Odd:
        def __iter__(self) -> Iterator[int]:
            raise RuntimeError("no replica")

    def job(channel: Channel) -> None:
        shard = rank_offsets("w", torch.ones(2))
        if channel.rank == 1:
            shard.replica_id = Odd()  # type: ignore[assignment]
        _gather_shards_metadata({"w": shard}, channel, timeout=5)

    for error in rank_threads(2, job).raised(CheckpointPeerError, within_s=5):
        assert "no replica" in error.failures[1]


def test_a_group_of_one_has_no_distribution(tmp_path: Path) -> None:
    state = {"w": rank_offsets("w", torch.ones(2))}
    missing = tmp_path / "none"
    assert determine_main_replica_uniform_distribution(state, None) is None
    assert determine_main_replica_uniform_distribution(state, None, pg_cache_path=missing) is None
    assert not missing.exists()


def test_conflicting_shards_are_named_on_all_ranks() -> None:
    def job(channel: Channel) -> None:
        shard = rank_offsets("w", torch.ones(2 + channel.rank), replica_id=channel.rank)
        determine_main_replica_uniform_distribution({"w": shard}, channel, timeout=5)

    for error in rank_threads(2, job).raised(CheckpointingException, within_s=5):
        assert isinstance(error, PlanError)
        assert "rank 0 has" in str(error)
        assert "rank 1" in str(error)


def test_sizes_are_ints() -> None:
    assert _shard_size(rank_offsets("w", torch.ones(3, 4))) == 48
    assert type(_shard_size(rank_offsets("w", torch.ones(())))) is int


# The tensor that receives


def test_a_needed_shard_is_received_in_its_own_data() -> None:
    data = torch.zeros(2)
    shard = rank_offsets("w", data)
    loaded: Tensors = {}
    tensor, device = _get_empty_tensor_for_exchange(
        shard.shard_id, {shard.shard_id: shard}, {}, loaded
    )
    assert tensor is data
    assert device == torch.device("cpu")
    assert loaded[shard.shard_id] is data


def test_a_needed_shard_without_data_gets_a_new_tensor() -> None:
    shard = rank_offsets("w", torch.zeros(2, 3, dtype=torch.float8_e5m2)).without_data()
    loaded: Tensors = {}
    name = shard.shard_id
    tensor, device = _get_empty_tensor_for_exchange(name, {name: shard}, {}, loaded)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float8_e5m2, (2, 3))
    assert device == tensor.device
    assert loaded[name] is tensor
    assert shard.data is None


def test_a_shard_that_is_not_needed_is_received_beside_it() -> None:
    data = torch.zeros(2)
    shard = rank_offsets("w", data)
    loaded: Tensors = {}
    name = shard.shard_id
    tensor, device = _get_empty_tensor_for_exchange(name, {}, {name: shard}, loaded)
    assert tensor is not data
    assert tensor.shape == data.shape
    assert device is None
    assert loaded == {}
    with pytest.raises(KeyError):
        _get_empty_tensor_for_exchange(name, {}, {}, loaded)


def test_a_tensor_of_transformer_engine_is_told_by_its_class() -> None:
    kind = type("Float8Tensor", (torch.Tensor,), {"__module__": "transformer_engine.pytorch.fp8"})
    assert exchange_utils.is_float8tensor(torch.zeros(2).as_subclass(kind))
    assert not exchange_utils.is_float8tensor(torch.zeros(2, dtype=torch.float8_e4m3fn))


# Objects


def test_objects_of_a_single_rank_are_returned() -> None:
    name = ("rng", (0,), (1,))
    thing = object()
    assert exchange_loaded_objects_gather_object({name: thing}) == {name: thing}
