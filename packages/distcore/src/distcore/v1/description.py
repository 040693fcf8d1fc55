"""Description: a Layout as plain JSON data, and back (format 1).

A layout made from a mesh is described by its mesh and placements, any other by its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final, cast

from distcore.v1.errors import PlanError, Problem
from distcore.v1.layout import Layout, Mesh, Piece
from distcore.v1.placement import Reading
from distcore.v1.region import Region

FORMAT: Final = 1
MAX_PIECES: Final = 1 << 20


def describe_layout(layout: Layout) -> dict[str, object]:
    """The layout as data that `json.dumps` takes; `layout_from` reads it back.

    >>> layout = Layout.replicated(shape=(2,), dtype="int8", ranks=[0, 1])
    >>> describe_layout(layout)["placements"], layout_from(describe_layout(layout)) == layout
    (['R'], True)
    """
    table: dict[str, object] = {
        "format": FORMAT,
        "shape": list(layout.shape),
        "dtype": layout.dtype,
    }
    if layout.form is None:
        table["pieces"] = [
            [rank, list(piece.region.start), list(piece.region.stop), list(piece.place)]
            for rank in layout.ranks
            for piece in layout.pieces(rank)
        ]
    else:
        table["ranks"] = list(layout.form.ranks)
        table["mesh"] = list(layout.form.sizes)
        table["placements"] = [str(placement) for placement in layout.form.placements]
        table["reading"] = layout.form.reading
    return table


def layout_from(description: object) -> Layout:
    """The layout that `describe_layout` described; PlanError where the data describe none."""
    if not isinstance(description, Mapping):
        raise PlanError(Problem("layout", "type", f"{description!r} is not an object"))
    table = cast("Mapping[str, object]", description)
    if table.get("format") != FORMAT:
        text = f"format {table.get('format')!r}; this reads {FORMAT}"
        raise PlanError(Problem("layout", "format", text))
    dtype = table.get("dtype")
    if not isinstance(dtype, str):
        raise PlanError(Problem("dtype", "type", f"{dtype!r} is not a string"))
    shape = _list_of(table, "shape")
    try:
        if "pieces" in table:
            pieces = _pieces(_list_of(table, "pieces"))
            return Layout(shape=cast("list[int]", shape), dtype=dtype, pieces=pieces)
        return Layout.from_mesh(
            shape=cast("list[int]", shape),
            dtype=dtype,
            mesh=_nested(_list_of(table, "ranks"), _list_of(table, "mesh")),
            placements=cast("list[str]", _list_of(table, "placements")),
            reading=cast("Reading", table.get("reading", "order")),
        )
    except PlanError:
        raise
    except (TypeError, ValueError) as error:
        raise PlanError(Problem("layout", "value", str(error))) from None


def _list_of(table: Mapping[str, object], name: str) -> list[object]:
    value = table.get(name)
    if not isinstance(value, list) or len(value) > MAX_PIECES:
        raise PlanError(Problem(name, "type", "is missing, too long or not a list"))
    return cast("list[object]", value)


def _pieces(rows: list[object]) -> dict[int, list[Piece]]:
    pieces: dict[int, list[Piece]] = {}
    for row in rows:
        if not isinstance(row, list) or len(row) != 4 or type(row[0]) is not int:
            raise PlanError(Problem("pieces", "type", f"{row!r} is not [rank, start, stop, place]"))
        rank, start, stop, place = row
        pieces.setdefault(rank, []).append(Piece(Region(tuple(start), tuple(stop)), tuple(place)))
    return pieces


def _nested(ranks: list[object], sizes: list[object]) -> Mesh:
    """The nested list of a mesh from its ranks in row-major order and the length of every level."""
    lengths = [size for size in sizes if type(size) is int and size > 0]
    if not lengths or len(lengths) != len(sizes) or prod(lengths) != len(ranks):
        raise PlanError(Problem("mesh", "mesh", f"sizes {sizes} for {len(ranks)} ranks"))
    level = list(ranks)
    for length in reversed(lengths[1:]):
        level = [level[at : at + length] for at in range(0, len(level), length)]
    return cast("Mesh", level)
