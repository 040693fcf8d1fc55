"""Flat buffers: many tensors, one behind the other, of which each rank has a segment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distcore.v1 import Layout, Piece, PlanError, Problem, Region
from ownerplan.layout import GlobalLayout
from ownerplan.matrix_view import Matrix, View, matrices_of
from ownerplan.placements import Ranks

if TYPE_CHECKING:
    from distcore.v1.runtime import Group


@dataclass(frozen=True, slots=True)
class FlatBuffer:
    """What `OwnerMuon` has to know of a parameter that is a rank's segment of a flat buffer.

    - `layout`: where the tensors lie, all numbers in elements.
    - `mesh`: the ranks, every axis of which cuts the buffer; not needed where the parameter is a
      DTensor of one dim, which says so itself.
    - `tensors`: the indices of those that take part; None for all of two dims and more. All else
      in the buffer is left as it is.
    - `views`: index -> how the tensor is seen as matrices, where that is not the group's way.
    - `group`: the process group, or the channel, of the ranks in `mesh`; None for the default
      group. It is used where the parameter is a plain tensor.

    PlanError (a ValueError) for a tensor that the layout does not have.
    """

    layout: GlobalLayout
    mesh: Ranks | None = None
    tensors: tuple[int, ...] | None = None
    views: Mapping[int, View] = field(default_factory=dict)
    group: Group | None = None

    def __post_init__(self) -> None:
        shapes = self.layout.tensor_shapes
        if self.tensors is None:
            chosen = tuple(at for at, shape in enumerate(shapes) if len(shape) >= 2)
            object.__setattr__(self, "tensors", chosen)
        problems = [
            Problem(f"tensor {at}", "range", f"the layout has {len(shapes)} tensors")
            for at in (*self.chosen, *self.views)
            if not 0 <= at < len(shapes)
        ]
        problems += [
            Problem(f"tensor {at}", "duplicate", "is listed more than once")
            for at in sorted(set(self.chosen))
            if self.chosen.count(at) > 1
        ]
        if problems:
            raise PlanError(problems)

    @property
    def chosen(self) -> tuple[int, ...]:
        """The tensors that take part."""
        return self.tensors or ()

    def matrices(self, view: View = "flatten") -> tuple[Matrix, ...]:
        """The matrices of all tensors that take part, as Regions of the buffer, which has one dim.

        >>> buffer = FlatBuffer(GlobalLayout.build([(6, 4), (4, 4)], 2))
        >>> [(m.region.start, m.region.stop, m.rows, m.cols) for m in buffer.matrices()]
        [((0,), (24,), 6, 4), ((24,), (40,), 4, 4)]
        """
        return tuple(
            self._flattened(at, matrix)
            for at in self.chosen
            for matrix in matrices_of(self.layout.tensor_shapes[at], self.views.get(at, view))
        )

    def segments(self, dtype: str) -> Layout:
        """The buffer's layout over the ranks of `mesh`; PlanError where there is no mesh."""
        if self.mesh is None:
            text = "a plain segment needs the mesh of the ranks that have the others"
            raise PlanError(Problem("mesh", "missing", text))
        pieces = {
            rank: (Piece(Region((held.start,), (held.end,)), (0,)),)
            for rank, held in self.layout.get_rank_ranges(self.mesh).items()
        }
        return Layout(shape=(self.layout.size,), dtype=dtype, pieces=pieces)

    def _flattened(self, at: int, matrix: Matrix) -> Matrix:
        place = 0
        for index, length in zip(matrix.region.start, self.layout.tensor_shapes[at], strict=True):
            place = place * length + index
        start = self.layout.tensor_to_offset[at] + place
        region = Region((start,), (start + matrix.region.numel,))
        return Matrix(region, matrix.rows, matrix.cols)
