"""rank_pool: processes that stay, and what becomes of them when a test goes wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from distcore.testing import DeadlineError, RankDiedError, RankPool, RemoteError, rank_pool
from distcore.v1.channel import Channel
from distcore.v1.errors import DisagreementError, PeerError


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    """Two ranks of this module's own, since its tests kill them."""
    with rank_pool(2) as pool:
        yield pool


class OddError(ValueError):
    """An exception whose constructor cannot be called with its args."""

    def __init__(self, *, code: int) -> None:
        self.code = code
        super().__init__(f"code {code}")


def total(channel: Channel, factor: int) -> int:
    return sum(row[0] for row in channel.all_gather(bytes([channel.rank * factor])))


def process_and_sum(channel: Channel) -> tuple[int, float, int]:
    mesh = init_device_mesh("cpu", (channel.size,))
    tensor = torch.full((1,), channel.rank + 1.0)
    dist.all_reduce(tensor, group=mesh.get_group())
    return os.getpid(), tensor.item(), int(os.environ["LOCAL_RANK"])


def raise_own(channel: Channel) -> None:
    raise OddError(code=10 + channel.rank)


def raise_house_errors(channel: Channel) -> None:
    if channel.rank == 0:
        raise PeerError("load", {1: "boom"})
    raise DisagreementError("keys", {0: "a", 1: "b"})


def raise_a_local_class(channel: Channel) -> None:
    class LocalError(Exception):
        pass

    raise LocalError("only text can leave")


def return_a_lambda(channel: Channel) -> object:
    return lambda: channel


def rank_one_dies(channel: Channel) -> None:
    if channel.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    channel.all_gather(b"row", timeout_s=5)


def rank_one_naps(channel: Channel) -> int:
    if channel.rank == 1:
        time.sleep(60)
    return channel.rank


def rank_one_skips_a_row(channel: Channel) -> None:
    if channel.rank == 0:
        channel.all_gather(b"row", timeout_s=0.2)
    else:
        raise KeyError("skipped")


def test_ranks_stay_and_have_a_default_group(pair: RankPool) -> None:
    assert pair.run(total, 10).values() == (10, 10)
    first = pair.run(process_and_sum).values()
    assert [(value, local) for _, value, local in first] == [(3.0, 0), (3.0, 1)]
    assert [pid for pid, _, _ in pair.run(process_and_sum).values()] == [pid for pid, _, _ in first]


def test_exceptions_keep_type_attributes_and_traceback(pair: RankPool) -> None:
    errors = pair.run(raise_own).raised(OddError, within_s=3)
    assert [error.code for error in errors] == [10, 11]
    assert "in raise_own" in errors[1].__notes__[0]
    first, second = pair.run(raise_house_errors).exceptions
    assert isinstance(first, PeerError)
    assert first.failures == {1: "boom"}
    assert isinstance(second, DisagreementError)
    assert second.values == {0: "a", 1: "b"}


def test_what_cannot_be_pickled_comes_as_text(pair: RankPool) -> None:
    errors = pair.run(raise_a_local_class).raised(RemoteError)
    assert "LocalError: only text can leave" in str(errors[0])
    assert all(error is not None for error in pair.run(return_a_lambda).exceptions)


def test_ranks_that_fail_in_step_live_on(pair: RankPool) -> None:
    before = [pid for pid, _, _ in pair.run(process_and_sum).values()]
    pair.run(raise_own)
    assert [pid for pid, _, _ in pair.run(process_and_sum).values()] == before


def test_ranks_out_of_step_are_replaced(pair: RankPool) -> None:
    before = {pid for pid, _, _ in pair.run(process_and_sum).values()}
    outcomes = pair.run(rank_one_skips_a_row)
    assert [type(error).__name__ for error in outcomes.exceptions] == ["ChannelTimeout", "KeyError"]
    assert before.isdisjoint(pid for pid, _, _ in pair.run(process_and_sum).values())


def test_a_rank_that_dies_is_told_and_replaced(pair: RankPool) -> None:
    outcomes = pair.run(rank_one_dies)
    assert isinstance(outcomes[0].exception, OSError)
    assert outcomes[0].seconds < 4
    died = outcomes[1].exception
    assert isinstance(died, RankDiedError)
    assert (died.rank, died.exit_code) == (1, -signal.SIGKILL)
    assert pair.run(total, 1).values() == (1, 1)


def test_a_hang_is_killed_with_all_stacks(
    pair: RankPool, capfd: pytest.CaptureFixture[str]
) -> None:
    pair.run(total, 1)
    with pytest.raises(DeadlineError, match=r"(?s)ranks \[1\] of 2 .*in rank_one_naps"):
        pair.run(rank_one_naps, deadline_s=0.5)
    assert "in rank_one_naps" in capfd.readouterr().err
    assert pair.run(total, 1).values() == (1, 1)


def test_a_function_without_a_name_is_refused() -> None:
    with rank_pool(1) as pool, pytest.raises(ValueError, match="function of a module"):
        pool.run(lambda channel: None)
