"""Plan: an ordered tuple of Transfers, the same on all ranks.

A plan says who sends which Region of which tensor to whom. It holds no tensors, groups or
devices, so that it can be made, compared, stored and played through for thousands of ranks in one
process. Inside it is a table of int columns: a million transfers take about 60 MB.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import gt
from typing import Final, overload

from distcore.v1.errors import PlanError, Problem
from distcore.v1.region import Region

FORMAT: Final = 1
KIND: Final = "distcore.plan"


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One Region of the tensor `key`, from the rank `src` to the rank `dst` (global ranks).

    `src == dst` is a copy from a rank's source to its own destination.
    """

    key: str
    src: int
    dst: int
    region: Region

    def __post_init__(self) -> None:
        if self.src < 0 or self.dst < 0:
            raise ValueError(f"{self.key!r}: ranks {self.src} -> {self.dst} must not be negative")


@dataclass(frozen=True, slots=True)
class Columns:
    """A plan as a table: row i is the i-th transfer. Columns are int64 arrays; do not change them.

    `key[i]` is an index into `keys`; the region of row i is `coords[at[i]:at[i + 1]]`: first the
    start, then the stop of every dim.
    """

    keys: tuple[str, ...]
    key: array[int]
    src: array[int]
    dst: array[int]
    at: array[int]
    coords: array[int]


class Plan(Sequence[Transfer]):
    """An ordered tuple of Transfers. Immutable; equal plans have equal digests.

    >>> plan = Plan([Transfer("w", 0, 1, Region((0,), (4,)))])
    >>> len(plan), plan.inverse()[0].src
    (1, 1)
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    __slots__ = ("_columns", "_digest")

    _columns: Columns
    _digest: str | None

    def __init__(self, transfers: Iterable[Transfer] = ()) -> None:
        numbers: dict[str, int] = {}
        ndims: list[int] = []
        key, src, dst, coords = array("q"), array("q"), array("q"), array("q")
        at = array("q", [0])
        for transfer in transfers:
            region = transfer.region
            number = numbers.setdefault(transfer.key, len(numbers))
            if number == len(ndims):
                ndims.append(len(region.start))
            elif ndims[number] != len(region.start):
                raise PlanError(_ndim_problem(transfer.key, ndims[number], len(region.start)))
            key.append(number)
            src.append(transfer.src)
            dst.append(transfer.dst)
            coords.extend(region.start)
            coords.extend(region.stop)
            at.append(len(coords))
        self._columns = Columns(tuple(numbers), key, src, dst, at, coords)
        self._digest = None

    @classmethod
    def from_columns(cls, columns: Columns) -> Plan:
        """Take over a table that a planner has built; PlanError where it is no plan."""
        problems = _column_problems(columns)
        if problems:
            raise PlanError(problems)
        plan = cls.__new__(cls)
        plan._columns = columns
        plan._digest = None
        return plan

    @property
    def columns(self) -> Columns:
        """The table inside, for code that walks many transfers."""
        return self._columns

    @property
    def keys(self) -> tuple[str, ...]:
        """The tensors' keys, in order of first appearance."""
        return self._columns.keys

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that send or receive, ascending."""
        return tuple(sorted({*self._columns.src, *self._columns.dst}))

    @property
    def digest(self) -> str:
        """32 hex digits that are equal exactly for equal plans, on every machine."""
        if self._digest is None:
            self._digest = _digest_of(self._columns)
        return self._digest

    def inverse(self) -> Plan:
        """The plan that carries everything back: source and destination changed over."""
        c = self._columns
        return Plan.from_columns(Columns(c.keys, c.key, c.dst, c.src, c.at, c.coords))

    def to_json(self) -> str:
        """The plan as JSON text (format 1), which any machine can read back."""
        c = self._columns
        table = {
            "kind": KIND,
            "format": FORMAT,
            "keys": list(c.keys),
            "ndims": _ndims(c),
            "key": c.key.tolist(),
            "src": c.src.tolist(),
            "dst": c.dst.tolist(),
            "coords": c.coords.tolist(),
        }
        return json.dumps(table, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote; PlanError names everything that is wrong with the text."""
        return cls.from_columns(_columns_of(text))

    def __len__(self) -> int:
        return len(self._columns.key)

    @overload
    def __getitem__(self, index: int) -> Transfer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, index: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        c = self._columns
        if not -len(self) <= index < len(self):
            raise IndexError(f"transfer {index} of {len(self)}")
        index %= len(self)
        low, high = c.at[index], c.at[index + 1]
        middle = (low + high) // 2
        region = Region(tuple(c.coords[low:middle]), tuple(c.coords[middle:high]))
        return Transfer(c.keys[c.key[index]], c.src[index], c.dst[index], region)

    def __iter__(self) -> Iterator[Transfer]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Plan({len(self)} transfers of {len(self.keys)} tensors, digest {self.digest[:8]})"


def _ndim_problem(key: str, expected: int, found: int) -> Problem:
    return Problem(key, "ndim", f"one region has {expected} dims, another {found}")


def _little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "little":
        return column.tobytes()
    turned = column[:]
    turned.byteswap()
    return turned.tobytes()


def _digest_of(columns: Columns) -> str:
    state = blake2b(digest_size=16)
    state.update(json.dumps([KIND, FORMAT, columns.keys]).encode())
    for column in (columns.key, columns.src, columns.dst, columns.at, columns.coords):
        state.update(len(column).to_bytes(8, "little"))
        state.update(_little_endian(column))
    return state.hexdigest()


def _ndims(columns: Columns) -> list[int]:
    ndims = [0] * len(columns.keys)
    for row, number in enumerate(columns.key):
        ndims[number] = (columns.at[row + 1] - columns.at[row]) // 2
    return ndims


def _columns_of(text: str) -> Columns:
    try:
        table = json.loads(text)
    except ValueError as error:
        raise PlanError(Problem("plan", "json", f"not JSON: {error}")) from None
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise PlanError(Problem("plan", "kind", f"not a {KIND} object"))
    if table.get("format") != FORMAT:
        found = table.get("format")
        raise PlanError(Problem("plan", "format", f"format {found!r}; this reads {FORMAT}"))
    keys, ndims = table.get("keys"), table.get("ndims")
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise PlanError(Problem("keys", "type", "not a list of strings"))
    columns = {name: _int_column(table, name) for name in ("key", "src", "dst", "coords")}
    if not isinstance(ndims, list) or len(ndims) != len(keys):
        raise PlanError(Problem("ndims", "length", f"not one number for each of {len(keys)} keys"))
    widths = [2 * n if isinstance(n, int) and n >= 0 else -1 for n in ndims]
    if min(widths, default=0) < 0 or not all(0 <= k < len(keys) for k in columns["key"]):
        raise PlanError(Problem("key", "range", "a number of dims or a key index is out of range"))
    at = array("q", [0])
    end = 0
    for number in columns["key"]:
        end += widths[number]
        at.append(end)
    return Columns(
        tuple(keys), columns["key"], columns["src"], columns["dst"], at, columns["coords"]
    )


def _int_column(table: dict[str, object], name: str) -> array[int]:
    values = table.get(name)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise PlanError(Problem(name, "type", "not a list of ints"))
    try:
        return array("q", values)
    except OverflowError:
        raise PlanError(Problem(name, "range", "a number does not fit 64 bits")) from None


def _column_problems(columns: Columns) -> list[Problem]:
    rows = len(columns.key)
    problems = [
        Problem(name, "length", f"{len(column)} entries for {rows} transfers")
        for name, column in (("src", columns.src), ("dst", columns.dst))
        if len(column) != rows
    ]
    if len(columns.at) != rows + 1 or columns.at[0] != 0 or columns.at[-1] != len(columns.coords):
        problems.append(Problem("at", "length", "does not cover the coordinates"))
    if len(set(columns.keys)) != len(columns.keys):
        problems.append(Problem("keys", "duplicate", "a key stands in it twice"))
    if problems:
        return problems
    for name, column in (("src", columns.src), ("dst", columns.dst), ("key", columns.key)):
        if rows and min(column) < 0:
            problems.append(Problem(name, "range", "a number is negative"))
    if rows and max(columns.key) >= len(columns.keys):
        problems.append(Problem("key", "range", f"an index is not below {len(columns.keys)}"))
    if _first_seen(columns.key) != list(range(len(columns.keys))):
        problems.append(Problem("keys", "order", "not in the order of first appearance"))
    return problems or _region_problems(columns)


def _first_seen(column: array[int]) -> list[int]:
    return list(dict.fromkeys(column))


def _region_problems(columns: Columns) -> list[Problem]:
    ndims: dict[int, int] = {}
    problems: list[Problem] = []
    for row, number in enumerate(columns.key):
        low, high = columns.at[row], columns.at[row + 1]
        ndim, odd = divmod(high - low, 2)
        key = columns.keys[number]
        if odd or ndim < 0 or ndims.setdefault(number, ndim) != ndim:
            problems.append(_ndim_problem(key, ndims.get(number, 0), ndim))
            continue
        start, stop = columns.coords[low : low + ndim], columns.coords[low + ndim : high]
        if any(map(gt, start, stop)):
            problems.append(Problem(key, "region", f"transfer {row}: start behind stop"))
    return problems
