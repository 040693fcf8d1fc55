"""Planned: requests that somebody else's planner made, read once per group of ranks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ckptx.checkpoint import Checkpoint
from ckptx.errors import CheckpointPlanError
from ckptx.files import FileReader
from ckptx.integrity import Inspector
from ckptx.plan import MAX_STAGED_NBYTES, LoadPlan, plan_load
from ckptx.reading import Moved, Step
from ckptx.report import LoadReport
from ckptx.shared_values import shared_bytes
from ckptx.ways import Ways
from distcore.v1 import Layout, Piece, Problem, Region
from distcore.v1.runtime import Shard, agree, dtype_name, torch_dtype


@dataclass(frozen=True, slots=True)
class Request:
    """A box of a stored tensor that is wanted in `target`, a view of the tensor's shape there.

    `place` is where the view begins in the local tensor that it is a view of.
    """

    key: str
    region: Region
    target: torch.Tensor
    place: tuple[int, ...]


def read_requests(
    checkpoint: Checkpoint,
    requests: Sequence[Request],
    values: Sequence[str],
    ways: Ways,
    *,
    cast: bool,
) -> tuple[dict[str, bytes], LoadReport]:
    """Fill the targets of all ranks, and return the bytes of the `values` that this rank wants.

    Collective; each rank has requests of its own. Raises on every rank, before anything is
    written, where a request does not fit what is stored.
    """
    started = time.monotonic()
    agree("load", {"<files>": checkpoint.digest}, ways.channel, timeout_s=ways.timeout_s)

    def grouped() -> dict[str, list[Request]]:
        ways.check()
        return _grouped(checkpoint, requests, cast=cast)

    own = ways.together("check the requests", grouped)
    table = {
        key: [[request.region.start, request.region.stop] for request in found]
        for key, found in own.items()
    }
    rows = ways.rows(json.dumps([table, list(values)]).encode())
    tables = [json.loads(row) for row in rows]

    def planned() -> LoadPlan:
        staged = min(ways.max_staging_bytes // 2, MAX_STAGED_NBYTES)
        needs = _layouts(checkpoint, [found[0] for found in tables], ways.channel.ranks)
        return plan_load(needs, checkpoint.tensors, ways.channel.ranks, max_staged=staged)

    plan = ways.together("plan the load", planned)
    moved = _fill(checkpoint, own, plan, ways)
    wanted = sorted({key for found in tables for key in found[1]})
    found = shared_bytes(checkpoint, wanted, ways)
    return found, LoadReport(
        bytes_read=moved.read,
        bytes_sent=moved.sent,
        bytes_received=moved.received,
        header_bytes_read=checkpoint.header_nbytes,
        lower_bound_read=plan.lower_bound_read,
        lower_bound_slowest_read=plan.lower_bound_slowest,
        lower_bound_received=plan.lower_bound_received[ways.channel.rank],
        missing=(),
        unexpected=(),
        seconds=time.monotonic() - started,
    )


def _grouped(
    checkpoint: Checkpoint, requests: Iterable[Request], *, cast: bool
) -> dict[str, list[Request]]:
    """The requests by key, checked; those that ask for nothing are dropped."""
    found: dict[str, list[Request]] = {}
    problems = []
    for request in requests:
        stored = checkpoint.tensors.get(request.key)
        dtype = dtype_name(request.target.dtype)
        if stored is None:
            problems.append(Problem(request.key, "missing", "the checkpoint has no such tensor"))
        elif stored.dtype != dtype and not cast:
            text = f"the dtype is {dtype} in the state dict and {stored.dtype} in the checkpoint"
            problems.append(Problem(request.key, "dtype", text))
        elif tuple(request.target.shape) != request.region.shape:
            text = f"{request.region} is asked for in memory of {tuple(request.target.shape)}"
            problems.append(Problem(request.key, "shape", text))
        elif not request.region.is_empty:
            found.setdefault(request.key, []).append(request)
    if problems:
        raise CheckpointPlanError(problems)
    return found


def _layouts(
    checkpoint: Checkpoint,
    tables: Sequence[Mapping[str, Sequence[Sequence[Sequence[int]]]]],
    ranks: Sequence[int],
) -> dict[str, Layout]:
    """What each rank wants of each tensor."""
    pieces: dict[str, dict[int, list[Piece]]] = {}
    for rank, table in zip(ranks, tables, strict=True):
        for key, boxes in table.items():
            regions = dict.fromkeys(Region(tuple(start), tuple(stop)) for start, stop in boxes)
            pieces.setdefault(key, {})[rank] = [Piece(box, box.start) for box in regions]
    return {
        key: Layout(
            shape=checkpoint.tensors[key].shape,
            dtype=checkpoint.tensors[key].dtype,
            pieces=found,
        )
        for key, found in pieces.items()
    }


def _fill(
    checkpoint: Checkpoint, own: Mapping[str, list[Request]], plan: LoadPlan, ways: Ways
) -> Moved:
    moved = Moved()
    inspector = None
    if ways.verify and checkpoint.integrity is not None:
        inspector = Inspector(checkpoint.integrity, checkpoint.tensors)
    copies: list[tuple[Request, torch.Tensor]] = []
    places = {
        key: _place(found, torch_dtype(checkpoint.tensors[key].dtype), copies)
        for key, found in own.items()
    }
    with FileReader(inspector.watch if inspector is not None else None) as files:
        Step(ways, files, inspector, moved).together(plan, places)
        moved.read = files.nbytes
    for request, copy in copies:
        request.target.copy_(copy)
    return moved


def _place(
    requests: Sequence[Request], dtype: torch.dtype, copies: list[tuple[Request, torch.Tensor]]
) -> Shard:
    """The memory of the requests of one tensor: the views' own, or copies to be taken from it."""
    base = _base(requests)
    if base is not None and base.dtype == dtype:
        return Shard(base, tuple(Piece(request.region, request.place) for request in requests))
    # Side by side along a first dim of its own would change the dims; so along the first one.
    ndim = requests[0].region.ndim
    extent = [max(request.region.shape[dim] for request in requests) for dim in range(ndim)]
    if ndim:
        extent[0] = sum(request.region.shape[0] for request in requests)
    memory = torch.empty(extent, dtype=dtype, device=requests[0].target.device)
    pieces, row = [], 0
    for request in requests:
        place = (row, *(0,) * (ndim - 1)) if ndim else ()
        piece = Piece(request.region, place)
        pieces.append(piece)
        copies.append((request, memory[piece.local.slices()]))
        row += request.region.shape[0] if ndim else 0
    return Shard(memory, tuple(pieces))


def _base(requests: Sequence[Request]) -> torch.Tensor | None:
    """The local tensor that all targets are views of, as far as they reach; None where not."""
    first = requests[0].target
    strides = first.stride()
    begin = _begin(requests[0])
    for request in requests:
        target = request.target
        is_same = (
            target.stride() == strides
            and target.dtype == first.dtype
            and target.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and _begin(request) == begin
        )
        if not is_same:
            return None
    reach = [
        max(request.place[dim] + request.region.shape[dim] for request in requests)
        for dim in range(first.ndim)
    ]
    return first.as_strided(reach, strides, begin) if begin >= 0 else None


def _begin(request: Request) -> int:
    """Where in the storage the local tensor begins, counted in elements."""
    steps = zip(request.place, request.target.stride(), strict=True)
    return int(request.target.storage_offset()) - sum(low * step for low, step in steps)
