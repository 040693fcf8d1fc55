"""Roster: the records of all ranks, put together and held against each other.

A pure function of the records, so that all ranks come to the same result, or the same error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distcore.v1 import DisagreementError, Layout, PlanError, Problem, itemsize, layout_from
from reshard.records import UNKNOWN, Record, Row

_SIDES = {"src": "source", "dst": "destination"}


@dataclass(frozen=True, slots=True)
class Side:
    """The tensors of one side by key: their layouts, and along which axes they are partial.

    `is_plain` names those that every rank brings whole.
    """

    layouts: Mapping[str, Layout]
    partial: Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True)
class Roster:
    """What all ranks have together; keys ascending. `has_values`: nothing is on the meta device."""

    src: Side
    dst: Side
    aliases: Mapping[str, str]
    has_values: bool


def merge(records: Sequence[Record], ranks: Sequence[int], *, casts: Mapping[str, bool]) -> Roster:
    """Put the records together. `ranks` are those of the group.

    Raises DisagreementError where ranks describe one tensor differently, PlanError that lists
    what is missing or does not fit; both name keys and ranks, and are the same on all ranks.
    `casts` says for a key (or for `"*"`, all others) whether its dtypes may differ.
    """
    _compare_terms(records)
    rows = {side: _collect(records, side) for side in _SIDES}
    for side in _SIDES:
        _compare(rows[side], side)
        _compare_order(records, side)
    known = rows["src"].keys() | rows["dst"].keys()
    problems = [
        Problem(key, "cast", "no rank gives a tensor of this name")
        for key in sorted(casts.keys() - known - {"*"})
    ]
    sides = {side: _side(rows[side], side, ranks, problems) for side in _SIDES}
    problems += _key_problems(rows)
    src, dst = sides["src"], sides["dst"]
    problems += [
        Problem(key, "partial", "a destination cannot be partial") for key in sorted(dst.partial)
    ]
    for key in sorted(src.layouts.keys() & dst.layouts.keys()):
        problems += _fit_problems(key, rows, may_cast=casts.get(key, casts.get("*", False)))
    aliases = _aliases(rows, src, dst, problems)
    if problems:
        raise PlanError(problems)
    has_values = all(row.has_values for side in rows.values() for _, row in _all(side))
    return Roster(src, dst, aliases, has_values)


Found = dict[str, list[tuple[tuple[int, ...], Row]]]
"""By key every different row, with the ranks that gave it."""


def _all(found: Found) -> Iterable[tuple[tuple[int, ...], Row]]:
    return (entry for entries in found.values() for entry in entries)


def _collect(records: Sequence[Record], side: str) -> Found:
    found: Found = {}
    for record in records:
        rows: tuple[Row, ...] = getattr(record, side)
        for row in rows:
            found.setdefault(row.key, []).append((record.ranks, row))
    return dict(sorted(found.items()))


def _compare_terms(records: Sequence[Record]) -> None:
    if len({record.terms for record in records}) > 1:
        values = {rank: record.terms for record in records for rank in record.ranks}
        raise DisagreementError("reshard options", dict(sorted(values.items())))


def _compare(found: Found, side: str) -> None:
    """DisagreementError where two ranks describe one tensor differently."""
    told: dict[int, list[str]] = {}
    labels = []
    for key, entries in found.items():
        if len(entries) == 1 or len({_told(row) for row in {row for _, row in entries}}) == 1:
            continue
        labels.append(key)
        for ranks, row in entries:
            for rank in ranks:
                told.setdefault(rank, []).append(f"{key}: {_told(row)}")
    if labels:
        more = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
        values = {rank: "; ".join(told[rank][:4]) for rank in sorted(told)}
        raise DisagreementError(f"the {_SIDES[side]} of {labels[0]!r}{more}", values)


def _told(row: Row) -> str:
    """How a row reads, less what may differ between the ranks."""
    form = "whole on each rank" if row.form is None else _without_reading(row.form)
    partial = f", partial {row.op} along axes {list(row.partial)}" if row.partial else ""
    return f"{row.dtype} {list(row.shape)}, {form}{partial}"


def _without_reading(form: str) -> str:
    table = json.loads(form)
    if "pieces" in table:
        return f"{len(table['pieces'])} pieces: {str(table['pieces'])[:200]}"
    return f"mesh {table['mesh']} of ranks {table['ranks']}, placements {table['placements']}"


def _compare_order(records: Sequence[Record], side: str) -> None:
    """DisagreementError where two ranks have the same keys in a different order.

    The tensors could be told apart by their keys all the same. But ranks that build one dict in
    two orders do not run the same program, and whatever else goes by order would go wrong.
    """
    listed = [(record.ranks, [row.key for row in getattr(record, side)]) for record in records]
    ranks, longest = max(listed, key=lambda entry: len(entry[1]))
    places = {key: place for place, key in enumerate(longest)}
    for others, keys in listed:
        common = [key for key in keys if key in places]
        wanted = sorted(common, key=places.__getitem__)
        if common == wanted:
            continue
        one, two = next(pair for pair in zip(wanted, common, strict=True) if len({*pair}) > 1)
        values = dict.fromkeys(ranks, f"{one!r} before {two!r}")
        values |= dict.fromkeys(others, f"{two!r} before {one!r}")
        label = f"the order of {one!r} and {two!r} in the {_SIDES[side]} dict"
        raise DisagreementError(label, dict(sorted(values.items())))


def _side(found: Found, side: str, ranks: Sequence[int], problems: list[Problem]) -> Side:
    """The layouts of one side; what is wrong with them goes to `problems`."""
    layouts: dict[str, Layout] = {}
    partial = {}
    known: dict[tuple[object, ...], Layout] = {}
    group = set(ranks)
    for key, entries in found.items():
        givers = sorted(rank for given, _ in entries for rank in given)
        row = entries[0][1]
        forms = tuple(sorted({row.form for _, row in entries if row.form is not None}))
        place = (row.shape, row.dtype, forms, () if forms else tuple(givers))
        layout = known.get(place)
        if layout is None:
            layout = known[place] = _layout(row, forms, givers)
        layouts[key] = layout
        if row.partial:
            partial[key] = (row.partial, row.op)
        text = f"is in the mesh of the {_SIDES[side]}, but"
        for rank in sorted(set(layout.ranks) - set(givers)):
            what = "gives no tensor" if rank in group else f"not in the group of {sorted(group)}"
            problems.append(Problem(key, "missing", f"rank {rank} {text} {what}"))
    return Side(layouts, partial)


def _layout(row: Row, forms: tuple[str, ...], givers: list[int]) -> Layout:
    if not forms:
        return Layout.replicated(shape=row.shape, dtype=row.dtype, ranks=givers)
    tables = [json.loads(form) for form in forms]
    # Where a rank's local shape fits only the reading by index, that is the reading.
    chosen = next((table for table in tables if table.get("reading") == "index"), tables[0])
    return layout_from({**chosen, "shape": list(row.shape), "dtype": row.dtype})


def _key_problems(rows: Mapping[str, Found]) -> list[Problem]:
    problems = []
    for key in sorted(rows["src"].keys() ^ rows["dst"].keys()):
        has = "src" if key in rows["src"] else "dst"
        lacks = "dst" if has == "src" else "src"
        givers = sorted(rank for given, _ in rows[has][key] for rank in given)
        text = f"ranks {givers} give a {_SIDES[has]}, but no rank gives a {_SIDES[lacks]}"
        problems.append(Problem(key, "missing", text))
    return problems


def _fit_problems(key: str, rows: Mapping[str, Found], *, may_cast: bool) -> list[Problem]:
    src, dst = ((entries[0][0], entries[0][1]) for entries in (rows["src"][key], rows["dst"][key]))
    problems = []
    ends = f"(as on rank {src[0][0]})", f"(as on rank {dst[0][0]})"
    if src[1].shape != dst[1].shape:
        text = f"the source is {src[1].shape} {ends[0]}, the destination {dst[1].shape} {ends[1]}"
        problems.append(Problem(key, "shape", text))
    if src[1].dtype != dst[1].dtype and not may_cast:
        text = f"the source is {src[1].dtype} {ends[0]}, the destination {dst[1].dtype} {ends[1]}"
        problems.append(Problem(key, "dtype", f"{text}; cast='convert' would convert it"))
    return problems


def _aliases(
    rows: Mapping[str, Found], src: Side, dst: Side, problems: list[Problem]
) -> dict[str, str]:
    """The keys that share memory with an earlier one at both ends."""
    aliases = {}
    for key, entries in rows["dst"].items():
        told = {row.alias for _, row in entries} - {UNKNOWN}
        if not told - {""}:
            continue
        sources = {row.alias for _, row in rows["src"].get(key, ())} - {UNKNOWN}
        (other, *_) = sorted(told - {""})
        fits = (
            src.layouts.get(key) == src.layouts.get(other)
            and dst.layouts[key] == dst.layouts[other]
        )
        if told == sources == {other} and fits and key not in src.partial:
            aliases[key] = other
            continue
        givers = sorted(rank for given, row in entries if row.alias == other for rank in given)
        text = f"shares the memory of {other!r} on ranks {givers}, but their sources are apart"
        problems.append(Problem(key, "alias", text))
    return aliases


def wire_dtype(src: str, dst: str) -> str:
    """The dtype on the wire of a tensor that is converted: the narrower, to round only once."""
    return dst if itemsize(dst) <= itemsize(src) else src
