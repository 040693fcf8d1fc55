"""distributed_run on several ranks: under torchrun, and in a world that is the caller's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from distcore import all_reduce, barrier, distributed_run
from distcore.testing import RankPool, rank_pool
from distcore.testing.pool import RankDiedError
from distcore.v1.channel import Channel
from distcore.v1.errors import PeerError

RUNS = int(os.environ.get("ROOT_CAUSE_RUNS", "1"))
BODY = Path(__file__).with_name("torchrun_body.py")


def torchrun(way: str, folder: Path, *options: str) -> tuple[int, str, float]:
    """The exit code of torchrun, what it printed, and the seconds after rank 1 raised."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    rank = ["--no-python", sys.executable, *options, str(BODY), way, str(folder)]
    done = subprocess.run(
        [sys.executable, *launch, *rank],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=100,
    )
    ended = time.time()
    times = [float(line.split()[0]) for line in (folder / "rank1").read_text().splitlines()]
    return done.returncode, done.stdout, ended - times[0]


def root_cause(report: str) -> str:
    """The part of torchrun's report that says what failed first."""
    return report.partition("Root Cause")[2]


@pytest.mark.parametrize(("way", "options"), [("barrier", ()), ("labelled", ()), ("end", ("-O",))])
def test_the_launcher_names_the_rank_that_failed_torchtitan_1790_pr_1342(
    way: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Rank 0 sits in torch's barrier, in a labelled call, or at the end of its body.

    ROOT_CAUSE_RUNS tells how often to try. -O takes no check away.
    """
    for run in range(RUNS):
        folder = tmp_path / str(run)
        folder.mkdir()
        code, printed, seconds = torchrun(way, folder, *options)
        assert code == 1, printed
        cause = root_cause(printed)
        assert re.search(r"rank +: 1 \(local_rank: 1\)", cause), printed
        assert "ValueError: boom on rank one" in cause, printed
        assert "in main" in cause, printed
        assert seconds < 5, printed


def test_a_clean_run_leaves_nothing_behind_and_warns_of_nothing(tmp_path: Path) -> None:
    code, printed, _ = torchrun("clean", tmp_path, "-W", "error")
    assert code == 0, printed
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text().endswith(" 2 cpu [1, 2]\n")
    assert "destroy_process_group" not in printed


def test_srun_is_enough_without_any_variable_of_torch(tmp_path: Path) -> None:
    """Two processes with the variables of a SLURM step on one node."""
    step = {
        **{name: text for name, text in os.environ.items() if not name.startswith("SLURM_")},
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(BODY), "clean", str(tmp_path)],
            env={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    for rank in (0, 1):
        assert (tmp_path / f"rank{rank}").read_text().endswith(" 2 cpu [1, 2]\n")


def test_an_own_run_may_raise_on_and_a_timeout_names_the_call(tmp_path: Path) -> None:
    """Two runs in one process: the second starts afresh on the launcher's store."""
    code, printed, _ = torchrun("raise", tmp_path)
    assert code == 0, printed
    zero, one = ((tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1))
    assert "PeerError: 'load' failed: rank 1: failed in 'distributed_run'" in zero[0]
    assert "ValueError: boom on rank one" in one[0]
    assert "ChannelTimeout: 'load' (call 2): " in zero[2]
    assert "rank 0 last entered 'load' (call 2); rank 1 last entered 'barrier' (call 1)" in zero[2]
    assert [line.split(" ", 1)[1] for line in (*zero[1::2], one[1])] == ["group left: False"] * 3


@pytest.fixture
def own_pool() -> Iterator[RankPool]:
    """Two ranks whose world may be spoilt."""
    with rank_pool(2) as pool:
        yield pool


def raises_in_body(channel: Channel) -> tuple[str, float]:
    """Rank 1 raises in the body of a run in the caller's world; rank 0 waits for it."""
    begin = time.monotonic()
    try:
        with distributed_run(device="cpu") as state:
            barrier()
            if state.rank == 1:
                raise ValueError("boom")
            all_reduce("load", lambda: 1, list)
    except (ValueError, PeerError) as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "nothing"
    seconds = time.monotonic() - begin
    dist.barrier()  # the caller's group is as it was
    return told, seconds


def exits_in_body(channel: Channel) -> None:
    """Rank 0 exits with 3, and rank 1 is interrupted."""
    with distributed_run(device="cpu", on_error="abort") as state:
        if state.rank == 0:
            sys.exit(3)
        raise KeyboardInterrupt


def test_in_the_callers_world_the_peer_raises_and_the_group_stays(own_pool: RankPool) -> None:
    (told, seconds), (own, _) = own_pool.run(raises_in_body).values()
    assert told.startswith(
        "PeerError: 'load' failed: rank 1: failed in 'distributed_run', outside any collective: "
        "ValueError: boom"
    )
    assert seconds < 5
    assert own == "ValueError: boom"
    codes = []
    for error in own_pool.run(exits_in_body).exceptions:
        assert isinstance(error, RankDiedError)
        codes.append(error.exit_code)
    assert codes == [3, 130]
