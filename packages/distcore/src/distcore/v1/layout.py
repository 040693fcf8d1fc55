"""Layout: for one tensor, which rank holds which Regions, and where in its local tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TypeAlias

from distcore.v1.dtypes import itemsize
from distcore.v1.errors import PlanError, Problem
from distcore.v1.placement import Placement, Reading, intervals
from distcore.v1.region import Region

Mesh: TypeAlias = "int | Sequence[Mesh]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A Region that a rank holds, and the place where it begins in the rank's local tensor.

    The piece lies in the local tensor as the box `Region(place, place + region.shape)`.
    """

    region: Region
    place: tuple[int, ...]

    def __post_init__(self) -> None:
        if type(self.place) is not tuple:
            object.__setattr__(self, "place", tuple(self.place))
        if len(self.place) != self.region.ndim or any(low < 0 for low in self.place):
            raise ValueError(f"place {self.place} does not fit {self.region}")

    @property
    def local(self) -> Region:
        """The box of the piece in the local tensor."""
        return Region(
            self.place,
            tuple(low + n for low, n in zip(self.place, self.region.shape, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class MeshForm:
    """The mesh and placements from which a Layout was made.

    `ranks` is row-major over `sizes`; one placement per axis.
    """

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    reading: Reading

    def coordinates(self, position: int) -> tuple[int, ...]:
        """The place in the mesh of the rank at `position` of `ranks`."""
        found = []
        for size in reversed(self.sizes):
            position, digit = divmod(position, size)
            found.append(digit)
        return tuple(reversed(found))


class Layout:
    """Which rank holds which Regions of one tensor, and where in its local tensor.

    A rank's pieces never overlap; several ranks may hold the same Region (replicas). A rank that
    takes part and holds nothing has one empty piece, so that its local shape is known.
    Immutable; equal where shape, dtype and every rank's pieces are equal.

    >>> layout = Layout.from_mesh(
    ...     shape=(10,), dtype="float32", mesh=[0, 1, 2, 3], placements=["S(0)"]
    ... )
    >>> [layout.local_shape(rank) for rank in layout.ranks]
    [(3,), (3,), (3,), (1,)]
    """

    __slots__ = ("_dtype", "_form", "_pieces", "_positions", "_shape")

    _shape: tuple[int, ...]
    _dtype: str
    _pieces: dict[int, tuple[Piece, ...]]
    _form: MeshForm | None
    _positions: dict[int, int]

    def __init__(
        self,
        *,
        shape: Sequence[int],
        dtype: str,
        pieces: Mapping[int, Iterable[Piece]],
    ) -> None:
        self._shape = _checked_shape(shape)
        itemsize(dtype)
        self._dtype = dtype
        self._form = None
        self._pieces = {rank: tuple(pieces[rank]) for rank in sorted(pieces)}
        self._positions = {rank: i for i, rank in enumerate(self._pieces)}
        problems = [
            problem
            for rank, held in self._pieces.items()
            for problem in _piece_problems(rank, held, Region.of_shape(self._shape))
        ]
        if problems:
            raise PlanError(problems)

    @classmethod
    def from_mesh(
        cls,
        *,
        shape: Sequence[int],
        dtype: str,
        mesh: Mesh,
        placements: Sequence[str],
        reading: Reading = "order",
    ) -> Layout:
        """The layout of a tensor placed on a mesh as torch's DTensor places it.

        `mesh` is a nested list of global ranks; `placements` has one of `'R'`, `'S(d)'`,
        `'_S(d,f)'` per mesh axis, applied in mesh order with torch.chunk's rule. `reading` says
        how `_S` is read (see `distcore.v1.placement`). Anything else raises PlanError.

        >>> Layout.from_mesh(
        ...     shape=(4, 2), dtype="int8", mesh=[[0, 1], [2, 3]], placements=["R", "S(0)"]
        ... ).pieces(3)[0].region
        Region(start=(2, 0), stop=(4, 2))
        """
        layout = cls.__new__(cls)
        layout._shape = _checked_shape(shape)
        itemsize(dtype)
        layout._dtype = dtype
        layout._form = _mesh_form(mesh, placements, len(layout._shape), reading)
        layout._pieces = {}
        layout._positions = {rank: i for i, rank in enumerate(layout._form.ranks)}
        return layout

    @classmethod
    def replicated(cls, *, shape: Sequence[int], dtype: str, ranks: Iterable[int]) -> Layout:
        """The layout of a tensor that every one of `ranks` holds whole."""
        return cls.from_mesh(shape=shape, dtype=dtype, mesh=list(ranks), placements=["R"])

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self._shape

    @property
    def dtype(self) -> str:
        """The dtype, named as torch names it without `torch.`."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor, counted once."""
        return prod(self._shape) * itemsize(self._dtype)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part: in mesh order, or ascending where there is no mesh."""
        return tuple(self._positions)

    @property
    def form(self) -> MeshForm | None:
        """The mesh and placements it was made from, or None where pieces were given."""
        return self._form

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """The pieces that `rank` holds, in local order; none for a rank outside the layout."""
        found = self._pieces.get(rank)
        if found is None:
            position = self._positions.get(rank)
            if position is None or self._form is None:
                return ()
            found = _mesh_pieces(self._form, self._shape, position)
            self._pieces[rank] = found
        return found

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor of `rank`: the smallest that holds all its pieces."""
        held = self.pieces(rank)
        if not held:
            raise KeyError(f"rank {rank} is not among the ranks {self.ranks} of this layout")
        return tuple(map(max, zip(*(piece.local.stop for piece in held), strict=True)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        if (self._shape, self._dtype) != (other._shape, other._dtype):
            return False
        if self._form is not None and self._form == other._form:
            return True
        if set(self.ranks) != set(other.ranks):
            return False
        return all(self.pieces(rank) == other.pieces(rank) for rank in self.ranks)

    def __hash__(self) -> int:
        return hash((self._shape, self._dtype, frozenset(self._positions)))

    def __repr__(self) -> str:
        if self._form is None:
            return f"Layout(shape={self._shape}, dtype={self._dtype!r}, ranks={self.ranks})"
        placements = ", ".join(map(str, self._form.placements))
        return (
            f"Layout(shape={self._shape}, dtype={self._dtype!r}, "
            f"mesh={self._form.sizes} over ranks {_shortened(self.ranks)}, [{placements}])"
        )


def _shortened(ranks: tuple[int, ...]) -> str:
    return str(ranks) if len(ranks) <= 8 else f"({ranks[0]}, ..., {ranks[-1]})"


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    found = tuple(int(n) for n in shape)
    if any(n < 0 for n in found):
        raise PlanError(Problem("shape", "shape", f"{found} has a negative length"))
    return found


def _piece_problems(rank: int, held: tuple[Piece, ...], whole: Region) -> list[Problem]:
    where = f"rank {rank}"
    if not held:
        return [Problem(where, "pieces", "has no piece; give an empty one or leave the rank out")]
    if any(piece.region.ndim != whole.ndim for piece in held):
        return [Problem(where, "shape", f"a piece has not the {whole.ndim} dims of the tensor")]
    problems = [
        Problem(where, "bounds", f"{piece.region} lies outside {whole}")
        for piece in held
        if not whole.contains(piece.region)
    ]
    for boxes, space in (
        ([piece.region for piece in held], "global"),
        ([piece.local for piece in held], "local"),
    ):
        pair = _overlap(boxes)
        if pair is not None:
            problems.append(
                Problem(where, "overlap", f"{pair[0]} and {pair[1]} overlap in {space} indices")
            )
    return problems


def _overlap(boxes: list[Region]) -> tuple[Region, Region] | None:
    """Two boxes that have an element in common, or None (a sweep along the first dim)."""
    active: list[Region] = []
    for box in sorted(box for box in boxes if not box.is_empty):
        if box.ndim:
            active = [other for other in active if other.stop[0] > box.start[0]]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None


def _mesh_form(mesh: Mesh, placements: Sequence[str], ndim: int, reading: Reading) -> MeshForm:
    problems: list[Problem] = []
    ranks, sizes = _flattened(mesh, problems)
    if len(placements) != len(sizes) or isinstance(placements, str):
        text = f"{len(placements)} placements for a mesh with {len(sizes)} axes"
        problems.append(Problem("placements", "count", text))
    if len(set(ranks)) != len(ranks) or any(rank < 0 for rank in ranks):
        problems.append(Problem("mesh", "ranks", "a rank is negative or stands in it twice"))
    parsed = []
    for axis, form in enumerate(placements):
        try:
            parsed.append(Placement.parse(form, ndim))
        except ValueError as error:
            problems.append(Problem(f"placements[{axis}]", "placement", str(error)))
    if reading not in ("order", "index"):
        problems.append(Problem("reading", "reading", f"{reading!r} is not 'order' or 'index'"))
    if problems:
        raise PlanError(problems)
    return MeshForm(tuple(ranks), tuple(sizes), tuple(parsed), reading)


def _flattened(mesh: Mesh, problems: list[Problem]) -> tuple[list[int], list[int]]:
    """The ranks of a nested list in row-major order, and the length of every level."""
    if not isinstance(mesh, Sequence) or isinstance(mesh, str):
        problems.append(Problem("mesh", "mesh", f"{mesh!r} is not a nested list of ranks"))
        return [], []
    sizes: list[int] = []
    level: list[Mesh] = list(mesh)
    sizes.append(len(level))
    while level and all(isinstance(item, Sequence) for item in level):
        rows = [item for item in level if isinstance(item, Sequence)]
        if len({len(row) for row in rows}) != 1:
            problems.append(Problem("mesh", "mesh", "its rows differ in length"))
            return [], sizes
        sizes.append(len(rows[0]))
        level = [item for row in rows for item in row]
    ranks = [int(item) for item in level if not isinstance(item, Sequence)]
    if len(ranks) != len(level) or not ranks:
        problems.append(Problem("mesh", "mesh", "it is empty, or mixes ranks and lists"))
    return ranks, sizes


def _mesh_pieces(form: MeshForm, shape: tuple[int, ...], position: int) -> tuple[Piece, ...]:
    coordinates = form.coordinates(position)
    per_dim = [
        intervals(dim, n, form.placements, form.sizes, coordinates, reading=form.reading)
        for dim, n in enumerate(shape)
    ]
    return tuple(
        Piece(
            Region(tuple(i.start for i in box), tuple(i.start + i.length for i in box)),
            tuple(i.place for i in box),
        )
        for box in product(*per_dim)
    )
