"""Launch: what the environment says of the run that this process was started for.

Read before any process group exists. torchrun (or anything that sets its variables), Open MPI,
MPICH and Intel MPI, and SLURM's srun are understood.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from distcore.v1.errors import PlanError, Problem

# Which variables of a launcher hold the number of processes, the rank and the rank on the node.
# A launcher that is started by another one comes first: mpirun's processes inherit what srun
# told the daemon that started them.
_LAUNCHERS: Final = {
    "torch": ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "PMI": ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    "SLURM": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
}
_PORTS: Final = range(1, 1 << 16)
_SLURM_PORTS: Final = range(15_000, 35_000)


@dataclass(frozen=True, slots=True)
class Launch:
    """This process's place in the run that it was started for.

    `launcher` is `"torch"`, `"Open MPI"`, `"PMI"` or `"SLURM"`. `local_rank` is None where the
    environment does not tell it. `elastic` says whether torchrun's agent watches the process.
    """

    launcher: str
    world_size: int
    rank: int
    local_rank: int | None
    master_addr: str
    master_port: int
    elastic: bool = False


def is_distributed_launch() -> bool:
    """Whether this process was started as one of several ranks.

    Reads only the environment, so it can be asked before `distributed_run` makes the process
    group; `is_distributed_run` looks at the group itself. An empty variable counts as unset.
    Raises PlanError (a ValueError) where the number of processes is no positive whole number.
    """
    return launched_world_size(os.environ) > 1


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's agent started this process and will end its peers when it fails."""
    return bool(environ.get("TORCHELASTIC_RUN_ID"))


def launched_world_size(environ: Mapping[str, str]) -> int:
    """The number of processes of the launch; 1 where there is none."""
    name = _LAUNCHERS[launcher][0] if (launcher := _launcher(environ)) else None
    if name is None:
        return 1
    reader = _Reader(environ)
    size = reader.whole(name, least=1)
    reader.raise_problems()
    return size or 1


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read this process's place in a launch of several processes.

    Raises one PlanError that names every variable that is missing or malformed, with its value.
    """
    launcher = _launcher(environ)
    if launcher is None:
        raise PlanError(Problem("WORLD_SIZE", "missing", "not set: no launcher started this"))
    reader = _Reader(environ)
    size_name, rank_name, local_name = _LAUNCHERS[launcher]
    size = reader.whole(size_name, least=1)
    ranks = _inner(environ, size) if launcher == "torch" else None
    if ranks is not None:  # WORLD_SIZE was exported by hand, srun or mpirun counts the ranks
        rank_name = reader.same(rank_name, ranks[1])
        local_name = reader.same(local_name, ranks[2])
    if launcher == "PMI" and not environ.get(local_name):
        local_name = "SLURM_LOCALID"
    rank = reader.whole(rank_name, below=size)
    local_rank = reader.whole(local_name) if environ.get(local_name) else None
    addr = reader.text("MASTER_ADDR", _default_addr(environ, launcher, size))
    port = reader.whole("MASTER_PORT", least=1, default=_default_port(environ))
    if port is not None and port not in _PORTS:
        reader.wrong("MASTER_PORT", f"{port} is no port: they are 1 to 65535")
    reader.raise_problems()
    if size is None or rank is None or addr is None or port is None:
        raise PlanError("the environment of the launch is incomplete")
    return Launch(launcher, size, rank, local_rank, addr, port, is_elastic(environ))


class _Reader:
    """Reads variables and collects everything that is wrong with them."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._problems: list[Problem] = []

    def whole(
        self,
        name: str,
        *,
        least: int = 0,
        below: int | None = None,
        default: int | None = None,
    ) -> int | None:
        """The whole number in a variable, or None where there is something wrong with it."""
        text = self._environ.get(name, "").strip()
        if not text:
            if default is None:
                self._missing(name)
            return default
        if not re.fullmatch(r"[+-]?[0-9]+", text):
            self.wrong(name, f"{text!r} is no whole number")
            return None
        number = int(text)
        if number < least:
            self.wrong(name, f"{number} is too small: it must be at least {least}")
            return None
        if below is not None and number >= below:
            self.wrong(name, f"{number} is too large for a run of {below}")
            return None
        return number

    def text(self, name: str, default: str | None) -> str | None:
        """The text in a variable, or None where there is neither that nor a default."""
        text = self._environ.get(name, "").strip() or default
        if not text:
            self._missing(name)
        return text

    def same(self, name: str, other: str) -> str:
        """Whichever of two variables is set; both may be set if they say the same."""
        mine, theirs = self._environ.get(name, ""), self._environ.get(other, "")
        if mine and theirs and mine.strip() != theirs.strip():
            self.wrong(name, f"{mine!r} differs from {other}, which is {theirs!r}")
        return name if mine or not theirs else other

    def wrong(self, name: str, text: str) -> None:
        """Note what is wrong with a variable that is set."""
        self._problems.append(Problem(name, "malformed", text))

    def raise_problems(self) -> None:
        """Raise one error with everything that was wrong."""
        if self._problems:
            raise PlanError(self._problems)

    def _missing(self, name: str) -> None:
        empty = name in self._environ
        self._problems.append(Problem(name, "missing", "empty" if empty else "not set"))


def _launcher(environ: Mapping[str, str]) -> str | None:
    for launcher, (size_name, _, _) in _LAUNCHERS.items():
        # A batch script sees SLURM's variables of the job; only a step of it is a launch.
        if launcher == "SLURM" and not environ.get("SLURM_STEP_ID"):
            continue
        if environ.get(size_name):
            return launcher
    return None


def _inner(environ: Mapping[str, str], size: int | None) -> tuple[str, str, str] | None:
    """The variables of a launcher that started as many processes as WORLD_SIZE says."""
    if is_elastic(environ):  # torchrun itself may be what srun started
        return None
    without = {name: value for name, value in environ.items() if name != "WORLD_SIZE"}
    launcher = _launcher(without)
    if launcher is None or environ.get(_LAUNCHERS[launcher][0], "").strip() != str(size):
        return None
    return _LAUNCHERS[launcher]


def _default_addr(environ: Mapping[str, str], launcher: str, size: int | None) -> str | None:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if nodes and not is_elastic(environ):
        return first_host(nodes)
    if launcher == "Open MPI" and environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") == str(size):
        return "127.0.0.1"
    return None


def _default_port(environ: Mapping[str, str]) -> int | None:
    job, step = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "0")
    if is_elastic(environ) or not job.isdecimal() or not step.isdecimal():
        return None
    # The same on all ranks, and seldom the same for two steps on one node.
    return _SLURM_PORTS[(int(job) * 31 + int(step)) % len(_SLURM_PORTS)]


def first_host(nodes: str) -> str:
    """The first host of a list in SLURM's form.

    >>> first_host("gpu[03-05,9]-ib,cpu1")
    'gpu03-ib'
    """
    found = re.match(r"([^,\[]*)(?:\[([^\]]*)\])?([^,\[]*)", nodes)
    prefix, numbers, suffix = found.groups() if found else (nodes, None, "")
    first = re.split(r"[-,]", numbers)[0] if numbers else ""
    return f"{prefix}{first}{suffix}"
