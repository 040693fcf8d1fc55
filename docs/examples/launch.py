"""Starts the ranks as processes, hears what they tell, kills one of them, and replaces it.

The store in which ranks find each other lives here, with the process that none of them can take
down. Every group of ranks has a number and meets under a name of its own in the store.
"""

from __future__ import annotations

import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tell import Event, heard
from torch._C._distributed_c10d import TCPStore

SILENCE_S = 240.0
TOKEN = "SHARDWORKS_DEMO_TOKEN"


class RankFailed(RuntimeError):
    """A rank ended in another way than it should have, or none says anything any more."""


@dataclass(slots=True, eq=False)
class Process:
    """One rank's process, and the pipe through which it tells."""

    rank: int
    running: subprocess.Popen[bytes]
    pipe: int
    log: Path
    doomed: bool = False
    rest: bytearray = field(default_factory=bytearray)

    def lines(self) -> list[bytes] | None:
        """The lines that have come; None where the process has closed its end."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return None
        *lines, last = bytes(self.rest + data).split(b"\n")
        self.rest[:] = last
        return lines


class Launcher(AbstractContextManager["Launcher"]):
    """The ranks of one run of the story. As a context manager it leaves no process behind.

    `arguments` go to the script of every rank; `folder` gets what each of them prints.
    """

    def __init__(self, size: int, arguments: Sequence[str], folder: Path) -> None:
        self._size = size
        self._arguments = arguments
        self._folder = folder
        self._number = 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._selector = selectors.DefaultSelector()
        threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._environment = {**threads, **os.environ, TOKEN: secrets.token_urlsafe()}
        self.processes: dict[int, Process] = {}
        for rank in range(size):
            self._start(rank)

    def events(self) -> Iterator[Event]:
        """All that is told and seen, until the last rank has ended; RankFailed if one fails."""
        heard_at = time.monotonic()
        while self.processes:
            for key, _ in self._selector.select(timeout=1.0):
                heard_at = time.monotonic()
                yield from self._hear(key.data)
            if time.monotonic() - heard_at > SILENCE_S:
                raise RankFailed(f"no rank has said anything for {SILENCE_S:.0f} s")

    def __exit__(self, *_: object) -> None:
        for process in list(self.processes.values()):
            process.running.kill()
            self._leave(process)
        self._selector.close()

    def _hear(self, process: Process) -> Iterator[Event]:
        lines = process.lines()
        if lines is None:
            yield self._end(process)
            return
        for line in lines:
            event = heard(process.rank, line)
            if event.kind == "doomed":
                process.doomed = True
                os.kill(process.running.pid, signal.SIGKILL)
            yield event

    def _start(self, rank: int) -> None:
        """Start the process of a rank, which joins the present group."""
        reader, writer = os.pipe()
        script = str(Path(__file__).with_name("rank.py"))
        where = {
            "rank": rank,
            "size": self._size,
            "number": self._number,
            "port": self._store.port,
            "pipe": writer,
        }
        named = [f"--{name}={value}" for name, value in where.items()]
        log = self._folder / f"rank-{rank}-{self._number}.log"
        with log.open("wb") as output:
            running = subprocess.Popen(
                [sys.executable, script, *named, *self._arguments],
                env=self._environment,
                pass_fds=[writer],
                stdin=subprocess.PIPE,  # it closes when this process ends, and the rank ends too
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        os.close(writer)
        process = Process(rank, running, reader, log)
        self.processes[rank] = process
        self._selector.register(reader, selectors.EVENT_READ, process)

    def _leave(self, process: Process) -> int:
        """Wait for the end of a process that ends; its exit code."""
        self._selector.unregister(process.pipe)
        os.close(process.pipe)
        del self.processes[process.rank]
        with process.running as running:
            return running.wait(timeout=60)

    def _end(self, process: Process) -> Event:
        """Take leave of a process that has ended; replace it if it was killed on purpose."""
        code = self._leave(process)
        if process.doomed and code == -signal.SIGKILL:
            self._number += 1
            self._start(process.rank)
            # Now those that are left may meet again, with the new one in the place of the old.
            news = json.dumps({"size": self._size, "lost": [process.rank]})
            self._store.set(f"group {self._number}", news)
            return Event(process.rank, time.time(), "killed", {"pid": process.running.pid})
        if code != 0:
            text = process.log.read_text(errors="replace")[-4000:]
            raise RankFailed(f"rank {process.rank} ended with {code}; it printed:\n{text}")
        return Event(process.rank, time.time(), "ended", {})
