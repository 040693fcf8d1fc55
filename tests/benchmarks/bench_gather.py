"""What gathering 64 MiB of one of four ranks costs in memory beside torch's `gather_object`.

Every rank is a process of its own, started anew for each way, so that its peak is that way's.
Figures are MiB of resident memory above what the rank held when the call began (its own 64 MiB
included), and seconds. The lower bound of the destination is what it returns: 64 MiB.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import distcore

RANKS = 4
SENDER = 2
MIB = 1 << 20
NBYTES = 64 * MIB
CHUNK = 8 * MIB
GROWTH_AT_MOST_MIB = (NBYTES + 2 * CHUNK) // MIB
WAYS = ("gather_bytes", "gather_state_dicts", "torch.gather_object")


def resident_nbytes() -> int:
    """What this process has in memory now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most that the process held, looked at every millisecond."""

    def __init__(self) -> None:
        self.nbytes = self._before = resident_nbytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def growth_mib(self) -> float:
        """End the watch and return the growth."""
        self._done.set()
        self._thread.join()
        return round((self.nbytes - self._before) / MIB, 1)

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.nbytes = max(self.nbytes, resident_nbytes())


def gather(way: str, rank: int) -> object:
    """One gather on rank 0; ranks but one send 1 KiB."""
    nbytes = NBYTES if rank == SENDER else 1024
    if way == "gather_bytes":
        data = PAYLOAD[:nbytes]
        return distcore.gather_bytes(data, 0, chunk_bytes=CHUNK)
    if way == "gather_state_dicts":
        state = {"w": TENSOR[: nbytes // 4]}
        count = 0
        for found in distcore.gather_state_dicts(state, 0, chunk_bytes=CHUNK):
            count += found["w"].numel()
        return count
    found_objects: list[object] | None = [None] * RANKS if rank == 0 else None
    dist.gather_object(PAYLOAD[:nbytes], found_objects)
    return found_objects


PAYLOAD = memoryview(b"")
TENSOR = torch.empty(0)


def run_rank(way: str, folder: Path) -> None:
    """Warm up, gather once, and leave the figures of this rank in a file."""
    global PAYLOAD, TENSOR  # noqa: PLW0603 - what the rank holds before the call
    with distcore.distributed_run(device="cpu") as state:
        rank = state.rank
        gather_small(way, rank)
        nbytes = NBYTES if rank == SENDER else 1024
        PAYLOAD = bytes(os.urandom(1024) * (nbytes // 1024))  # type: ignore[assignment]
        TENSOR = torch.ones(nbytes // 4)
        distcore.barrier()
        peak, begin = Peak(), time.perf_counter()
        kept = gather(way, rank)
        seconds = time.perf_counter() - begin
        figures = {"growth_mib": peak.growth_mib(), "seconds": round(seconds, 3)}
        del kept
        (folder / f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")


def gather_small(way: str, rank: int) -> None:
    """Load what the call needs, so that only data counts."""
    global PAYLOAD, TENSOR
    PAYLOAD, TENSOR = bytes(1024), torch.ones(256)  # type: ignore[assignment]
    gather(way, rank)


def rows(figures: dict[str, Any]) -> list[dict[str, object]]:
    """The growth of the destination beside its bound."""
    name = f"{WAYS[-1]} of {NBYTES // MIB} MiB"
    peer = figures[WAYS[-1]]["destination"]["growth_mib"]
    found: list[dict[str, object]] = [{"name": f"{name}, growth", "value": peer, "unit": "MiB"}]
    for way in WAYS[:-1]:
        growth = figures[way]["destination"]["growth_mib"]
        # The promise is about bytes; a state dict is decoded into tensors besides.
        limit = {"target": GROWTH_AT_MOST_MIB, "at_most": True} if way == WAYS[0] else {}
        found.append({"name": f"{way}, growth", "value": growth, "unit": "MiB", **limit})
    return found


def main() -> None:
    """Start the ranks for each way and print one JSON object, or be a rank."""
    if distcore.is_distributed_launch():
        run_rank(sys.argv[1], Path(sys.argv[2]))
        return
    figures = {}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                [*launch, "--nproc-per-node", str(RANKS), __file__, way, folder],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=300,
            )
            by_rank = [json.loads((Path(folder) / f"{r}.json").read_text()) for r in range(RANKS)]
        figures[way] = {"destination": by_rank[0], "sender": by_rank[SENDER]}
    print(
        json.dumps(
            {
                "benchmark": "gather",
                "ranks": RANKS,
                "data_mib": NBYTES // MIB,
                "chunk_mib": CHUNK // MIB,
                "figures": figures,
                "rows": rows(figures),
            }
        )
    )


if __name__ == "__main__":
    main()
