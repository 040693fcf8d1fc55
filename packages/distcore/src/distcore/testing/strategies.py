"""Hypothesis strategies for the values of the interface. The one module that needs hypothesis.

Sizes are small, so that a failing example is easy to read, and the odd cases are common: no dims,
dims without elements, ranks that hold nothing, meshes whose ranks are out of order.

    @given(strategies.layouts(), st.data())
    def test_every_region_lies_in_the_tensor(layout: Layout, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(layout.ranks))
        whole = Region.of_shape(layout.shape)
        assert all(whole.contains(piece.region) for piece in layout.pieces(rank))
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from hypothesis import strategies as st

from distcore.v1 import ITEMSIZES, Layout, Piece, Plan, Region, Transfer

Mesh = list[int] | list["Mesh"]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlacedMesh:
    """What `Layout.from_mesh` takes besides shape and dtype."""

    mesh: Mesh
    placements: tuple[str, ...]


def shapes(*, min_dims: int = 0, max_dims: int = 3, max_side: int = 9) -> st.SearchStrategy[Shape]:
    """Shapes of tensors, without dims and without elements too."""
    side = st.integers(0, max_side)
    return st.lists(side, min_size=min_dims, max_size=max_dims).map(tuple)


def dtypes() -> st.SearchStrategy[str]:
    """Names of dtypes of every size."""
    return st.sampled_from(sorted(ITEMSIZES))


@st.composite
def regions(draw: st.DrawFn, within: st.SearchStrategy[Shape] | Shape | None = None) -> Region:
    """Regions inside a tensor of the shape `within`, or of any shape."""
    if not isinstance(within, tuple):
        within = draw(shapes() if within is None else within)
    corners = [sorted(draw(st.tuples(*[st.integers(0, side)] * 2))) for side in within]
    return Region(tuple(low for low, _ in corners), tuple(high for _, high in corners))


@st.composite
def meshes(draw: st.DrawFn, *, max_axes: int = 3, max_ranks: int = 8) -> Mesh:
    """Nested lists of different ranks, rarely in order and not always from 0."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        sizes.append(draw(st.integers(1, max(1, max_ranks // prod(sizes)))))
    first = draw(st.integers(0, 3))
    ranks = draw(st.permutations(range(first, first + 2 * max_ranks)))[: prod(sizes)]
    return _nested(list(ranks), sizes)


@st.composite
def placed_meshes(
    draw: st.DrawFn, ndim: int, *, strided: bool = True, max_axes: int = 3, max_ranks: int = 8
) -> PlacedMesh:
    """A mesh and a placement per axis for a tensor of `ndim` dims.

    `strided` allows `'_S(d,f)'`, in the form that FSDP2 over tensor parallelism has: the factor
    is the number of cuts of the same dim by axes further right.
    """
    mesh = draw(meshes(max_axes=max_axes, max_ranks=max_ranks))
    sizes = _sizes(mesh)
    choices = st.sampled_from([None, *range(ndim)])
    dims = [draw(choices) for _ in sizes]
    placements = []
    for axis, dim in enumerate(dims):
        right = [size for size, other in zip(sizes, dims, strict=True) if other == dim]
        right = right[len(right) - dims[axis + 1 :].count(dim) :]
        if dim is None:
            placements.append("R")
        elif strided and right and draw(st.booleans()):
            placements.append(f"_S({dim},{prod(right)})")
        else:
            placements.append(f"S({dim})")
    return PlacedMesh(mesh, tuple(placements))


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    shape: Shape | None = None,
    dtype: str | None = None,
    strided: bool = True,
    max_ranks: int = 8,
) -> Layout:
    """Layouts from a mesh, or from pieces: runs along one dim, dealt to ranks, each held once."""
    shape = draw(shapes()) if shape is None else shape
    dtype = draw(dtypes()) if dtype is None else dtype
    if draw(st.booleans()):
        placed = draw(placed_meshes(len(shape), strided=strided, max_ranks=max_ranks))
        return Layout.from_mesh(
            shape=shape, dtype=dtype, mesh=placed.mesh, placements=placed.placements
        )
    pieces = draw(_pieces(shape, max_ranks))
    return Layout(shape=shape, dtype=dtype, pieces=pieces)


@st.composite
def layout_pairs(draw: st.DrawFn, *, max_ranks: int = 8) -> tuple[Layout, Layout]:
    """Two layouts of one tensor: where it is, and where it shall be."""
    shape, dtype = draw(shapes()), draw(dtypes())
    one, other = (draw(layouts(shape=shape, dtype=dtype, max_ranks=max_ranks)) for _ in range(2))
    return one, other


@st.composite
def plans(draw: st.DrawFn, *, num_ranks: int = 4, max_transfers: int = 12) -> Plan:
    """Plans over the ranks below `num_ranks`: any Regions of a few tensors, in any order."""
    tensors = draw(st.dictionaries(st.text(max_size=4), shapes(), min_size=1, max_size=4))
    rank = st.integers(0, num_ranks - 1)
    transfers = []
    for _ in range(draw(st.integers(0, max_transfers))):
        key = draw(st.sampled_from(sorted(tensors)))
        region = draw(regions(tensors[key]))
        transfers.append(Transfer(key, draw(rank), draw(rank), region))
    return Plan(transfers)


@st.composite
def _pieces(draw: st.DrawFn, shape: Shape, max_ranks: int) -> dict[int, list[Piece]]:
    """Cut the tensor along one dim into runs, and deal them to ranks that stack them up."""
    ranks = draw(st.lists(st.integers(0, 12), min_size=1, max_size=max_ranks, unique=True))
    found: dict[int, list[Piece]] = {}
    if shape:
        dim = draw(st.integers(0, len(shape) - 1))
        inner = draw(st.lists(st.integers(0, shape[dim]), max_size=6))
        cuts = sorted({0, shape[dim], *inner})
        for low, high in pairwise(cuts):
            rank = draw(st.sampled_from(ranks))
            held = found.setdefault(rank, [])
            place = sum(piece.region.shape[dim] for piece in held)
            held.append(_run(shape, dim, (low, high), place))
    for rank in set(ranks) - set(found):
        # A tensor without dims cannot be cut: all ranks hold it. Else these hold nothing.
        found[rank] = [_run(shape, 0, (0, 0), 0) if shape else _whole(shape)]
    return found


def _run(shape: Shape, dim: int, run: tuple[int, int], place: int) -> Piece:
    start, stop, at = [0] * len(shape), list(shape), [0] * len(shape)
    start[dim], stop[dim] = run
    at[dim] = place
    return Piece(Region(tuple(start), tuple(stop)), tuple(at))


def _whole(shape: Shape) -> Piece:
    return Piece(Region.of_shape(shape), (0,) * len(shape))


def _nested(ranks: list[int], sizes: list[int]) -> Mesh:
    if len(sizes) == 1:
        return ranks
    step = len(ranks) // sizes[0]
    return [_nested(ranks[at : at + step], sizes[1:]) for at in range(0, len(ranks), step)]


def _sizes(mesh: Mesh) -> list[int]:
    sizes = []
    level: object = mesh
    while isinstance(level, list):
        sizes.append(len(level))
        level = level[0]
    return sizes
