"""Execute between any two layouts: every element comes from where the layouts say that it is."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distcore.testing import rank_threads, strategies
from distcore.v1 import ITEMSIZES, Channel, Layout, Plan, Region, Transfer
from distcore.v1.runtime import Shard, execute, torch_dtype

SENTINEL = 0xA5
DTYPES = ("bool", "float8_e5m2", "bfloat16", "uint32", "float64", "complex128")
Index = tuple[int, ...]


@dataclass(frozen=True)
class Job:
    """Tensors by key, each with where it is and where it shall be, and how to move it."""

    size: int
    layouts: dict[str, tuple[Layout, Layout]]
    plan: Plan
    options: dict[str, Any]
    turned: frozenset[str]


def remapped(draw: st.DrawFn, layout: Layout, size: int) -> Layout:
    """The same layout on ranks below `size`, each in its place."""
    numbers = draw(st.permutations(range(size)))
    pieces = {
        numbers[at]: layout.pieces(rank)
        for at, rank in enumerate(sorted(layout.ranks, key=layout.ranks.index))
    }
    return Layout(shape=layout.shape, dtype=layout.dtype, pieces=pieces)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    size = draw(st.integers(1, 4))
    layouts = {}
    transfers = []
    for n in range(draw(st.integers(1, 3))):
        shape = draw(strategies.shapes(max_side=7))
        dtype = draw(st.sampled_from(DTYPES))
        made = strategies.layouts(shape=shape, dtype=dtype, max_ranks=size)
        src, dst = (remapped(draw, draw(made), size) for _ in range(2))
        layouts[f"t{n}"] = src, dst
        transfers += moves_between(draw, f"t{n}", src, dst)
    options = {
        "max_staging_bytes": draw(st.sampled_from((1 << 16, 1 << 22))),
        "verify": draw(st.sampled_from((None, "xxh3"))),
        "same_host": draw(st.sampled_from(("off", "auto"))),
    }
    turned = frozenset(key for key in layouts if draw(st.booleans()))
    return Job(size, layouts, Plan(draw(st.permutations(transfers))), options, turned)


def moves_between(draw: st.DrawFn, key: str, src: Layout, dst: Layout) -> list[Transfer]:
    """For every piece of every destination its parts, each from any of their holders."""
    holders: dict[Region, list[int]] = defaultdict(list)
    for rank in src.ranks:
        for piece in src.pieces(rank):
            holders[piece.region].append(rank)
    found = []
    for rank in dst.ranks:
        for piece in dst.pieces(rank):
            for region, ranks in holders.items():
                common = piece.region.intersect(region)
                if common is not None:
                    found.append(Transfer(key, draw(st.sampled_from(ranks)), rank, common))
    return found


def positions(layout: Layout, rank: int) -> dict[Index, Index]:
    """For every element that a rank holds: its index in its local tensor -> in the whole."""
    found = {}
    for piece in layout.pieces(rank):
        for step in product(*map(range, piece.region.shape)):
            local = tuple(map(sum, zip(piece.place, step, strict=True)))
            found[local] = tuple(map(sum, zip(piece.region.start, step, strict=True)))
    return found


def whole_bytes(key: str, layout: Layout) -> dict[Index, bytes]:
    """The bytes of every element of the whole tensor."""
    seed = int(key[1:])
    item = ITEMSIZES[layout.dtype]
    indices = list(product(*map(range, layout.shape)))
    data = torch.randint(
        0,
        256,
        (len(indices) * item,),
        dtype=torch.uint8,
        generator=torch.Generator().manual_seed(seed),
    )
    raw = bytes(data.tolist())
    return {index: raw[at * item : (at + 1) * item] for at, index in enumerate(indices)}


def local_tensor(layout: Layout, rank: int, *, turned: bool) -> torch.Tensor:
    """A tensor with a margin around what the rank holds, full of the sentinel."""
    shape = [n + 1 for n in layout.local_shape(rank)] if layout.shape else []
    item = ITEMSIZES[layout.dtype]
    numel = 1
    for n in shape:
        numel *= n
    flat = torch.full((numel * item,), SENTINEL, dtype=torch.uint8).view(torch_dtype(layout.dtype))
    return (
        flat.view(shape[::-1]).permute(tuple(range(len(shape))[::-1]))
        if turned
        else flat.view(shape)
    )


def read(tensor: torch.Tensor) -> dict[Index, bytes]:
    """The bytes of every element, by index."""
    item = tensor.element_size()
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(item)
    plain = tensor if carrier is None else tensor.view(carrier)
    raw = bytes(plain.contiguous().view(-1).view(torch.uint8).tolist())
    indices = product(*map(range, tensor.shape))
    return {index: raw[at * item : (at + 1) * item] for at, index in enumerate(indices)}


def write(tensor: torch.Tensor, values: dict[Index, bytes]) -> None:
    """Write elements, one by one."""
    raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else None
    for index, value in values.items():
        if raw is not None:
            raw[index] = value[0]
        else:
            tensor[index] = torch.frombuffer(bytearray(value), dtype=tensor.dtype)[0]


def filled(job: Job, rank: int) -> dict[str, Shard]:
    """What a rank has at first."""
    found = {}
    for key, (layout, _) in job.layouts.items():
        if rank not in layout.ranks:
            continue
        data = local_tensor(layout, rank, turned=key in job.turned)
        known = whole_bytes(key, layout)
        write(data, {at: known[index] for at, index in positions(layout, rank).items()})
        found[key] = Shard(data, layout.pieces(rank))
    return found


def move(channel: Channel, job: Job) -> dict[str, torch.Tensor]:
    sources = filled(job, channel.rank)
    places = {
        key: local_tensor(layout, channel.rank, turned=key not in job.turned)
        for key, (_, layout) in job.layouts.items()
        if channel.rank in layout.ranks
    }
    destinations = {
        key: Shard(data, job.layouts[key][1].pieces(channel.rank)) for key, data in places.items()
    }
    report = execute(job.plan, channel, sources, destinations, timeout=5, **job.options)
    assert report.staging_nbytes <= job.options["max_staging_bytes"]
    crossing = [t for t in job.plan if t.src != t.dst]
    nbytes = {key: ITEMSIZES[layouts[0].dtype] for key, layouts in job.layouts.items()}
    assert report.nbytes_received == sum(
        t.region.numel * nbytes[t.key] for t in crossing if t.dst == channel.rank
    )
    return places


@settings(max_examples=40)
@given(jobs())
def test_every_element_arrives_at_its_place_and_nothing_else_changes(job: Job) -> None:
    moved = rank_threads(job.size, move, job).values()
    for key, (_, layout) in job.layouts.items():
        known = whole_bytes(key, layout)
        for rank in layout.ranks:
            held = positions(layout, rank)
            margin = bytes([SENTINEL]) * ITEMSIZES[layout.dtype]
            for local, value in read(moved[rank][key]).items():
                assert value == (known[held[local]] if local in held else margin)
