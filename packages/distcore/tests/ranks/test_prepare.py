"""Prepare: what ranks exchange before anything moves, and what they learn of each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distcore.testing import rank_threads
from distcore.v1 import Channel, Plan, Region, Transfer
from distcore.v1.errors import DisagreementError, PeerError
from distcore.v1.runtime import Executor, execute
from distcore.v1.runtime.deadline import Deadline
from distcore.v1.runtime.prepare import Options, bind, prepare

MIB = 1 << 20
REGION = Region((0,), (1000,))
PLAN = Plan([Transfer("w", src, dst, REGION) for src in range(3) for dst in range(3)])


class Counting:
    """A channel that counts what it is asked for."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.rows: list[int] = []
        self.starts = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def all_gather(self, row: bytes, *, timeout_s: float | None = None) -> tuple[bytes, ...]:
        self.rows.append(len(row))
        return self._inner.all_gather(row, timeout_s=timeout_s)

    def start(self, *messages: Any, timeout_s: float | None = None) -> Any:
        self.starts += 1
        return self._inner.start(*messages, timeout_s=timeout_s)


def tensors() -> dict[str, torch.Tensor]:
    return {"w": torch.zeros(1000)}


def counted(channel: Channel, numel: int) -> tuple[list[int], int]:
    """The rows and the rounds of a call in which rank 0 sends `numel` floats to rank 1."""
    region = Region((0,), (numel,))
    plan = Plan([Transfer("w", 0, 1, region)])
    source, target = torch.arange(float(numel)), torch.zeros(numel)
    counting: Any = Counting(channel)
    execute(plan, counting, {"w": source}, {"w": target}, same_host="off", max_staging_bytes=MIB)
    assert channel.rank != 1 or torch.equal(source, target)
    return counting.rows, counting.starts


def test_a_small_call_takes_two_rows_of_64_bytes_and_one_round() -> None:
    """A quota is 1 MiB of staging over 2 rounds, 2 directions and 2 peers: 128 KiB."""
    small = rank_threads(3, counted, 32 * 1024).values()
    assert small == (([64, 64], 1), ([64, 64], 1), ([64, 64], 0))
    large = rank_threads(3, counted, 32 * 1024 + 1).values()
    assert [rows for rows, _ in large] == [[64, 64, 64]] * 3


def test_a_rank_that_has_failed_before_tells_it_in_the_first_row() -> None:
    def fail(channel: Channel) -> None:
        counting: Any = Counting(channel)
        failure = RuntimeError("no plan") if channel.rank == 1 else None
        plan = Plan() if failure else PLAN
        try:
            execute(plan, counting, tensors(), tensors(), same_host="off", failure=failure)
        finally:
            assert counting.rows[0] == 64
            assert counting.starts == 0
            execute(PLAN, channel, tensors(), tensors())

    for error in rank_threads(3, fail).raised(PeerError, within_s=3):
        assert "rank 1" in str(error)
        assert "RuntimeError: no plan" in str(error)


def test_a_further_run_takes_two_rows() -> None:
    def count(channel: Channel) -> list[int]:
        counting: Any = Counting(channel)
        executor = Executor(PLAN, counting, tensors(), tensors(), same_host="off")
        counting.rows.clear()
        executor.run()
        return list(counting.rows)

    assert rank_threads(3, count).values() == ([64, 64],) * 3


def test_nothing_is_sent_where_something_is_wrong() -> None:
    def count(channel: Channel) -> int:
        counting: Any = Counting(channel)
        with pytest.raises(PeerError):
            execute(PLAN, counting, {} if channel.rank else tensors(), tensors(), same_host="off")
        return int(counting.starts)

    assert rank_threads(3, count).values() == (0, 0, 0)


def test_both_ends_know_whether_all_of_both_lies_in_order() -> None:
    def flags(channel: Channel) -> list[bool]:
        apart = {"w": torch.zeros(2000)[::2]}
        sources = apart if channel.rank == 2 else tensors()
        options = Options(1 << 20, None)
        ready = prepare(PLAN, channel, sources, tensors(), options=options, deadline=Deadline())
        return [ready.terms.direct(rank) for rank in range(3)]

    assert rank_threads(3, flags).values() == (
        [True, True, False],
        [True, True, False],
        [False, False, False],
    )


@pytest.mark.parametrize(("verify", "staged"), [(None, (8000, 8000)), ("xxh3", (8032, 8032))])
def test_the_slots_are_as_large_as_the_largest_round(verify: Any, staged: tuple[int, int]) -> None:
    def slots(channel: Channel) -> tuple[int, int]:
        apart = {"w": torch.zeros(2000)[::2]}
        options = Options(1 << 20, verify)
        ready = prepare(PLAN, channel, apart, apart, options=options, deadline=Deadline())
        bound = bind(ready.sides, channel, options, ready.terms)
        assert ready.bound is not None
        assert ready.bound.prepared.slot_nbytes == bound.slot_nbytes
        assert [len(step.sends) for step in bound.rounds] == [2]
        assert bound.rounds[0].nbytes == 4 * 4000
        assert [nbytes for _, _, nbytes in bound.copies] == [4000]
        return bound.slot_nbytes

    assert rank_threads(3, slots).values() == (staged,) * 3


def test_ranks_that_disagree_on_the_short_way_are_told() -> None:
    def mixed(channel: Channel) -> None:
        same_host: Any = "off" if channel.rank == 1 else "auto"
        execute(PLAN, channel, tensors(), tensors(), same_host=same_host, timeout=10)

    rank_threads(3, mixed).raised(DisagreementError, within_s=3)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        (Options(1 << 16, None), []),
        (Options((1 << 16) - 1, "xxh3"), ["range"]),
        (Options(0, "sha"), ["range", "value"]),  # type: ignore[arg-type]
    ],
)
def test_options_say_what_is_wrong_with_them(options: Options, kinds: list[str]) -> None:
    assert [problem.kind for problem in options.problems()] == kinds
