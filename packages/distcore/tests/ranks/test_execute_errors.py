"""Execute: what is wrong on one rank is the same typed error on all, with rank and key, in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import pytest
import torch

from distcore.testing import RankPool, rank_threads
from distcore.v1 import Channel, Piece, Plan, Region, Transfer
from distcore.v1.errors import (
    ChannelError,
    ChannelTimeout,
    DisagreementError,
    PeerError,
    PlanError,
)
from distcore.v1.runtime import Executor, Shard, agree, execute
from distcore.v1.runtime.staging import Slot

REGION = Region((0, 0), (4, 3))
PLAN = Plan([Transfer("w", src, dst, REGION) for src, dst in ((0, 1), (1, 2), (2, 0))])
WITHIN_S = 3.0

Values = dict[str, Any]


def tensors(**more: Any) -> Values:
    return {"w": torch.zeros(4, 3), **more}


def then_works(channel: Channel) -> None:
    """What went wrong before has left the channel as it was."""
    target = torch.zeros(4, 3)
    execute(PLAN, channel, {"w": torch.full((4, 3), 7.0)}, {"w": target})
    assert target.unique().tolist() == [7.0]


def moves(plan: Plan, channel: Channel, sources: Values, destinations: Values) -> None:
    """Execute, which must fail with nothing written and leave the channel usable."""
    dense = [
        value
        for value in destinations.values()
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_meta
    ]
    before = [value.clone() for value in dense]
    try:
        execute(plan, channel, sources, destinations, timeout=10)
    finally:
        assert all(torch.equal(*pair) for pair in zip(before, dense, strict=True))
        then_works(channel)


# Tensors that do not fit the plan, on one rank


def with_gap() -> Shard:
    return Shard(torch.zeros(3, 3), (Piece(Region((1, 0), (4, 3)), (0, 0)),))


MISFITS: dict[str, tuple[Values, str]] = {
    "missing": ({}, "no {side} of this name was given"),
    "too small": ({"w": torch.zeros(4, 2)}, "must hold Region(start=(0, 0), stop=(4, 3)), but"),
    "other dims": ({"w": torch.zeros(12)}, "must hold Region(start=(0, 0), stop=(4, 3)), but"),
    "a gap": ({"w": with_gap()}, "but holds Region(start=(1, 0), stop=(4, 3))"),
    "nothing held": ({"w": Shard(torch.zeros(0, 3), ())}, "but holds nothing"),
    "no tensor": ({"w": [[0.0] * 3] * 4}, "expected a Tensor, a DTensor or a Shard, got a list"),
    "None": ({"w": None}, "got a NoneType"),
    "sparse": ({"w": torch.zeros(4, 3).to_sparse()}, "torch.sparse_coo"),
    "on no device": ({"w": torch.zeros(4, 3, device="meta")}, "on meta"),
}


@pytest.mark.parametrize("side", ["source", "destination"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_tensors_that_do_not_fit_on_one_rank(misfit: str, side: str) -> None:
    wrong, text = MISFITS[misfit]

    def move(channel: Channel) -> None:
        sources, destinations = tensors(), tensors()
        if channel.rank == 1:
            if side == "source":
                sources = wrong
            else:
                destinations = wrong
        moves(PLAN, channel, sources, destinations)

    errors = rank_threads(3, move).raised(PeerError, within_s=WITHIN_S)
    for error in errors:
        assert set(error.failures) == {1}
        assert "rank 1, 'w': " in error.failures[1]
        assert text.format(side=side) in error.failures[1]
    assert isinstance(errors[1].__cause__, PlanError)
    assert errors[0].__cause__ is None


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor.*", "ignore:.*deprecated.*")
def test_a_quantized_tensor_is_refused() -> None:
    def move(channel: Channel) -> None:
        sources = tensors()
        if channel.rank == 1:
            sources["w"] = torch.quantize_per_tensor(sources["w"], 0.1, 0, torch.quint8)
        moves(PLAN, channel, sources, tensors())

    for error in rank_threads(3, move).raised(PeerError, within_s=WITHIN_S):
        assert "quantized" in error.failures[1]


def test_a_destination_that_shares_memory_with_itself_is_refused() -> None:
    def move(channel: Channel) -> None:
        destinations = tensors()
        if channel.rank == 2:
            destinations["w"] = torch.zeros(1, 3).expand(4, 3)
        moves(PLAN, channel, tensors(), destinations)

    for error in rank_threads(3, move).raised(PeerError, within_s=WITHIN_S):
        assert "'w'" in error.failures[2]
        assert "share one place in memory" in error.failures[2]


def test_all_problems_of_a_rank_are_told_at_once() -> None:
    plan = Plan([*PLAN, Transfer("v", 0, 1, REGION), Transfer("u", 1, 0, REGION)])

    def move(channel: Channel) -> None:
        sources, destinations = tensors(v=torch.zeros(4, 3)), tensors(u=torch.zeros(2, 2))
        moves(plan, channel, sources, destinations)

    for error in rank_threads(3, move).raised(PeerError, within_s=WITHIN_S):
        assert "'u': the destination must hold" in error.failures[0]
        assert "'v': no destination" in error.failures[1]
        assert "'u': no source" in error.failures[1]


class Lazy(dict[str, torch.Tensor]):
    """Reads its tensors when they are asked for, which fails."""

    def __getitem__(self, key: str) -> torch.Tensor:
        raise OSError(5, "no such disk")


def test_values_that_cannot_be_had_reach_every_rank() -> None:
    def move(channel: Channel) -> None:
        moves(PLAN, channel, Lazy() if channel.rank == 0 else tensors(), tensors())

    errors = rank_threads(3, move).raised(PeerError, within_s=WITHIN_S)
    assert all("no such disk" in error.failures[0] for error in errors)
    assert isinstance(errors[0].__cause__, OSError)


def test_a_rank_that_is_not_in_the_group_is_named() -> None:
    plan = Plan([*PLAN, Transfer("w", 0, 5, REGION)])

    def move(channel: Channel) -> None:
        moves(plan, channel, tensors(), tensors())

    errors = rank_threads(3, move).raised(PlanError, within_s=WITHIN_S)
    assert all("rank 5: is in the plan, but not among (0, 1, 2)" in str(error) for error in errors)


def test_a_rank_alone_raises_its_own_error() -> None:
    plan = Plan([Transfer("w", 0, 0, REGION)])

    def move(channel: Channel) -> None:
        execute(plan, channel, {}, tensors())

    (error,) = rank_threads(1, move).raised(PlanError)
    assert [problem.kind for problem in error.problems] == ["missing"]


def test_a_local_copy_between_dtypes_is_refused() -> None:
    plan = Plan([*PLAN, Transfer("v", 2, 2, REGION)])

    def move(channel: Channel) -> None:
        sources, destinations = tensors(v=torch.zeros(4, 3).int()), tensors(v=torch.zeros(4, 3))
        moves(plan, channel, sources, destinations)

    for error in rank_threads(3, move).raised(PeerError, within_s=WITHIN_S):
        expected = "'v': the source is torch.int32, the destination torch.float32"
        assert expected in error.failures[2]


# Ranks that call differently


def test_another_plan_names_the_key_and_the_ranks() -> None:
    other = Plan([*PLAN, Transfer("v", 0, 1, Region((1,), (2,)))])

    def move(channel: Channel) -> None:
        plan = other if channel.rank == 1 else PLAN
        both = tensors(v=torch.zeros(4))
        moves(plan, channel, both, both)

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert "'v' is missing" in error.values[0]
        assert "'v' is \"1 transfers (0>1 [1]-[2]; " in error.values[1]
        assert "'w'" not in error.values[1]


def test_another_region_names_the_key() -> None:
    def plan(stop: int) -> Plan:
        regions = [Region((0, 0), (4, 3))] * 5 + [Region((0, 0), (stop, 3))]
        return Plan([*PLAN, *(Transfer("v", 0, 1, region) for region in regions)])

    def move(channel: Channel) -> None:
        both = tensors(v=torch.zeros(4, 3))
        moves(plan(3 + channel.rank % 2), channel, both, both)

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert all(text.startswith("'v' is \"6 transfers (") for text in error.values.values())
        assert error.values[0] == error.values[2] != error.values[1]


def test_another_order_is_shown_as_such() -> None:
    pairs = [Transfer("v", 0, 1, REGION), Transfer("w", 0, 1, REGION), Transfer("v", 1, 0, REGION)]

    def move(channel: Channel) -> None:
        plan = Plan(pairs if channel.rank else [pairs[0], pairs[2], pairs[1]])
        both = tensors(v=torch.zeros(4, 3))
        moves(plan, channel, both, both)

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert all("(order of the transfers)" in text for text in error.values.values())


@pytest.mark.parametrize(
    "options",
    [[{}, {"max_staging_bytes": 1 << 20}], [{}, {"verify": "xxh3"}]],
    ids=["staging", "verify"],
)
def test_other_options_are_shown(options: list[dict[str, Any]]) -> None:
    def move(channel: Channel) -> None:
        own = options[channel.rank // 2]
        execute(PLAN, channel, tensors(), tensors(), timeout=10, **own)

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert all("Options(max_staging_bytes=" in text for text in error.values.values())
        assert error.values[0] == error.values[1] != error.values[2]


@pytest.mark.parametrize(
    "options", [{"max_staging_bytes": 65_535}, {"verify": "md5"}], ids=["staging", "verify"]
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    def move(channel: Channel) -> None:
        execute(PLAN, channel, tensors(), tensors(), **options)

    rank_threads(3, move).raised(PlanError, within_s=WITHIN_S)


def test_another_dtype_at_the_other_end_names_key_and_ranks() -> None:
    def move(channel: Channel) -> None:
        sources = tensors(v=torch.zeros(4, 3))
        if channel.rank == 1:
            sources["w"] = torch.zeros(4, 3, dtype=torch.int32)
        plan = Plan([*PLAN, Transfer("v", 0, 1, REGION)])
        moves(plan, channel, sources, tensors(v=torch.zeros(4, 3)))

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert error.values == {
            0: "'w' is float32 as a source, 'w' is float32 as a destination",
            1: "'w' is int32 as a source, 'w' is float32 as a destination",
            2: "'w' is float32 as a source, 'w' is float32 as a destination",
        }


def test_dtypes_that_are_exchanged_evenly_are_found_too() -> None:
    """Sums over rows must not cancel: rows 0 and 3 weigh as much as rows 1 and 2."""
    plan = Plan([Transfer(key, 0, 1, REGION) for key in ("a", "b", "c", "d")])
    float32, int32 = torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.int32)

    def move(channel: Channel) -> None:
        sources = {"a": float32, "b": int32, "c": int32, "d": float32}
        destinations = {"a": int32, "b": float32, "c": float32, "d": int32}
        execute(plan, channel, sources, destinations, timeout=10)

    for error in rank_threads(2, move).raised(DisagreementError, within_s=WITHIN_S):
        assert "'a' is float32 as a source" in error.values[0]
        assert "'a' is int32 as a destination" in error.values[1]


def test_dtypes_may_differ_between_pairs() -> None:
    """One key need not have one dtype: each transfer has its own two ends."""

    def move(channel: Channel) -> float:
        plan = Plan([Transfer("w", 0, 1, REGION), Transfer("w", 2, 3, REGION)])
        dtype = torch.float32 if channel.rank < 2 else torch.bfloat16
        target = torch.zeros(4, 3, dtype=dtype)
        execute(plan, channel, {"w": torch.ones(4, 3, dtype=dtype)}, {"w": target})
        return float(target.sum())

    assert rank_threads(4, move).values() == (0.0, 12.0, 0.0, 12.0)


def test_another_call_at_this_point_is_shown() -> None:
    def move(channel: Channel) -> None:
        if channel.rank == 1:
            agree("step", 3, channel)
        else:
            execute(PLAN, channel, tensors(), tensors(), same_host="off")

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert error.values[1] == "agree 'step'"
        assert error.values[0] == "prepare 'execute'"


# Failures on the way


def failing(kind: type[BaseException]) -> Callable[[int, int], NoReturn]:
    def progress(done: int, total: int) -> NoReturn:
        raise kind("no more")

    return progress


@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_progress_that_raises_reaches_every_rank(same_host: Any) -> None:
    def move(channel: Channel) -> None:
        progress = failing(ValueError) if channel.rank == 2 else None
        try:
            execute(PLAN, channel, tensors(), tensors(), progress=progress, same_host=same_host)
        finally:
            then_works(channel)

    errors = rank_threads(3, move).raised(PeerError, within_s=WITHIN_S)
    for error in errors:
        assert error.failures[2].startswith("ValueError: no more")
    assert isinstance(errors[2].__cause__, ValueError)


def test_an_interrupt_on_the_way_is_raised_as_it_is() -> None:
    def move(channel: Channel) -> None:
        if channel.rank == 2:
            with pytest.raises(KeyboardInterrupt):
                execute(PLAN, channel, tensors(), tensors(), progress=failing(KeyboardInterrupt))
        else:
            with pytest.raises(PeerError, match="KeyboardInterrupt: no more"):
                execute(PLAN, channel, tensors(), tensors())
        then_works(channel)

    rank_threads(3, move).values()


def test_memory_that_runs_out_reaches_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Slot.of

    def of(sizes: tuple[int, int], device: str) -> Slot:
        if threading.current_thread().name == "rank-1" and any(sizes):
            raise MemoryError(f"{sum(sizes)} bytes are too many")
        return real(sizes, device)

    monkeypatch.setattr(Slot, "of", of)

    def move(channel: Channel) -> None:
        turned = {"w": torch.zeros(3, 4).t()}
        execute(PLAN, channel, turned, turned)

    errors = rank_threads(3, move).raised(PeerError, within_s=WITHIN_S)
    assert all("MemoryError: 96 bytes" in error.failures[1] for error in errors)


# Ranks that do not answer


@pytest.mark.parametrize("timeout", [0.4, timedelta(seconds=0.4)], ids=["seconds", "timedelta"])
@pytest.mark.parametrize("same_host", ["off", "auto"])
def test_a_silent_rank_is_a_timeout_on_the_others(same_host: Any, timeout: Any) -> None:
    def move(channel: Channel) -> type[Exception] | None:
        if channel.rank == 1:
            time.sleep(2)
            return None
        begin = time.monotonic()
        with pytest.raises(ChannelError) as caught:
            execute(PLAN, channel, tensors(), tensors(), timeout=timeout, same_host=same_host)
        assert time.monotonic() - begin < 1.8
        return caught.type

    # The first rank that gives up closes its connections, so the other may see that instead.
    assert ChannelTimeout in rank_threads(3, move).values()


def test_a_rank_that_falls_silent_on_the_way_is_a_timeout_on_the_others() -> None:
    def move(channel: Channel) -> None:
        executor = Executor(PLAN, channel, tensors(), tensors(), timeout_s=5)
        if channel.rank == 1:
            time.sleep(2)
            return
        begin = time.monotonic()
        with pytest.raises(ChannelError):
            executor.run(timeout_s=0.4)
        assert time.monotonic() - begin < 1.8

    rank_threads(3, move).values()


# An executor


def test_the_time_between_runs_does_not_count() -> None:
    def move(channel: Channel) -> None:
        with Executor(PLAN, channel, tensors(), tensors(), timeout_s=5) as executor:
            time.sleep(0.5)
            executor.run(timeout_s=0.4)

    rank_threads(3, move).values()


def test_a_closed_executor_is_an_error_on_every_rank() -> None:
    def move(channel: Channel) -> None:
        executor = Executor(PLAN, channel, tensors(), tensors())
        if channel.rank == 1:
            executor.close()
        executor.run(timeout_s=5)

    errors = rank_threads(3, move).raised(PeerError, within_s=WITHIN_S)
    assert all("it has been closed" in error.failures[1] for error in errors)


def runs_though_one_has_failed(channel: Channel) -> None:
    target = torch.zeros(4, 3)
    failure = ArithmeticError("no matrix") if channel.rank == 1 else None
    with Executor(PLAN, channel, tensors(), {"w": target}) as executor:
        try:
            executor.run(failure=failure, timeout_s=10)
        finally:
            assert executor.run(timeout_s=10).messages == 1
            then_works(channel)


def test_a_failure_before_a_run_is_told_by_it() -> None:
    for error in rank_threads(3, runs_though_one_has_failed).raised(PeerError, within_s=WITHIN_S):
        assert list(error.failures) == [1]
        assert "ArithmeticError: no matrix" in error.failures[1]


def test_an_executor_that_all_have_closed_raises_on_each() -> None:
    def move(channel: Channel) -> None:
        with Executor(PLAN, channel, tensors(), tensors()) as executor:
            pass
        executor.run(timeout_s=5)

    rank_threads(3, move).raised(PlanError, within_s=WITHIN_S)


def test_ranks_in_different_runs_are_found() -> None:
    def move(channel: Channel) -> None:
        one = Executor(PLAN, channel, tensors(), tensors(), same_host="off")
        other = Executor(PLAN.inverse(), channel, tensors(), tensors(), same_host="off")
        (one if channel.rank else other).run(timeout_s=5)

    for error in rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S):
        assert error.values[1] == f"run 'execute {PLAN.digest[:8]}'"


def test_a_rank_that_does_something_else_than_run_is_found() -> None:
    def move(channel: Channel) -> None:
        executor = Executor(PLAN, channel, tensors(), tensors(), same_host="off")
        if channel.rank == 0:
            agree("step", 1, channel)
        else:
            executor.run(timeout_s=5)

    rank_threads(3, move).raised(DisagreementError, within_s=WITHIN_S)


# The same on processes


def wrong_on_rank_one(channel: Channel, kind: str) -> None:
    plan = Plan([Transfer("w", src, (src + 1) % 4, REGION) for src in range(4)])
    sources = tensors()
    if channel.rank == 1 and kind == "key":
        sources = {}
    if channel.rank == 1 and kind == "dtype":
        sources["w"] = sources["w"].bfloat16()
    if channel.rank == 1 and kind == "plan":
        plan = plan.inverse()
    progress = failing(ValueError) if channel.rank == 1 and kind == "progress" else None
    execute(plan, channel, sources, tensors(), progress=progress)


@pytest.mark.parametrize(
    ("kind", "expected", "texts"),
    [
        ("key", PeerError, ("rank 1", "'w'", "no source of this name")),
        ("dtype", DisagreementError, ("rank 1: 'w' is bfloat16 as a source",)),
        ("plan", DisagreementError, ("rank 1: 'w' is ",)),
        ("progress", PeerError, ("rank 1: ValueError: no more",)),
    ],
)
def test_what_is_wrong_on_one_process_is_told_by_all(
    pool: RankPool, kind: str, expected: type[Exception], texts: tuple[str, ...]
) -> None:
    pool.run(wrong_on_rank_one, "nothing").values()
    errors = pool.run(wrong_on_rank_one, kind).raised(expected, within_s=WITHIN_S)
    assert all(text in str(error) for error in errors for text in texts)
