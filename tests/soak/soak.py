"""Save, load, sync and heal in a loop on a few processes, some killed at random; find what grows.

    python tests/soak/soak.py [--minutes 20] [--ranks 3] [--seed 0] [--rounds N]

Each rank is a process (`rank.py` beside this file). In about one round of eight a rank other than
the first gets SIGKILL at a random moment. The others must then all raise a typed error in time;
they give up their group, a new process takes the place, heals over HTTP from those that are left,
and all go on in a new group. The first rank lives through all of it: its memory, descriptors and
threads at the end are compared with those after the start. Exits with 1 where something has grown,
where a file or a process is left behind, or where anything went wrong but the kills.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANSWER_S = 90.0
KILL_EVERY = 8
WARM_UP = 5
# What may differ between two moments at which nothing is under way.
ALLOWED = {"rss_kib": 24 << 10, "descriptors": 4, "threads": 3, "python_threads": 2}
Gauges = dict[str, int]


def grown(samples: Sequence[Gauges]) -> dict[str, tuple[int, int]]:
    """What is more at the end than at the beginning: the two medians, by name.

    The first samples count as warming up. A median of a fifth stands for an end, so that what one
    moment holds by chance is not taken for growth.
    """
    settled = samples[WARM_UP:] if len(samples) >= 2 * WARM_UP else samples
    width = max(1, len(settled) // 5)
    found = {}
    for name, allowed in ALLOWED.items():
        ends = settled[:width], settled[-width:]
        first, last = (int(statistics.median(one[name] for one in part)) for part in ends)
        if last - first > allowed:
            found[name] = (first, last)
    return found


class Process:
    """One rank's process."""

    def __init__(self, folder: Path) -> None:
        path = Path(__file__).with_name("rank.py")
        around = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
        around["GLOO_SOCKET_IFNAME"] = "lo"
        # torch makes this one on import, and keeps it.
        around["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
        self.log = (folder.parent / f"rank-{time.monotonic_ns()}.log").open("w+")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(path)],
            stdin=pipe,
            stdout=pipe,
            stderr=self.log,
            text=True,
            env=around,
        )

    def tell(self, do: str, **more: object) -> None:
        if self.process.stdin is None:
            raise RuntimeError("the rank has no input")
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next answer; RuntimeError where the process ended without one."""
        if self.process.stdout is None:
            raise RuntimeError("the rank has no output")
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"a rank ended: {self.log.read()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def end(self) -> int:
        """Let it end by itself, within a time."""
        self.tell("end")
        try:
            self.process.communicate(timeout=30)
        finally:
            self.process.kill()
            self.log.close()
        return self.process.returncode


@dataclass
class Soak:
    """The ranks, and what has happened to them."""

    folder: Path
    size: int
    chance: random.Random
    ranks: list[Process] = field(default_factory=list)
    samples: list[Gauges] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    slowest_error_s: float = 0.0
    kills: int = 0
    step: int = 0
    groups: int = 0
    quick_s: float = 0.5

    def start(self) -> None:
        (self.folder / "tmp").mkdir()
        (self.folder / "saved").mkdir()
        self.ranks = [Process(self.folder / "tmp") for _ in range(self.size)]
        self.join()

    def all(self, do: str, **more: object) -> list[dict[str, Any]]:
        """Tell all ranks the same, and expect that all can do it."""
        for rank in self.ranks:
            rank.tell(do, **more)
        return [self.expect(rank.answer(), do) for rank in self.ranks]

    def expect(self, answer: dict[str, Any], do: str) -> dict[str, Any]:
        if "error" in answer:
            raise RuntimeError(f"{do} of step {self.step}: {answer['error']}")
        return answer

    def join(self) -> None:
        """Put all ranks into a group that is new."""
        self.groups += 1
        store = str(self.folder / f"store{self.groups}")
        for number, rank in enumerate(self.ranks):
            rank.tell("join", store=store, rank=number, size=self.size)
        for rank in self.ranks:
            self.expect(rank.answer(), "join")

    def round(self) -> None:
        """One step without a kill."""
        begin = time.monotonic()
        self.all("round", step=self.step, folder=str(self.folder / "saved"))
        # Of a fast one, so that most kills fall into a round; a slow one has made connections.
        self.quick_s = min(1.1 * self.quick_s, time.monotonic() - begin)
        self.ranks[0].tell("gauges")
        self.samples.append(self.expect(self.ranks[0].answer(), "gauges")["gauges"])
        self.tidy()
        self.step += 1

    def tidy(self) -> None:
        """Leave only the last two checkpoints, as a run would."""
        kept = {f"step{self.step}", f"step{self.step - 1}"}
        for path in (self.folder / "saved").iterdir():
            if path.name not in kept:
                subprocess.run(["rm", "-r", str(path)], check=True)

    def round_with_a_kill(self) -> None:
        """One step in whose midst a rank is killed, and all that follows from it."""
        victim = self.chance.randrange(1, self.size)
        for rank in self.ranks:
            rank.tell("round", step=self.step, folder=str(self.folder / "saved"))
        time.sleep(self.chance.random() * self.quick_s)
        begin = time.monotonic()
        self.ranks[victim].kill()
        self.kills += 1
        for number, rank in enumerate(self.ranks):
            if number != victim:
                self.judge(rank.answer())
        self.slowest_error_s = max(self.slowest_error_s, time.monotonic() - begin)
        self.replace(victim)

    def judge(self, answer: dict[str, Any]) -> None:
        """Count what a rank that lives made of the death of another."""
        if "error" not in answer:  # it had done its part before
            self.errors["none"] += 1
            return
        self.errors[answer["error"].partition(":")[0]] += 1
        if not answer["typed"]:
            self.problems.append(f"an error without a type of ours: {answer['error']}")

    def replace(self, victim: int) -> None:
        """Let a new process take the place: it heals from those who are left."""
        new = Process(self.folder / "tmp")
        left = [rank for number, rank in enumerate(self.ranks) if number != victim]
        last = max(0, self.step - 1)
        metadata = []
        for rank in left:
            rank.tell("leave")
            self.expect(rank.answer(), "leave")
            rank.tell("offer", step=last)
            metadata.append(self.expect(rank.answer(), "offer")["metadata"])
        self.ranks[victim] = new
        new.tell("heal", step=last, metadata=joined(metadata))
        self.expect(new.answer(), "heal")
        self.join()

    def end(self) -> None:
        """End all ranks and look at what is left behind."""
        pids = [str(rank.process.pid) for rank in self.ranks]
        codes = [rank.end() for rank in self.ranks]
        if any(codes):
            self.problems.append(f"ranks ended with {codes}")
        if left := sorted(path.name for path in (self.folder / "tmp").iterdir()):
            self.problems.append(f"temporary files are left: {left}")
        shared = Path("/dev/shm").iterdir() if Path("/dev/shm").exists() else ()
        if left := [path.name for path in shared if any(pid in path.name for pid in pids)]:
            self.problems.append(f"shared memory is left: {left}")

    def kill(self) -> None:
        for rank in self.ranks:
            rank.process.kill()

    def summary(self) -> dict[str, object]:
        first, last = self.samples[min(WARM_UP, len(self.samples) - 1)], self.samples[-1]
        for name, (before, after) in grown(self.samples).items():
            self.problems.append(f"{name} grew from {before} to {after}")
        return {
            "rounds": len(self.samples),
            "kills": self.kills,
            "groups": self.groups,
            "errors of those who lived": dict(self.errors),
            "slowest error, s": round(self.slowest_error_s, 2),
            "after warming up": first,
            "at the end": last,
            "problems": self.problems,
        }


def joined(metadata: Sequence[str]) -> str:
    from fttransport import join_metadata

    return join_metadata(list(metadata))


def too_late(*_: object) -> None:
    raise TimeoutError(f"a rank did not answer within {ANSWER_S:.0f} s")


def run(soak: Soak, minutes: float, rounds: int | None) -> None:
    """Rounds until the time is over, or so many; in a short run the third has a kill."""
    signal.signal(signal.SIGALRM, too_late)
    end = time.monotonic() + minutes * 60
    soak.start()
    while len(soak.samples) < rounds if rounds else time.monotonic() < end:
        signal.alarm(int(ANSWER_S))
        due = len(soak.samples) == 2 and not soak.kills
        if due or (soak.samples and soak.chance.randrange(KILL_EVERY) == 0):
            soak.round_with_a_kill()
            signal.alarm(int(ANSWER_S))
        soak.round()
    soak.end()
    signal.alarm(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Save, load, sync and heal until something grows")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rounds", type=int, help="so many rounds instead")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, ExitStack() as stack:
        soak = Soak(Path(folder), given.ranks, random.Random(given.seed))
        stack.callback(soak.kill)
        run(soak, given.minutes, given.rounds)
        found = soak.summary()
    print(json.dumps(found, indent=1))
    if soak.problems:
        raise SystemExit("\n".join(soak.problems))


if __name__ == "__main__":
    main()
