"""load and save are bit-equal to slicing, for any layout, dtype, memory, format and way.

Everything here is seen as bytes: a tensor of any dtype is a uint8 tensor with one dim more. So no
operation of a dtype is needed, and every NaN counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

import ckptx
from ckptx.formats.safetensors import DTYPES
from ckptx.savejob import Format
from distcore.testing import rank_threads
from distcore.v1 import ITEMSIZES, Channel, Layout, Piece, Region, itemsize
from distcore.v1.runtime import torch_dtype

# Torch says so once, wherever it first makes such a tensor.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

Shape = tuple[int, ...]

UNTOUCHED = 1
SHAPES: tuple[Shape, ...] = ((), (0,), (3, 0, 2), (7,), (1, 5), (6, 4), (5, 3, 2), (2, 3, 4, 2))
# Rows that are worth a read each, and columns that are not.
LARGE: tuple[Shape, ...] = ((4, 40_000), (900, 30))

# A quantized tensor of torch's own carries a scale beside its memory; it is refused.
EVERY = [
    name
    for name in sorted(ITEMSIZES)
    if hasattr(torch, name) and not name.startswith(("quint", "qint"))
]
STORED: dict[Format, list[str]] = {
    "dcp": EVERY,
    "safetensors": [name for name in EVERY if name in DTYPES.values()],
}


def key_of(dtype: str, shape: Shape) -> str:
    return f"{dtype} {list(shape)}"


def bytes_of(dtype: str, shape: Shape) -> Tensor:
    """What is stored of a tensor, in a shape with one dim more."""
    generator = torch.Generator().manual_seed(len(dtype) + sum(shape) * 31)
    raw = torch.randint(0, 256, (*shape, itemsize(dtype)), dtype=torch.uint8, generator=generator)
    return raw % 2 if dtype == "bool" else raw


def tensors_of(kind: Format) -> dict[str, tuple[str, Shape]]:
    """Two of the shapes for every dtype: what is opened takes time for each."""
    small = {}
    for number, dtype in enumerate(STORED[kind]):
        for step in (0, 3):
            shape = SHAPES[(number + step) % len(SHAPES)]
            small[key_of(dtype, shape)] = dtype, shape
    return small | {key_of("float32", shape): ("float32", shape) for shape in LARGE}


@dataclass(frozen=True)
class Memory:
    """Memory for a tensor whose dims lie in any order, and with gaps, filled with UNTOUCHED."""

    order: tuple[int, ...]
    gap: int

    def of(self, dtype: str, shape: Shape) -> tuple[Tensor, Tensor]:
        """A new tensor of the dtype, and its bytes."""
        lying = [shape[dim] for dim in self.order]
        size = itemsize(dtype)
        raw = torch.full((*lying, self.gap, size), UNTOUCHED, dtype=torch.uint8)
        back = [self.order.index(dim) for dim in range(len(shape))]
        values = raw.view(torch_dtype(dtype))[..., 0, 0].permute(back)
        return values, raw[..., 0, :].permute(*back, len(shape))


@dataclass(frozen=True)
class Target:
    """Where one key goes: who holds what (None: a plain tensor, whole on all), and in what memory.

    `private` means that each rank says only what it holds itself.
    """

    key: str
    dtype: str
    shape: Shape
    layout: Layout | None
    memory: Memory
    private: bool = False

    def layout_for(self, rank: int) -> Layout | None:
        if self.layout is None or not self.private:
            return self.layout
        pieces = {rank: self.layout.pieces(rank)}
        return Layout(shape=self.shape, dtype=self.dtype, pieces=pieces)

    def new(self, rank: int) -> tuple[Tensor, Tensor]:
        """The tensor to be filled, and its bytes."""
        if self.layout is None:
            return self.memory.of(self.dtype, self.shape)
        if rank not in self.layout.ranks:
            return Memory((0,), 1).of(self.dtype, (0,))
        return self.memory.of(self.dtype, self.layout.local_shape(rank))

    def expected(self, rank: int) -> Tensor:
        """The bytes that it shall have: those saved where it holds a piece, the old elsewhere."""
        whole = bytes_of(self.dtype, self.shape)
        if self.layout is None:
            return whole
        found = torch.full_like(self.new(rank)[1], UNTOUCHED)
        for piece in self.layout.pieces(rank) if rank in self.layout.ranks else ():
            found[piece.local.slices()] = whole[piece.region.slices()]
        return found


@dataclass(frozen=True)
class Case:
    """A load: the ranks, what they want, and the way."""

    size: int
    targets: tuple[Target, ...]
    mode: Any
    same_host: Any
    staging: int

    def check(self, path: Path) -> None:
        rank_threads(self.size, self._job, path).values()

    def _job(self, channel: Channel, path: Path) -> None:
        rank = channel.rank
        made = {target.key: target.new(rank) for target in self.targets}
        layouts = {target.key: target.layout_for(rank) for target in self.targets}
        report = ckptx.load(
            {key: values for key, (values, _) in made.items()},
            path,
            group=channel,
            strict=False,
            mode=self.mode,
            layouts={key: layout for key, layout in layouts.items() if layout is not None},
            same_host=self.same_host,
            max_staging_bytes=self.staging,
        )
        for target in self.targets:
            _, raw = made[target.key]
            assert torch.equal(raw, target.expected(rank)), (rank, target)
        if self.mode == "exchange":
            assert report.bytes_received == report.lower_bound_received


@st.composite
def meshes(draw: st.DrawFn, size: int, ndim: int) -> tuple[Any, list[str]]:
    """Some of the ranks on one or two axes, in any order, and a placement for each."""
    ranks = draw(st.permutations(range(size)))
    choices = ["R", *(f"S({dim})" for dim in range(ndim))]
    if size >= 4 and draw(st.booleans()):
        mesh: Any = [ranks[:2], ranks[2:4]]
        pair = [draw(st.sampled_from(choices)) for _ in range(2)]
        if pair[0] == pair[1] != "R" and draw(st.booleans()):
            pair[0] = f"_{pair[0][:-1]},2)"  # as FSDP2 over tensor parallelism has it
        return mesh, pair
    return ranks[: draw(st.integers(1, size))], [draw(st.sampled_from(choices))]


@st.composite
def pieces(draw: st.DrawFn, shape: Shape, size: int, holders: int) -> dict[int, tuple[Piece, ...]]:
    """Runs along one dim; each is held by some ranks, `holders` at least; they stack theirs up."""
    dim = draw(st.integers(0, len(shape) - 1))
    inner = draw(st.lists(st.integers(0, shape[dim]), max_size=4))
    found: dict[int, list[Piece]] = {}
    filled = dict.fromkeys(range(size), 0)
    runs = list(pairwise(sorted({0, shape[dim], *inner})))
    for low, high in draw(st.permutations(runs)):
        start = tuple(low if d == dim else 0 for d in range(len(shape)))
        stop = tuple(high if d == dim else n for d, n in enumerate(shape))
        for rank in draw(st.sets(st.integers(0, size - 1), min_size=holders)):
            place = tuple(filled[rank] if d == dim else 0 for d in range(len(shape)))
            found.setdefault(rank, []).append(Piece(Region(start, stop), place))
            # Sometimes there is room between two pieces that belongs to neither.
            filled[rank] += high - low + draw(st.integers(0, 1))
    if not found:
        found[0] = [Piece(Region((0,) * len(shape), (0,) * len(shape)), (0,) * len(shape))]
    return {rank: tuple(held) for rank, held in found.items()}


@st.composite
def targets(
    draw: st.DrawFn, stored: Mapping[str, tuple[str, Shape]], size: int, holders: int = 0
) -> Target:
    """One of the tensors in some layout, of which each element is held `holders` times or more."""
    key = draw(st.sampled_from(sorted(stored)))
    dtype, shape = stored[key]
    how = draw(st.sampled_from(["plain", "copies", "mesh", "mesh", "pieces", "pieces"]))
    layout = None
    if how == "copies":
        ranks = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
        layout = Layout.replicated(shape=shape, dtype=dtype, ranks=ranks)
    elif how == "mesh":
        mesh, placements = draw(meshes(size, len(shape)))
        layout = Layout.from_mesh(shape=shape, dtype=dtype, mesh=mesh, placements=placements)
    elif how == "pieces" and shape:
        layout = Layout(shape=shape, dtype=dtype, pieces=draw(pieces(shape, size, holders)))
    order = tuple(draw(st.permutations(range(len(shape)))))
    private = layout is not None and len(layout.ranks) == size and draw(st.booleans())
    return Target(key, dtype, shape, layout, Memory(order, draw(st.integers(1, 2))), private)


@st.composite
def cases(draw: st.DrawFn, kind: Format) -> Case:
    size = draw(st.integers(2, 4))
    stored = tensors_of(kind)
    wanted = draw(
        st.lists(targets(stored, size), min_size=1, max_size=5, unique_by=lambda t: t.key)
    )
    return Case(
        size,
        tuple(wanted),
        draw(st.sampled_from(["exchange", "direct", "auto"])),
        draw(st.sampled_from(["auto", "off"])),
        draw(st.sampled_from([128 << 10, 64 << 20])),
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every dtype and shape in both formats, each whole and in the parts of two ranks."""
    home = tmp_path_factory.mktemp("saved")
    for kind in STORED:
        save(home / kind, kind, 1)
        save(home / f"{kind} in parts", kind, 2)
    save_with_torch(home / "by torch")
    return home


def save_with_torch(path: Path) -> None:
    """Torch stores a tensor as it lies in memory, so here the dims lie in any order.

    It cannot save all dtypes there are; those of safetensors it can.
    """
    state = {}
    for number, (key, (dtype, shape)) in enumerate(tensors_of("safetensors").items()):
        orders = list(permutations(range(len(shape))))
        memory = Memory(orders[number % len(orders)], 1)
        state[key], raw = memory.of(dtype, shape)
        raw.copy_(bytes_of(dtype, shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is one process
        state_dict_saver.save(state, checkpoint_id=path, no_dist=True)


def save(path: Path, kind: Format, size: int) -> None:
    tensors = tensors_of(kind)
    layouts = {
        key: Layout.from_mesh(
            shape=shape,
            dtype=dtype,
            mesh=list(range(size)),
            placements=[f"S({len(shape) - 1})" if shape else "R"],
        )
        for key, (dtype, shape) in tensors.items()
    }

    def job(channel: Channel) -> None:
        state = {}
        for key, (dtype, shape) in tensors.items():
            target = Target(key, dtype, shape, layouts[key], Memory(tuple(range(len(shape))), 1))
            state[key], raw = target.new(channel.rank)
            raw.copy_(target.expected(channel.rank))
        ckptx.save(state, path, group=channel, format=kind, layouts=layouts)

    rank_threads(size, job, deadline_s=60).values()


BOUNDED = settings(
    max_examples=20,
    deadline=None,
    # A failing example may cost its timeout: do not look long for a smaller one.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def plain_case(kind: Format, wanted: Sequence[tuple[str, Shape]]) -> Case:
    """Whole tensors on two ranks, in channels_last order where there are four dims."""
    found = []
    for dtype, shape in wanted:
        order = (0, 2, 3, 1) if len(shape) == 4 else tuple(range(len(shape)))
        found.append(Target(key_of(dtype, shape), dtype, shape, None, Memory(order, 1)))
    return Case(2, tuple(found), "exchange", "auto", 64 << 20)


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("parts", ["", " in parts"])
def test_every_dtype(saved: Path, kind: Format, parts: str) -> None:
    plain_case(kind, list(tensors_of(kind).values())).check(saved / f"{kind}{parts}")


@pytest.mark.parametrize("parts", ["", " in parts"])
@BOUNDED
@given(case=cases("dcp"))
def test_any_layout_from_dcp(saved: Path, parts: str, case: Case) -> None:
    case.check(saved / f"dcp{parts}")


@pytest.mark.parametrize("parts", ["", " in parts"])
@BOUNDED
@given(case=cases("safetensors"))
def test_any_layout_from_safetensors(saved: Path, parts: str, case: Case) -> None:
    case.check(saved / f"safetensors{parts}")


@BOUNDED
@given(case=cases("safetensors"))
def test_any_layout_from_what_torch_saved(saved: Path, case: Case) -> None:
    case.check(saved / "by torch")


@st.composite
def saves(draw: st.DrawFn, kind: Format) -> tuple[int, list[Target], bool]:
    """The ranks, what they hold, and whether copies may be written in parts."""
    size = draw(st.integers(1, 4))
    held = targets(tensors_of(kind), size, holders=1)
    found = draw(st.lists(held, min_size=1, max_size=5, unique_by=lambda t: t.key))
    return size, found, draw(st.booleans())


def check_saved(path: Path, kind: Format, size: int, held: list[Target], split: bool) -> None:
    def job(channel: Channel) -> int:
        state, layouts = {}, {}
        for target in held:
            state[target.key], raw = target.new(channel.rank)
            raw.copy_(target.expected(channel.rank))
            layout = target.layout_for(channel.rank)
            if layout is not None:
                layouts[target.key] = layout
        report = ckptx.save(
            state, path, group=channel, format=kind, layouts=layouts, split=split, overwrite=True
        )
        return report.bytes_written

    written = sum(rank_threads(size, job).values())
    found = ckptx.open_checkpoint(path)
    assert set(found) == {target.key for target in held}
    assert written == found.nbytes
    for target in held:
        flat = found.read(target.key).flatten().view(torch.uint8)
        expected = bytes_of(target.dtype, target.shape)
        assert torch.equal(flat.reshape(expected.shape), expected), target


@BOUNDED
@given(case=saves("dcp"))
def test_any_layout_to_dcp(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    check_saved(tmp_path_factory.getbasetemp() / "any dcp", "dcp", *case)


@BOUNDED
@given(case=saves("safetensors"))
def test_any_layout_to_safetensors(tmp_path_factory: pytest.TempPathFactory, case: Any) -> None:
    check_saved(tmp_path_factory.getbasetemp() / "any safetensors", "safetensors", *case)
