"""What the environment says of a launch, whoever launched it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import distcore
from distcore.launch import (
    Launch,
    first_host,
    is_distributed_launch,
    launched_world_size,
    read_launch,
)
from distcore.v1.errors import PlanError

TORCHRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "MASTER_PORT": "29500",
}


def problems_of(environ: dict[str, str]) -> dict[str, str]:
    with pytest.raises(PlanError) as caught:
        read_launch(environ)
    return {problem.where: problem.text for problem in caught.value.problems}


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        (TORCHRUN, Launch("torch", 4, 3, 1, "node7", 29400, elastic=True)),
        # 15000 + (1000 * 31 + 2) % 20000, the same on all ranks of the step
        (SRUN, Launch("SLURM", 8, 5, 1, "gpu03", 26002)),
        ({**SRUN, "MASTER_ADDR": "x", "MASTER_PORT": "7"}, Launch("SLURM", 8, 5, 1, "x", 7)),
        (MPIRUN, Launch("Open MPI", 2, 1, 1, "127.0.0.1", 29500)),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            Launch("PMI", 2, 0, None, "a", 1),
        ),
    ],
    ids=["torchrun", "srun", "srun-with-address", "mpirun", "pmi"],
)
def test_each_launcher_is_understood(environ: dict[str, str], launch: Launch) -> None:
    assert read_launch(environ) == launch
    assert launched_world_size(environ) == launch.world_size


def test_all_missing_variables_are_named_at_once() -> None:
    assert problems_of({"WORLD_SIZE": "2", "MASTER_PORT": ""}) == {
        "RANK": "not set",
        "MASTER_ADDR": "not set",
        "MASTER_PORT": "empty",
    }


def test_malformed_variables_are_named_with_their_values() -> None:
    environ = {**TORCHRUN, "RANK": "4", "LOCAL_RANK": "-1", "MASTER_PORT": "99999"}
    assert problems_of(environ) == {
        "RANK": "4 is too large for a run of 4",
        "LOCAL_RANK": "-1 is too small: it must be at least 0",
        "MASTER_PORT": "99999 is no port: they are 1 to 65535",
    }


@pytest.mark.parametrize("text", ["two", "1.5", "0", "-3"])
def test_a_world_size_that_is_no_positive_number_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"WORLD_SIZE: '?{text}"):
        launched_world_size({"WORLD_SIZE": text})


def test_an_empty_variable_is_unset() -> None:
    assert launched_world_size({"WORLD_SIZE": ""}) == 1


@pytest.mark.parametrize(("text", "several"), [("4", True), ("1", False), ("", False)])
def test_is_distributed_launch_reads_the_environment_alone(
    text: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    assert is_distributed_launch() is several


def test_a_batch_script_is_no_launch() -> None:
    """SLURM sets the variables of the job there too, and there is but one process."""
    assert launched_world_size({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) == 1
    with pytest.raises(PlanError, match="no launcher"):
        read_launch({})


def test_mpirun_under_slurm_counts_as_mpirun() -> None:
    """Its processes inherit what srun told the daemon that started them."""
    launch = read_launch({**SRUN, **MPIRUN})
    assert (launch.launcher, launch.world_size, launch.rank) == ("Open MPI", 2, 1)


def test_world_size_by_hand_takes_the_ranks_of_srun() -> None:
    environ = {**SRUN, "WORLD_SIZE": "8", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert read_launch(environ) == Launch("torch", 8, 5, 1, "a", 1)


def test_two_launchers_that_disagree_are_an_error() -> None:
    environ = {**SRUN, "WORLD_SIZE": "8", "RANK": "3"}
    assert problems_of(environ) == {"RANK": "'3' differs from SLURM_PROCID, which is '5'"}


def test_torchrun_under_srun_counts_its_own_ranks() -> None:
    launch = read_launch({**SRUN, "SLURM_STEP_NUM_TASKS": "4", **TORCHRUN})
    assert (launch.rank, launch.local_rank, launch.master_addr) == (3, 1, "node7")


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[9,12-14]-ib,x", "gpu9-ib"),
        ("login1,login2", "login1"),
        ("alone", "alone"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_asking_for_a_launch_loads_no_torch() -> None:
    code = "import sys, distcore; distcore.is_distributed_launch(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"


def test_every_name_of_the_catalogue_is_there() -> None:
    assert [name for name in distcore.__all__ if not hasattr(distcore, name)] == []
    assert set(distcore.__all__) <= set(dir(distcore))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        distcore.nothing  # noqa: B018
