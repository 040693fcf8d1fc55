"""What was reported against Megatron-Core's exchange still happens there, in 0.16.1.

Each test gives one input to Megatron-Core, where it goes wrong as reported, and to ckptx, where
it does not. Its CUDA calls are pointed at the CPU. Where planning needs what all ranks have, it
is given that without a group; what goes over a wire goes over gloo, between two processes.

Not here: a plan cache on the disk, which 0.16.1 has not yet (so neither pickles in it nor groups
that meet in one file); the corruption of `gather_rounds`, which was seen on GPUs (over gloo it
refuses tensors of unequal sizes, and that is tested); quantised tensors of Transformer Engine
(megatron 1126 and 6666), which is not installed; and memory of a GPU (megatron 2339).
"""

from __future__ import annotations

import time
import types
from collections.abc import Iterator, Sequence
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptx import CheckpointPlanError, StoredTensor, plan_load
from ckptx.distribution import distribution_of, shard_rows
from ckptx.exchange import ExchangeOptions, exchange
from ckptx.sharded import ShardedTensor
from ckptx.stored import Chunk
from distcore.testing import Outcomes, RankPool, rank_pool, rank_threads
from distcore.v1 import Channel, Layout, PeerError, Region

PEER = "megatron.core.dist_checkpointing"

pytestmark = pytest.mark.filterwarnings("ignore")


def peer(name: str) -> Any:
    """A module of Megatron-Core that uses the CPU for CUDA."""
    module = import_module(f"{PEER}.{name}")
    places = types.SimpleNamespace(**vars(torch))
    places.empty_like = lambda tensor, device=None: tensor
    places.empty = lambda *args, device=None, **rest: torch.empty(*args, **rest)  # noqa: PLW0108
    vars(module)["torch"] = places
    return module


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(PEER, reason="megatron-core is not installed")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *_, **__: self)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    pytest.importorskip(PEER, reason="megatron-core is not installed")
    with rank_pool(2) as pool:
        # To import it takes longer than all tests together.
        pool.run(loaded, deadline_s=110).values()
        yield pool


def loaded(_: Channel) -> None:
    peer("exchange_utils")


def theirs(key: str, value: torch.Tensor, *, replica: int = 0) -> Any:
    kind = import_module(f"{PEER}.mapping").ShardedTensor
    return kind.from_rank_offsets(key, value, replica_id=replica)


def ours(key: str, value: torch.Tensor, *, replica: int = 0) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, value, replica_id=replica)


def planned(
    module: Any,
    shards: Sequence[Sequence[Any]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    loads: bool = True,
) -> Any:
    """The distribution that each rank would compute, given the shards of all ranks."""
    rows = [[shard.without_data() for shard in row] for row in shards]

    def gathered(found: list[Any], _: Any, group: Any = None) -> None:
        found[:] = rows

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    monkeypatch.setattr(module, "get_pg_size", lambda group=None: len(rows))
    return module.determine_main_replica_uniform_distribution({"s": shards[0]}, "group", loads)


# Planning


def test_orbax_megatron_one_huge_tensor_goes_to_one_rank() -> None:
    """Sizes 1024 and eight times 1 on eight ranks: at most 1024, where 129 is possible."""
    sizes = {"e": 1024, **{f"s{i}": 1 for i in range(8)}}
    ranks = {key: list(range(8)) for key in sizes}
    dealt = peer("exchange_utils").distribute_shards_to_ranks(ranks, sizes, 8, set())
    loads = [sum(sizes[key] for key, to in dealt.items() if to == rank) for rank in range(8)]
    assert loads == [1024, 2, 1, 1, 1, 1, 1, 1]

    stored, begin = {}, 0
    for key, size in sizes.items():
        chunk = Chunk(Region((0, 0), (size, 100)), "file", begin)
        stored[key] = StoredTensor((size, 100), "int8", (chunk,))
        begin += stored[key].nbytes
    needs = {
        key: Layout.replicated(shape=(size, 100), dtype="int8", ranks=range(8))
        for key, size in sizes.items()
    }
    plan = plan_load(needs, stored, range(8), min_split=100)
    assert max(plan.read_nbytes(rank) for rank in range(8)) <= 131 * 100


def test_tied_weights_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held twice by rank 0 and not at all by rank 1, `tied` seems to have a choice of two."""
    value = torch.zeros(4)
    module = peer("exchange_utils")
    found = planned(module, [[theirs("tied", value)] * 2, []], monkeypatch)
    assert list(found.all_ranks_for_shard.values()) == [[0, 0]]
    right = distribution_of(shard_rows([[ours("tied", value)] * 2, []]), 2, ignore_groups=True)
    assert list(right.all_ranks_for_shard.values()) == [[0]]


def test_megatron_bridge_5862_two_mains_are_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.zeros(4)
    module = peer("exchange_utils")
    found = planned(module, [[theirs("w", value)]] * 2, monkeypatch, loads=False)
    assert list(found.main_rank_for_shard.values()) == [0]
    with pytest.raises(CheckpointPlanError, match=r"w at \(0,\): ranks \[0, 1\]"):
        distribution_of(shard_rows([[ours("w", value)]] * 2), 2, ignore_groups=False)


def test_the_first_rank_decides_what_a_shard_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that take it for float32 and int32 are not told."""
    kinds = torch.float32, torch.int32
    shards = [[theirs("w", torch.zeros(4, dtype=kind))] for kind in kinds]
    found = planned(peer("exchange_utils"), shards, monkeypatch)
    assert [shard.dtype for shard in found.shard_to_metadata.values()] == [torch.float32]
    with pytest.raises(CheckpointPlanError, match="int32"):
        distribution_of(
            shard_rows([[ours("w", torch.zeros(4, dtype=kind))] for kind in kinds]),
            2,
            ignore_groups=True,
        )


def test_megatron_4378_a_new_shard_is_written_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a cached plan, what the plan does not know becomes a copy on every rank.

    ckptx plans anew (test_cached_plans).
    """
    module, wrapper = peer("exchange_utils"), peer("strategies.fully_parallel")
    shards = [[theirs("A", torch.zeros(4), replica=rank)] for rank in range(2)]
    cached = planned(module, shards, monkeypatch)
    replicas = {}
    for rank in range(2):
        monkeypatch.setattr(wrapper, "get_pg_size", lambda group=None: 2)
        monkeypatch.setattr(wrapper, "get_pg_rank", lambda group=None, rank=rank: rank)
        base = types.SimpleNamespace(backend="torch_dist", version=1)
        strategy = wrapper.FullyParallelSaveStrategyWrapper(base, "group", True)
        strategy.cached_distribution = cached
        state = {key: theirs(key, torch.zeros(4), replica=rank) for key in ("A", "NEW")}
        strategy.apply_saving_parallelization(state)
        replicas[rank] = {key: shard.replica_id for key, shard in state.items()}
    assert sorted(found["A"] for found in replicas.values()) == [0, 1]
    assert [found["NEW"] for found in replicas.values()] == [1, 1]


def test_expert_parallel_bytes_go_to_ranks_that_do_not_need_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 ranks, 64 experts of 100 bytes needed by 2 each, 400 bytes by all: 102 000 received.

    ckptx receives 12 400 (test_exchange); each rank's broadcasts are counted here, not carried.
    """
    module = peer("exchange_utils")
    holders = {f"e{i:02}": (i // 8, i // 8 + 8) for i in range(64)} | {"all": tuple(range(16))}
    values = {key: torch.zeros(400 if key == "all" else 100, dtype=torch.uint8) for key in holders}
    shards = [
        [
            theirs(key, values[key], replica=ranks.index(rank))
            for key, ranks in holders.items()
            if rank in ranks
        ]
        for rank in range(16)
    ]
    found = planned(module, shards, monkeypatch)
    received = 0
    for rank in range(16):

        def count(tensor: Any, *_: Any, rank: int = rank, **options: Any) -> None:
            nonlocal received
            received += tensor.nbytes * (options.get("src", _[0] if _ else None) != rank)

        monkeypatch.setattr(dist, "broadcast", count)
        monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
        monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
        monkeypatch.setattr(module, "get_pg_rank", lambda group=None, rank=rank: rank)
        mains = found.main_rank_for_shard
        ids = {(shard.key, shard.global_offset, None): shard for shard in shards[rank]}
        loaded = {name: shard.data for name, shard in ids.items() if mains[name] == rank}
        needed = {name: shard for name, shard in ids.items() if mains[name] != rank}
        for shard in found.shard_to_metadata.values():
            shard.init_data("cpu")
        module.exchange_loaded_tensors_broadcast(loaded, needed, found, "group")
    assert received == 102_000


# Over gloo


def run_theirs(
    values: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    algorithm: str,
    *,
    absent: str | None = None,
    timeout_s: float = 20,
) -> dict[str, torch.Tensor]:
    """An exchange of Megatron-Core; rank 0 has not loaded `absent`."""
    module = peer("exchange_utils")
    # The fixture has pointed it at the CPU in the process of the tests only.
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    rank = dist.get_rank()
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    shards = [theirs(key, targets[key], replica=rank) for key in values]
    found = module.determine_main_replica_uniform_distribution({"s": shards}, group, True)
    mains = found.main_rank_for_shard
    ids = {shard.key: (shard.key, shard.global_offset, None) for shard in shards}
    loaded = {ids[key]: value for key, value in values.items() if mains[ids[key]] == rank}
    needed = {ids[shard.key]: shard for shard in shards if ids[shard.key] not in loaded}
    if absent is not None and rank == 0:
        loaded.pop(ids[absent])
    arrived = module.exchange_by_distribution(loaded, needed, found, group, algorithm)
    return {key: arrived[ids[key]] for key in values}


def run_ours(
    values: dict[str, torch.Tensor],
    targets: dict[str, torch.Tensor],
    algorithm: str,
    *,
    absent: str | None = None,
) -> Outcomes[dict[str, torch.Tensor]]:
    """The same, on two threads."""

    def job(channel: Channel) -> dict[str, torch.Tensor]:
        rank = channel.rank
        shards = [ours(key, targets[key].clone(), replica=rank) for key in values]
        rows = [[s.without_data() for s in shards]] * 2
        found = distribution_of(shard_rows(rows), 2, ignore_groups=True)
        mains = found.main_rank_for_shard
        loaded = {s.shard_id: values[s.key] for s in shards if mains[s.shard_id] == rank}
        needed = {s.shard_id: s for s in shards if s.shard_id not in loaded}
        if absent is not None and rank == 0:
            loaded = {name: value for name, value in loaded.items() if name[0] != absent}
        arrived, _ = exchange(
            loaded,
            needed,
            found,
            channel,
            algorithm=algorithm,
            options=ExchangeOptions(timeout_s=10),
        )
        return {name[0]: tensor for name, tensor in arrived.items()}

    return rank_threads(2, job)


def transposed() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    return {"w": torch.arange(6.0).view(2, 3).t()}, {"w": torch.zeros(3, 2)}


def broadcast_transposed(_: Channel) -> list[list[float]]:
    found: list[list[float]] = run_theirs(*transposed(), "broadcast")["w"].tolist()
    return found


def test_pytorch_192920_a_transposed_tensor_arrives_in_another_order(pool: RankPool) -> None:
    wrong: Any = pool.run(broadcast_transposed).values()[1]
    assert wrong == [[0, 1], [2, 3], [4, 5]]
    for algorithm in ("broadcast", "gather_rounds", "planned"):
        for found in run_ours(*transposed(), algorithm).values():
            assert found["w"].tolist() == [[0, 3], [1, 4], [2, 5]]


def unequal() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    values = {"a": torch.arange(7.0), "b": torch.arange(5.0), "c": torch.arange(9).bfloat16()}
    return values, {key: torch.zeros_like(value) for key, value in values.items()}


def gather_unequal(_: Channel) -> str:
    try:
        run_theirs(*unequal(), "gather_rounds")
    except RuntimeError as error:
        return str(error)
    return ""


def test_megatron_3738_rounds_of_unequal_sizes_do_not_run(pool: RankPool) -> None:
    for text in pool.run(gather_unequal).values():
        assert "invalid tensor size" in str(text)
    values, targets = unequal()
    for found in run_ours(values, targets, "gather_rounds").values():
        assert all(torch.equal(found[key], value) for key, value in values.items())


def float8() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    codes = torch.arange(256, dtype=torch.uint8)
    return {"w": codes.view(torch.float8_e4m3fn)}, {
        "w": torch.zeros(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    }


def broadcast_float8(_: Channel) -> str:
    try:
        run_theirs(*float8(), "broadcast")
    except RuntimeError as error:
        return str(error)
    return ""


def test_fastsafetensors_54_float8_is_not_sent(pool: RankPool) -> None:
    """Reported of another loader; Megatron-Core's broadcast has the same limit over gloo."""
    assert pool.run(broadcast_float8).values() == ("Invalid scalar type",) * 2
    values, targets = float8()
    for found in run_ours(values, targets, "broadcast").values():
        assert torch.equal(found["w"].view(torch.uint8), values["w"].view(torch.uint8))


def broadcast_without(_: Channel) -> tuple[float, str]:
    started = time.monotonic()
    values, targets = unequal()
    try:
        run_theirs(values, targets, "broadcast", absent="a", timeout_s=3)
    except (AssertionError, RuntimeError) as error:
        return time.monotonic() - started, f"{type(error).__name__}: {error}"
    return time.monotonic() - started, ""


def test_vllm_50959_a_rank_that_fails_lets_the_others_wait(pool: RankPool) -> None:
    """Rank 0 lacks a shard: it fails at once, and rank 1 waits for it until the group's timeout.

    Reported of loaders that hang so; here the group was told to wait no longer than 3 s.
    """
    found: Any = pool.run(broadcast_without).values()
    assert found[0][1].startswith("AssertionError")
    assert found[1][0] >= 2.5
    assert "'a'" not in found[1][1]
    values, targets = unequal()
    for error in run_ours(values, targets, "broadcast", absent="a").raised(PeerError, within_s=2):
        assert list(error.failures) == [0]
        assert "a at [0]" in error.failures[0]
