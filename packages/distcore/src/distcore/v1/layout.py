"""Layout: for one tensor, which rank holds which Regions, and where in its local tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import attrgetter, gt
from typing import TypeAlias

from distcore.v1.dtypes import itemsize
from distcore.v1.errors import PlanError, Problem
from distcore.v1.integers import as_int, as_ints
from distcore.v1.placement import Placement, Reading, intervals
from distcore.v1.region import Region

Mesh: TypeAlias = "int | Sequence[Mesh]"


@dataclass(frozen=True, slots=True)
class Piece:
    """A Region that a rank holds, and the place where it begins in the rank's local tensor.

    The piece lies in the local tensor as the box `Region(place, place + region.shape)`.
    PlanError where the place is negative or has other dims than the region.
    """

    region: Region
    place: tuple[int, ...]

    def __post_init__(self) -> None:
        region: object = self.region
        if not isinstance(region, Region):
            text = f"{region!r} is a {type(region).__name__}, not a Region"
            raise PlanError(Problem("piece", "type", text))
        place = as_ints(self.place, "place")
        object.__setattr__(self, "place", place)
        if len(place) != self.region.ndim:
            text = f"{place} has {len(place)} entries for {self.region}"
            raise PlanError(Problem("place", "ndim", text))
        if place and min(place) < 0:
            raise PlanError(Problem("place", "range", f"{place} is negative"))

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

    A rank's pieces never overlap, neither in the tensor nor in its local tensor; several ranks may
    hold the same Region (replicas), and a Region may have no holder. A rank that takes part and
    holds nothing has one empty piece, so that its local shape is known.
    Immutable; equal, whichever way it was made, where shape, dtype and every rank's pieces are
    equal.  PlanError lists everything that is wrong with the pieces given.

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
        self._pieces = _checked_pieces(pieces, Region.of_shape(self._shape))
        self._positions = {rank: i for i, rank in enumerate(self._pieces)}

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
        """The shape of the local tensor of `rank`: the smallest that holds all its pieces.

        PlanError for a rank outside the layout.
        """
        held = self.pieces(rank)
        if not held:
            text = f"not among the ranks {_listed(self.ranks)} of this layout"
            raise PlanError(Problem(f"rank {rank}", "rank", text))
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
            ranks = _listed(self.ranks)
            return f"Layout(shape={self._shape}, dtype={self._dtype!r}, pieces on ranks {ranks})"
        placements = ", ".join(map(str, self._form.placements))
        return (
            f"Layout(shape={self._shape}, dtype={self._dtype!r}, "
            f"mesh={self._form.sizes} over ranks {_listed(self.ranks)}, "
            f"[{placements}] by {self._form.reading})"
        )


def _listed(ranks: tuple[int, ...]) -> str:
    """The ranks in their order as text, runs of ascending neighbours as `first-last`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] + 1 == rank:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in runs)


def _checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    found = as_ints(shape, "shape")
    if any(n < 0 for n in found):
        raise PlanError(Problem("shape", "shape", f"{found} has a negative length"))
    return found


def _checked_pieces(
    pieces: Mapping[int, Iterable[Piece]], whole: Region
) -> dict[int, tuple[Piece, ...]]:
    """The pieces of every rank in local order, ranks ascending."""
    problems = [] if pieces else [Problem("pieces", "ranks", "no rank holds anything")]
    checked: dict[int, tuple[Piece, ...]] = {}
    for given, held in pieces.items():
        rank, held = as_int(given, "pieces"), tuple(held)
        if rank < 0:
            problems.append(Problem(f"rank {rank}", "rank", "a rank is never negative"))
        found = _piece_problems(rank, held, whole)
        problems += found
        checked[rank] = held if found else tuple(sorted(held, key=attrgetter("place", "region")))
    if problems:
        raise PlanError(problems)
    return dict(sorted(checked.items()))


def _piece_problems(rank: int, held: tuple[object, ...], whole: Region) -> list[Problem]:
    where = f"rank {rank}"
    if not held:
        return [Problem(where, "pieces", "has no piece; give an empty one or leave the rank out")]
    problems = [
        Problem(where, "type", f"{item!r} is a {type(item).__name__}, not a Piece")
        for item in held
        if not isinstance(item, Piece)
    ]
    pieces = [item for item in held if isinstance(item, Piece)]
    problems += [
        Problem(where, "ndim", f"{piece.region} has not {whole.ndim} dims")
        for piece in pieces
        if piece.region.ndim != whole.ndim
    ]
    if problems:
        return problems
    problems = [
        Problem(where, "bounds", f"{piece.region} lies outside {whole}")
        for piece in pieces
        if any(map(gt, whole.start, piece.region.start))
        or any(map(gt, piece.region.stop, whole.stop))
    ]
    for boxes, space in (
        ([piece.region for piece in pieces], "global"),
        ([piece.local for piece in pieces], "local"),
    ):
        pair = _overlap(boxes)
        if pair is not None:
            problems.append(
                Problem(where, "overlap", f"{pair[0]} and {pair[1]} overlap in {space} indices")
            )
    return problems


def _overlap(boxes: list[Region]) -> tuple[Region, Region] | None:
    """Two boxes that have an element in common, or None: a sweep along the dim cut most often."""
    boxes = [box for box in boxes if not box.is_empty]
    if len(boxes) < 2:
        return None
    starts = [len({box.start[dim] for box in boxes}) for dim in range(boxes[0].ndim)]
    dim = starts.index(max(starts)) if starts else None
    if dim is not None:
        boxes.sort(key=lambda box: box.start[dim])
    active: list[Region] = []
    for box in boxes:
        if dim is not None:
            active = [other for other in active if other.stop[dim] > box.start[dim]]
        for other in active:
            if box.intersect(other) is not None:
                return other, box
        active.append(box)
    return None


def _mesh_form(mesh: Mesh, placements: Sequence[str], ndim: int, reading: Reading) -> MeshForm:
    ranks, sizes, problems = _flattened(mesh)
    if isinstance(placements, str):
        text = f"{placements!r} is a text; give one placement per mesh axis in a list"
        raise PlanError([*problems, Problem("placements", "type", text)])
    placements = tuple(placements)
    if sizes and len(placements) != len(sizes):
        text = f"{len(placements)} placements for a mesh with {len(sizes)} axes"
        problems.append(Problem("placements", "count", text))
    parsed = []
    for axis, form in enumerate(placements):
        try:
            parsed.append(Placement.parse(form, ndim))
        except PlanError as error:
            where = f"placements[{axis}]"
            problems += [Problem(where, one.kind, one.text) for one in error.problems]
    if reading not in ("order", "index"):
        problems.append(Problem("reading", "reading", f"{reading!r} is not 'order' or 'index'"))
    if problems:
        raise PlanError(problems)
    return MeshForm(ranks, sizes, tuple(parsed), reading)


def _flattened(mesh: Mesh) -> tuple[tuple[int, ...], tuple[int, ...], list[Problem]]:
    """The ranks of a nested list in row-major order, and the length of every level.

    No lengths where the list is no mesh.
    """
    if not _is_list(mesh):
        return (), (), [Problem("mesh", "mesh", f"{mesh!r} is not a nested list of ranks")]
    level: list[Mesh] = [mesh]
    sizes: list[int] = []
    while level and all(map(_is_list, level)):
        rows = [item for item in level if isinstance(item, Sequence)]
        if len({len(row) for row in rows}) != 1:
            return (), (), [Problem("mesh", "mesh", "its rows differ in length")]
        sizes.append(len(rows[0]))
        level = [item for row in rows for item in row]
    if not level or any(map(_is_list, level)):
        return (), (), [Problem("mesh", "mesh", "it is empty, or mixes ranks and lists")]
    ranks = as_ints(level, "mesh")
    problems = [Problem("mesh", "ranks", f"rank {rank} is negative") for rank in ranks if rank < 0]
    problems += [
        Problem("mesh", "ranks", f"rank {rank} stands in it {times} times")
        for rank, times in Counter(ranks).items()
        if times > 1
    ]
    return ranks, tuple(sizes), problems


def _is_list(item: object) -> bool:
    return isinstance(item, Sequence) and not isinstance(item, str | bytes)


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
