"""What the ranks of test_run.py run under torchrun; the argument says how."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch.distributed as dist

from distcore import all_reduce, barrier, distributed_run


def note(folder: Path, rank: int, text: str) -> None:
    with (folder / f"rank{rank}").open("a") as file:
        file.write(f"{time.time()} {text}\n")


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
    main(sys.argv[1], Path(sys.argv[2]))
    if dist.is_initialized():
        sys.exit("the group was not destroyed")
