"""What the ranks of test_run.py run under torchrun; the argument says how."""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from distcore import all_reduce, barrier, distributed_run
from distcore.v1.errors import ChannelError, PeerError


def note(folder: Path, rank: int, text: str) -> None:
    with (folder / f"rank{rank}").open("a") as file:
        file.write(f"{time.time()} {text}\n")


def raise_on(folder: Path) -> None:
    """An own run that raises on: rank 1 fails, rank 0 then waits for a rank that sleeps."""
    limit = timedelta(seconds=4)
    for way in ("fails", "sleeps"):
        rank = -1
        try:
            with distributed_run(limit, "cpu", on_error="raise") as state:
                rank = state.rank
                barrier()
                if rank == 1 and way == "fails":
                    raise ValueError("boom on rank one")
                if rank == 1:
                    time.sleep(5)
                all_reduce("load", lambda: 1, list)
        except (ValueError, PeerError, ChannelError) as error:
            note(folder, rank, f"{type(error).__name__}: {error}")
        note(folder, rank, f"group left: {dist.is_initialized()}")


def main(way: str, folder: Path) -> None:
    with distributed_run(device="cpu") as state:
        barrier()
        if way == "clean":
            total = all_reduce("x", lambda: state.rank + 1, list)
            note(folder, state.rank, f"{state.world_size} {state.device} {total}")
            sys.exit(0)
        if state.rank == 1:
            time.sleep(0.3)
            note(folder, 1, "raises")
            raise ValueError("boom on rank one")
        try:
            if way == "barrier":
                dist.barrier()
            elif way == "labelled":
                all_reduce("load", lambda: 1, list)
        except BaseException as error:
            note(folder, 0, repr(error))
            raise


if __name__ == "__main__":
    if sys.argv[1] == "raise":
        raise_on(Path(sys.argv[2]))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
    if dist.is_initialized():
        sys.exit("the group was not destroyed")
