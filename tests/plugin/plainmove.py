"""A resharder that takes the first holder of each element, and a transport through a folder."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch

from distcore.v1 import Layout, Plan, PlanError, Problem, Region, Transfer, require

require(1, by="plainmove")


class PlainResharder:
    """Fulfils `distcore.v1.Resharder`; who holds an element keeps it, else the first rank sends."""

    def plan(self, src: Mapping[str, Layout], dst: Mapping[str, Layout]) -> Plan:
        """Return a plan after which every rank of `dst` holds its Regions of every key."""
        problems = [Problem(key, "key", "is on one side only") for key in src.keys() ^ dst.keys()]
        problems += [
            Problem(key, "shape", f"{src[key].shape} and {dst[key].shape}")
            for key in src.keys() & dst.keys()
            if src[key].shape != dst[key].shape
        ]
        if problems:
            raise PlanError(sorted(problems, key=lambda problem: problem.where))
        return Plan(
            Transfer(key, sender, rank, region)
            for key in sorted(dst)
            for rank in dst[key].ranks
            for piece in dst[key].pieces(rank)
            for sender, region in origins(piece.region, src[key], rank)
        )


def origins(wanted: Region, held: Layout, rank: int) -> Iterator[tuple[int, Region]]:
    """Who sends what, so that all of `wanted` arrives at `rank` once."""
    rest = [wanted]
    for sender in sorted(held.ranks, key=lambda one: (one != rank, one)):
        for piece in held.pieces(sender):
            left: list[Region] = []
            for region in rest:
                common = region.intersect(piece.region)
                if common is None or common.is_empty:
                    left.append(region)
                    continue
                yield sender, common
                left += without(region, common)
            rest = left


def without(region: Region, inner: Region) -> Iterator[Region]:
    """What is left of a region without a part of it: at most two boxes per dim."""
    start, stop = list(region.start), list(region.stop)
    for dim in range(region.ndim):
        if start[dim] < inner.start[dim]:
            end = [*stop[:dim], inner.start[dim], *stop[dim + 1 :]]
            yield Region(tuple(start), tuple(end))
        if inner.stop[dim] < stop[dim]:
            begin = [*start[:dim], inner.stop[dim], *start[dim + 1 :]]
            yield Region(tuple(begin), tuple(stop))
        start[dim], stop[dim] = inner.start[dim], inner.stop[dim]


class FolderTransport:
    """Fulfils `distcore.v1.StateTransport` where all ranks see one folder."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._offered: Path | None = None

    def metadata(self) -> str:
        """The folder."""
        return str(self._folder)

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: object, timeout: timedelta
    ) -> None:
        """Write the state; it has its name when it is complete."""
        path = self._folder / f"{step}.pt"
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(state_dict, unfinished)
        unfinished.rename(path)
        self._offered = path

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta
    ) -> object:
        """Read the state of a step as soon as it is there; TimeoutError where it does not come."""
        path = Path(metadata) / f"{step}.pt"
        deadline = time.monotonic() + timeout.total_seconds()
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} did not come within {timeout}")
            time.sleep(0.01)
        return torch.load(path, weights_only=True)

    def disallow_checkpoint(self) -> None:
        """Take the file away."""
        if self._offered is not None:
            self._offered.unlink(missing_ok=True)
            self._offered = None

    def shutdown(self, wait: bool = True) -> None:
        """Offer nothing any more."""
        self.disallow_checkpoint()
