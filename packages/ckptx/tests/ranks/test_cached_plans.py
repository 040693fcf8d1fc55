"""Cached plans on thread ranks: served when they are of the present shards, never when stale."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptx import CheckpointingException, CheckpointPeerError, StalePlanError, exchange_utils
from ckptx.cached_plans import PlanCache
from ckptx.exchange_utils import (
    ShardDistribution,
    _create_pg_dist_cache,
    _gather_shards_metadata,
    _load_pg_dist_cache,
    _pg_dist_cache_file_path,
)
from ckptx.sharded import ShardedTensor
from distcore.testing import rank_threads
from distcore.v1 import Channel, Message, PeerError, Pending
from distcore.v1.runtime import GroupChannel

State = dict[str, ShardedTensor]
rank_offsets = ShardedTensor.from_rank_offsets
# The ranks of a test are threads, and warnings are of the process: `warned` looks at them.
warned = pytest.mark.filterwarnings("default:the plan cache")


@pytest.fixture(autouse=True)
def fresh_memo() -> Iterator[None]:
    exchange_utils._PG_DIST_CACHE.clear()
    yield
    exchange_utils._PG_DIST_CACHE.clear()


def state_of(rank: int, *more: str) -> State:
    return {name: rank_offsets(name, torch.zeros(4), replica_id=rank) for name in ("w", *more)} | {
        "own": rank_offsets("own", torch.zeros(2), (0, rank, 2))
    }


class Counted:
    """A channel that keeps the length of every row that it gathers."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.rows: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        self.rows.append(len(row))
        return self._inner.all_gather(row, timeout_s=timeout_s)

    def start(
        self, sends: list[Message], receives: list[Message], *, timeout_s: float | None = None
    ) -> Pending:
        return self._inner.start(sends, receives, timeout_s=timeout_s)


def determine(state: State, channel: Any, path: Path, **options: Any) -> ShardDistribution:
    options = {"ignore_groups": True, "timeout": 5, **options}
    found = exchange_utils.determine_main_replica_uniform_distribution(
        state, channel, pg_cache_path=path, **options
    )
    assert found is not None
    return found


def create(path: Path, *more: str) -> None:
    def job(channel: Channel) -> None:
        determine(state_of(channel.rank, *more), channel, path, pg_cache_create=True)

    rank_threads(2, job).values()


def plain(state: State, channel: Channel) -> ShardDistribution:
    found = exchange_utils.determine_main_replica_uniform_distribution(
        state, channel, ignore_groups=True, timeout=5
    )
    assert found is not None
    return found


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("from_file", [False, True])
def test_a_read_gives_what_a_gather_would(tmp_path: Path, load: bool, from_file: bool) -> None:
    create(tmp_path)
    if from_file:
        exchange_utils._PG_DIST_CACHE.clear()

    def job(channel: Channel) -> tuple[Any, Any]:
        state = state_of(channel.rank)
        found = determine(state, channel, tmp_path, ignore_groups=load)
        expected = exchange_utils.determine_main_replica_uniform_distribution(
            state, channel, ignore_groups=load, timeout=5
        )
        return found, expected

    for found, expected in rank_threads(2, job).values():
        assert found == expected
        mains = expected.main_rank_for_shard
        assert list(found.main_rank_for_shard.items()) == list(mains.items())


@pytest.mark.parametrize("from_file", [False, True])
def test_tnt_1064_a_read_costs_32_bytes_per_rank(tmp_path: Path, from_file: bool) -> None:
    create(tmp_path)
    if from_file:
        exchange_utils._PG_DIST_CACHE.clear()

    def job(channel: Channel) -> list[int]:
        counted = Counted(channel)
        determine(state_of(channel.rank), counted, tmp_path)
        return counted.rows

    assert rank_threads(2, job).values() == ([32], [32])


def test_a_read_from_memory_needs_no_file(tmp_path: Path) -> None:
    create(tmp_path)
    for file in tmp_path.iterdir():
        file.unlink()
    rank_threads(2, lambda channel: determine(state_of(channel.rank), channel, tmp_path)).values()


def test_trust_asks_no_other_rank(tmp_path: Path) -> None:
    create(tmp_path)
    exchange_utils._PG_DIST_CACHE.clear()

    def job(channel: Channel) -> list[int]:
        counted = Counted(channel)
        determine(state_of(channel.rank), counted, tmp_path, trust=True)
        return counted.rows

    assert rank_threads(2, job).values() == ([], [])


@warned
@pytest.mark.parametrize("from_file", [False, True])
def test_megatron_4378_a_new_shard_is_never_dropped(tmp_path: Path, from_file: bool) -> None:
    """A plan that does not know it would have every rank take it for another's."""
    create(tmp_path)
    if from_file:
        exchange_utils._PG_DIST_CACHE.clear()

    def job(channel: Channel) -> tuple[bool, bool]:
        found = determine(state_of(channel.rank, "new"), channel, tmp_path, ignore_groups=False)
        name = ("new", (0,), None)
        return name in found.shards_in_this_group, name in found.main_rank_for_shard

    with pytest.warns(UserWarning, match="does not know the present shards"):
        assert rank_threads(2, job).values() == ((True, True),) * 2


@warned
def test_a_shard_that_is_new_on_one_rank_alone_is_never_dropped(tmp_path: Path) -> None:
    """The other rank finds its own shards in the cache, and yet must not obey it."""
    create(tmp_path)

    def job(channel: Channel) -> int:
        more = ["new"] if channel.rank == 1 else []
        found = determine(state_of(channel.rank, *more), channel, tmp_path)
        return found.main_rank_for_shard["new", (0,), None]

    with pytest.warns(UserWarning, match=r"ranks \[0, 1\] have no plan"):
        assert rank_threads(2, job).values() == (1, 1)


@pytest.mark.parametrize("options", [{"on_stale": "error"}, {"trust": True}])
def test_a_stale_plan_can_be_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    create(tmp_path)

    def job(channel: Channel) -> None:
        determine(state_of(channel.rank, "new"), channel, tmp_path, **options)

    errors = rank_threads(2, job).raised(StalePlanError, within_s=5)
    assert all(isinstance(error, CheckpointingException) for error in errors)


@warned
@pytest.mark.parametrize("change", ["dtype", "shape", "replica"])
def test_any_change_of_a_shard_makes_a_plan_stale(tmp_path: Path, change: str) -> None:
    create(tmp_path)

    def job(channel: Channel) -> ShardDistribution:
        state = state_of(channel.rank)
        if change == "dtype":
            like = torch.zeros(4, dtype=torch.float64)
            state["w"] = rank_offsets("w", like, replica_id=channel.rank)
        elif change == "shape":
            state["w"] = rank_offsets("w", torch.zeros(5), replica_id=channel.rank)
        else:
            state["w"] = rank_offsets("w", torch.zeros(4), replica_id=1 + channel.rank)
        found = determine(state, channel, tmp_path)
        assert found == plain(state, channel)
        return found

    with pytest.warns(UserWarning, match="is not used"):
        rank_threads(2, job).values()


def test_several_layouts_serve_in_turn_without_a_warning(tmp_path: Path) -> None:
    create(tmp_path)
    create(tmp_path, "new")

    def job(channel: Channel) -> list[bool]:
        found = []
        for more in ([], ["new"], [], ["new"]):
            plans = determine(state_of(channel.rank, *more), channel, tmp_path)
            found.append(("new", (0,), None) in plans.main_rank_for_shard)
        return found

    assert rank_threads(2, job).values() == ([False, True, False, True],) * 2


def test_layouts_that_are_alike_on_one_rank_are_told_apart(tmp_path: Path) -> None:
    """Rank 0 holds the same in both; only rank 1 knows which one is present."""

    def made(channel: Channel) -> None:
        for more in ([], ["new"]):
            state = state_of(channel.rank, *(more if channel.rank else []))
            determine(state, channel, tmp_path, pg_cache_create=True)

    rank_threads(2, made).values()

    def job(channel: Channel) -> list[bool]:
        found = []
        for more in (["new"], [], ["new"]):
            state = state_of(channel.rank, *(more if channel.rank else []))
            plans = determine(state, channel, tmp_path)
            found.append(("new", (0,), None) in plans.main_rank_for_shard)
        return found

    assert rank_threads(2, job).values() == ([True, False, True],) * 2

    def trusting(channel: Channel) -> None:
        # A memo each, as processes have.
        file = _pg_dist_cache_file_path(tmp_path, channel)
        PlanCache(file, {}, channel).trust(state_of(channel.rank))

    outcomes = rank_threads(2, trusting)
    assert isinstance(outcomes[0].exception, StalePlanError)
    assert "2 layouts have this rank's shards" in str(outcomes[0].exception)
    assert outcomes[1].exception is None


def test_two_groups_with_the_same_lowest_rank_do_not_meet(tmp_path: Path) -> None:
    """Ranks 0 and 1, then all three: both in one directory, each with its own plan."""

    def job(channel: Channel) -> tuple[int, ...]:
        state = state_of(channel.rank)
        return tuple(determine(state, channel, tmp_path, pg_cache_create=True)[0].values())

    def three(channel: Channel) -> int:
        state = {"w": rank_offsets("w", torch.zeros(4), (0, channel.rank, 3))}
        return len(determine(state, channel, tmp_path, pg_cache_create=True)[0])

    rank_threads(2, job).values()
    assert rank_threads(3, three).values() == (3, 3, 3)
    exchange_utils._PG_DIST_CACHE.clear()

    def read(channel: Channel) -> ShardDistribution:
        return determine(state_of(channel.rank), channel, tmp_path, on_stale="error")

    rank_threads(2, read).values()
    assert len(list(tmp_path.iterdir())) == 2


@warned
@pytest.mark.parametrize("on_stale", ["replan", "error"])
def test_a_damaged_file_is_as_good_as_stale(tmp_path: Path, on_stale: str) -> None:
    create(tmp_path)
    exchange_utils._PG_DIST_CACHE.clear()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-40])

    def job(channel: Channel) -> None:
        determine(state_of(channel.rank), channel, tmp_path, on_stale=on_stale)

    if on_stale == "error":
        rank_threads(2, job).raised(StalePlanError, within_s=5)
    else:
        with pytest.warns(UserWarning, match="is no plan cache"):
            rank_threads(2, job).values()


@pytest.mark.parametrize("trust", [False, True])
def test_a_directory_without_a_file_is_an_error_on_every_rank(tmp_path: Path, trust: bool) -> None:
    def job(channel: Channel) -> None:
        determine(state_of(channel.rank), channel, tmp_path, trust=trust)

    rank_threads(2, job).raised(FileNotFoundError, within_s=5)


def test_a_file_that_one_rank_cannot_see_fails_all(tmp_path: Path) -> None:
    create(tmp_path)
    exchange_utils._PG_DIST_CACHE.clear()

    def job(channel: Channel) -> None:
        path = tmp_path if channel.rank == 0 else tmp_path / "elsewhere"
        plans = PlanCache(_pg_dist_cache_file_path(path, channel), {}, channel, timeout_s=5)
        plans.read(state_of(channel.rank), on_stale="replan")

    for error in rank_threads(2, job).raised(PeerError, within_s=5):
        assert list(error.failures) == [1]
        assert "FileNotFoundError" in error.failures[1]


def test_a_cache_that_cannot_be_written_fails_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")

    def job(channel: Channel) -> None:
        determine(state_of(channel.rank), channel, tmp_path / "file", pg_cache_create=True)

    for error in rank_threads(2, job).raised(CheckpointPeerError, within_s=5):
        assert list(error.failures) == [0]


@pytest.mark.parametrize("create_it", [False, True])
def test_shards_that_one_rank_cannot_describe_fail_all(tmp_path: Path, create_it: bool) -> None:
    create(tmp_path)

    def job(channel: Channel) -> None:
        state = state_of(channel.rank)
        if channel.rank == 1:
            state["w"].replica_id = object()  # type: ignore[assignment]
        determine(state, channel, tmp_path, pg_cache_create=create_it)

    for error in rank_threads(2, job).raised(CheckpointPeerError, within_s=5):
        assert list(error.failures) == [1]


def test_a_second_create_is_served_from_memory(tmp_path: Path) -> None:
    create(tmp_path)
    (file,) = tmp_path.iterdir()
    file.unlink()
    create(tmp_path)
    assert list(tmp_path.iterdir()) == []
    create(tmp_path, "new")
    assert list(tmp_path.iterdir()) == [file]


def test_the_names_of_the_document_hold_both_distributions(tmp_path: Path) -> None:
    def job(channel: GroupChannel) -> dict[bool, ShardDistribution]:
        all_shards = _gather_shards_metadata(state_of(channel.rank), channel, timeout=5)
        return _create_pg_dist_cache(all_shards, tmp_path, channel, timeout=5)

    first, second = rank_threads(2, job).values()
    assert first == second
    assert set(first) == {False, True}
    (file,) = tmp_path.iterdir()
    assert _load_pg_dist_cache(str(file)) == first
    with pytest.raises(FileNotFoundError):
        _load_pg_dist_cache(str(tmp_path / "none"))


def test_a_plan_that_somebody_put_into_the_memo_is_not_obeyed(tmp_path: Path) -> None:
    """It says nothing of the shards that it was made for."""
    create(tmp_path)
    (file,) = exchange_utils._PG_DIST_CACHE
    empty = ShardDistribution({}, set(), {}, {})
    exchange_utils._PG_DIST_CACHE[file] = {False: empty, True: empty}

    def job(channel: Channel) -> int:
        return len(determine(state_of(channel.rank), channel, tmp_path).main_rank_for_shard)

    assert rank_threads(2, job).values() == (3, 3)
