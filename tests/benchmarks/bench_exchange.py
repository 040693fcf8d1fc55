"""How fast shards are exchanged, beside Megatron-Core's own algorithms, as JSON.

Four ranks over gloo; every shard is replicated on all of them, and each rank has loaded its part.
`planned` is given the process group, or a channel that is kept from call to call as the group is,
so that the ranks of one host need not find each other again. All ways run in turn in the same
processes. Megatron-Core (`megatron-core==0.16.1`, if it is installed) has its CUDA calls pointed
at the CPU; it receives in place too, as it does on a GPU. Its gather_rounds is left out: gloo
refuses to gather tensors of unequal sizes. `raw` sends the same bytes with isend and irecv and
nothing else.

    python tests/benchmarks/bench_exchange.py [case ...]
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from ckptx import exchange_utils
from ckptx.exchange import ExchangeOptions, exchange
from ckptx.sharded import ShardedTensor, ShardId
from distcore.v1.runtime import Group, channel_over

RANKS = 4
ROUNDS = 9
KIB, MIB = 1 << 10, 1 << 20
PEER = "megatron.core.dist_checkpointing"
Tensors = dict[ShardId, torch.Tensor]
Shards = dict[ShardId, ShardedTensor]
Way = Callable[[], object]


def minilm() -> list[tuple[int, ...]]:
    """The shapes of a MiniLM with 6 layers: 104 tensors, 90.9 MB of float32."""
    side, wide = 384, 1536
    layer = [(side, side), (side,)] * 4 + [(side,)] * 4
    layer += [(wide, side), (wide,), (side, wide), (side,)]
    embeddings = [(30522, side), (512, side), (2, side), (side,), (side,), (1, 1024)]
    return [*embeddings, *layer * 6, (side, side), (side,)]


TARGETS = {"2000 x 16 KiB": 8.0, "MiniLM": 3.5, "32 x 16 MiB": 4.0}
RAW_AT_MOST = 1.25
DISTRIBUTE_AT_LEAST = 20.0
CASES: dict[str, Callable[[], list[tuple[int, ...]]]] = {
    "2000 x 16 KiB": lambda: [(16 * KIB // 4,)] * 2000,
    "MiniLM": minilm,
    "32 x 16 MiB": lambda: [(16 * MIB // 4,)] * 32,
}


def shards_of(shapes: Sequence[tuple[int, ...]], rank: int, kind: Any = ShardedTensor) -> list[Any]:
    """One rank's replica of every tensor."""
    return [
        kind.from_rank_offsets(f"t{at:05}", torch.full(shape, at % 7 + 0.5), replica_id=rank)
        for at, shape in enumerate(shapes)
    ]


def blank(shards: Shards) -> None:
    for shard in shards.values():
        if shard.data is not None:
            shard.data.zero_()


def peer_ways(shapes: Sequence[tuple[int, ...]], mains: dict[str, int]) -> dict[str, Way]:
    """Megatron-Core's algorithms on shards of its own."""
    try:
        mapping, module = import_module(f"{PEER}.mapping"), import_module(f"{PEER}.exchange_utils")
    except ImportError:
        return {}
    _point_at_cpu(module)
    shards = shards_of(shapes, dist.get_rank(), mapping.ShardedTensor)
    all_shards = [[shard.without_data() for shard in shards]] * dist.get_world_size()
    ids = {shard.key: (shard.key, shard.global_offset, None) for shard in shards}
    distribution = module.ShardDistribution(
        {ids[key]: main for key, main in mains.items()},
        set(ids.values()),
        {ids[shard.key]: shard for shard in all_shards[0]},
        {name: list(range(dist.get_world_size())) for name in ids.values()},
    )
    own = {key for key, main in mains.items() if main == dist.get_rank()}
    loaded = {ids[shard.key]: shard.data for shard in shards if shard.key in own}
    needed = {ids[shard.key]: shard for shard in shards if shard.key not in own}

    def run(algorithm: str) -> Way:
        return lambda: module.exchange_by_distribution(
            loaded, needed, distribution, dist.group.WORLD, algorithm
        )

    # Pickling hundreds of megabytes takes many seconds, and is never the best.
    small = sum(shard.data.nbytes for shard in shards) < 256 * MIB
    names = ("broadcast", "gather_object") if small else ("broadcast",)
    return {f"peer {name}": run(name) for name in names}


def _point_at_cpu(module: types.ModuleType) -> None:
    """Let a module that moves tensors to CUDA leave them where they are."""
    places = types.SimpleNamespace(**vars(torch))
    places.empty_like = lambda tensor, device=None: tensor
    vars(module)["torch"] = places
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def raw_way(
    loaded: Tensors, needed: dict[ShardId, ShardedTensor], mains: dict[ShardId, int]
) -> Way:
    """The same bytes, one message per shard and rank that needs it."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def run() -> None:
        works = []
        for name, main in mains.items():
            data = needed[name].data if main != rank else None
            if data is not None:
                works.append(dist.irecv(data, main))
        for name, main in mains.items():
            if main == rank:
                works += [dist.isend(loaded[name], (rank + step) % size) for step in range(1, size)]
        for work in works:
            if work is not None:
                work.wait()

    return run


def run_case(shapes: Sequence[tuple[int, ...]], opened: ExitStack) -> dict[str, Any]:
    """Time every way; the slowest rank counts, and of the rounds the median."""
    rank = dist.get_rank()
    shards = shards_of(shapes, rank)
    found = exchange_utils.determine_main_replica_uniform_distribution(
        {"shards": shards}, None, ignore_groups=True
    )
    if found is None:
        raise RuntimeError("one rank alone has nothing to exchange")
    mains = found.main_rank_for_shard
    loaded = {
        s.shard_id: s.data for s in shards if mains[s.shard_id] == rank and s.data is not None
    }
    needed = {s.shard_id: s for s in shards if mains[s.shard_id] != rank}
    expected = {name: float(shard.data.flatten()[-1]) for name, shard in needed.items()}

    def ours(algorithm: str, group: Group | None = None, **options: Any) -> Way:
        return lambda: exchange_utils.exchange_by_distribution(
            loaded, needed, found, group, algorithm, **options
        )

    channel = opened.enter_context(channel_over(None))
    ways = {
        "planned": ours("planned"),
        "planned on a kept channel": ours("planned", channel),
        "planned over sockets": ours("planned", same_host="off"),
        "broadcast": ours("broadcast"),
        "gather_rounds": ours("gather_rounds"),
        "raw": raw_way(loaded, needed, mains),
        **peer_ways(shapes, {name[0]: main for name, main in mains.items()}),
    }
    seconds, cpu_seconds = timed(ways)
    blank(needed)
    got, report = exchange(loaded, needed, found, channel, options=ExchangeOptions())
    if any(float(got[name].flatten()[-1]) != value for name, value in expected.items()):
        raise RuntimeError("a shard arrived with other values")
    peers = [way for way in ways if way.startswith("peer")]
    best, least = (min((t[way] for way in peers), default=0) for t in (seconds, cpu_seconds))
    return {
        "seconds": {way: round(value, 4) for way, value in seconds.items()},
        "cpu seconds": {way: round(value, 4) for way, value in cpu_seconds.items()},
        "planned is faster than the best peer by": ratio(best, seconds["planned"]),
        "on a kept channel by": ratio(best, seconds["planned on a kept channel"]),
        "and takes less CPU by": ratio(least, cpu_seconds["planned"]),
        "over sockets, times raw": ratio(seconds["planned over sockets"], seconds["raw"]),
        "bytes received": report.bytes_received,
        "lower bound": report.lower_bound_received,
    }


def rows_of(name: str, found: dict[str, Any]) -> list[dict[str, object]]:
    """The figures of one case beside their targets."""
    exact = {"nbytes": found["bytes received"], "bound_nbytes": found["lower bound"]}
    rows: list[dict[str, object]] = []
    for way, figure, also in (
        ("planned", "planned is faster than the best peer by", ""),
        ("planned on a kept channel", "on a kept channel by", ", on a kept channel"),
    ):
        row = {"name": f"exchange, {name}, over the best of Megatron-Core{also}", **exact}
        row |= {"target": TARGETS[name], "cpu_s": found["cpu seconds"][way]}
        if any(peer.startswith("peer") for peer in found["seconds"]):
            row["value"] = found[figure]
        else:
            row["skipped"] = "megatron-core is not installed"
        rows.append(row)
    raw = {"value": found["over sockets, times raw"], "target": RAW_AT_MOST, "at_most": True}
    return [*rows, {"name": f"exchange, {name}, sockets alone, times raw sends", **raw}]


def timed(ways: dict[str, Way]) -> tuple[dict[str, float], dict[str, float]]:
    """Wall seconds of the slowest rank and CPU seconds of all ranks, medians, by way."""
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            # As timeit does: no way pays for the garbage of the one before it.
            gc.collect()
            gc.disable()
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            run()
            wall_s = torch.tensor(time.perf_counter() - begin)
            cpu_s = torch.tensor(time.process_time() - cpu)
            gc.enable()
            dist.all_reduce(wall_s, dist.ReduceOp.MAX)
            dist.all_reduce(cpu_s, dist.ReduceOp.SUM)
            runs[way].append((float(wall_s), float(cpu_s)))
    wall = {way: statistics.median(w for w, _ in found[1:]) for way, found in runs.items()}
    return wall, {way: statistics.median(c for _, c in found[1:]) for way, found in runs.items()}


def ratio(one: float, other: float) -> float:
    return round(one / other, 2)


def plain_loop(
    ranks: dict[ShardId, list[int]], sizes: dict[ShardId, int], num_ranks: int
) -> dict[ShardId, int]:
    """The greedy rule in its plainest words: look at every rank for every shard."""
    loads = [(0, rank) for rank in range(num_ranks)]
    found = {}
    for name in sorted(ranks, key=lambda name: (len(ranks[name]), -sizes[name], name)):
        load, rank = min((load, rank) for load, rank in loads if rank in ranks[name])
        loads[rank] = (load + sizes[name], rank)
        found[name] = rank
    return found


def run_distribute() -> dict[str, Any]:
    """50 000 shards in 64 candidate sets over 1 024 ranks."""
    rng = random.Random(0)
    sets = [list(range(16 * at, 16 * at + 16)) for at in range(64)]
    names: list[ShardId] = [(f"t{at}", (at,), None) for at in range(50_000)]
    ranks = {name: sets[at % 64] for at, name in enumerate(names)}
    sizes = {name: rng.randrange(1 << 24) for name in names}
    runs = []
    found: dict[ShardId, int] = {}
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        found = exchange_utils.distribute_shards_to_ranks(ranks, sizes, 1024, set())
        runs.append(time.perf_counter() - begin)
    begin = time.perf_counter()
    plain = plain_loop(ranks, sizes, 1024)
    loop_s = time.perf_counter() - begin
    if list(found.items()) != list(plain.items()):
        raise RuntimeError("the two greedy rules differ")
    ours_s = statistics.median(runs)
    return {"ours_s": round(ours_s, 3), "loop_s": round(loop_s, 2), "ratio": ratio(loop_s, ours_s)}


def run_rank(wanted: Sequence[str]) -> None:
    """Measure as one of the ranks; rank 0 prints one JSON object per case."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name in wanted:
        if name in CASES:
            with ExitStack() as opened:
                figures = {name: run_case(CASES[name](), opened)}
            if dist.get_rank() == 0:
                found = {"benchmark": "exchange", "ranks": RANKS, "figures": figures}
                print(json.dumps({**found, "rows": rows_of(name, figures[name])}), flush=True)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, or be one."""
    wanted = sys.argv[1:] or [*CASES, "distribute"]
    if "RANK" in os.environ:
        run_rank(wanted)
        return
    if "distribute" in wanted:
        figures = run_distribute()
        name = "distribute_shards_to_ranks, over the document's loop"
        row = {"name": name, "value": figures["ratio"], "target": DISTRIBUTE_AT_LEAST}
        print(json.dumps({"benchmark": "distribute", "figures": figures, "rows": [row]}))
    if set(wanted) & set(CASES):
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run(
            [*launch, "--nproc-per-node", str(RANKS), __file__, *wanted],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=600,
        )


if __name__ == "__main__":
    main()
