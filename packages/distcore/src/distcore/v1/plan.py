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
from itertools import accumulate, count
from operator import gt, index
from typing import Final, overload

from distcore.v1.errors import PlanError, Problem
from distcore.v1.integers import as_int
from distcore.v1.region import Region

FORMAT: Final = 1
KIND: Final = "distcore.plan"
FIELDS: Final = ("kind", "format", "keys", "ndims", "key", "src", "dst", "coords")


@dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """One Region of the tensor `key`, from the rank `src` to the rank `dst` (global ranks).

    `src == dst` is a copy from a rank's source to its own destination. PlanError where the key is
    no text, or a rank or an index of the region is negative.
    """

    key: str
    src: int
    dst: int
    region: Region

    def __post_init__(self) -> None:
        if type(self.src) is not int or type(self.dst) is not int:
            object.__setattr__(self, "src", as_int(self.src, "src"))
            object.__setattr__(self, "dst", as_int(self.dst, "dst"))
        if type(self.key) is not str or type(self.region) is not Region:
            self._check_types()
        if self.src < 0 or self.dst < 0:
            text = f"ranks {self.src} -> {self.dst} must not be negative"
            raise PlanError(Problem(self.key, "range", text))
        start = self.region.start
        if start and min(start) < 0:
            raise PlanError(Problem(self.key, "range", f"{self.region} has a negative index"))

    def _check_types(self) -> None:
        for name, value, kind in (("key", self.key, str), ("region", self.region, Region)):
            if not isinstance(value, kind):
                text = f"{value!r} is a {type(value).__name__}, not a {kind.__name__}"
                raise PlanError(Problem(name, "type", text))


@dataclass(frozen=True, slots=True)
class Columns:
    """A plan as a table: row i is the i-th transfer. Do not change the columns.

    `keys` are in order of first appearance and `key[i]` is an index into them; the region of row i
    is `coords[at[i]:at[i + 1]]`: first the start, then the stop of every dim. Columns are int64
    arrays (`array("q")`).
    """

    keys: tuple[str, ...]
    key: array[int]
    src: array[int]
    dst: array[int]
    at: array[int]
    coords: array[int]


class Plan(Sequence[Transfer]):
    """An ordered tuple of Transfers. Immutable; equal plans have equal digests.

    A slice is a tuple of Transfers. PlanError lists what is no Transfer, and every key of which
    the regions differ in their number of dims.

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
        self._columns = _columns_from(transfers)
        self._digest = None

    @classmethod
    def from_columns(cls, columns: Columns) -> Plan:
        """Take over a table that a planner has built; PlanError names all that is wrong with it."""
        problems = _column_problems(columns)
        if problems:
            raise PlanError(problems)
        return cls._of_checked(columns)

    @classmethod
    def _of_checked(cls, columns: Columns) -> Plan:
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
        """32 hex digits that are equal exactly for equal plans, on every machine.

        BLAKE2b of 16 bytes over little-endian 64-bit words: the format; the number of keys, then
        of each key its length in bytes and its UTF-8 text; then of `ndims`, `key`, `src`, `dst`
        and `coords`, as in the JSON form, the length and the words of the column.
        """
        if self._digest is None:
            self._digest = _digest_of(self._columns)
        return self._digest

    def inverse(self) -> Plan:
        """The plan that carries everything back: source and destination changed over."""
        c = self._columns
        return Plan._of_checked(Columns(c.keys, c.key, c.dst, c.src, c.at, c.coords))

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
        """Read what `to_json` wrote, whatever the order of its fields; PlanError for all else."""
        return cls.from_columns(_columns_of(text))

    def __len__(self) -> int:
        return len(self._columns.key)

    @overload
    def __getitem__(self, at: int) -> Transfer: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Transfer, ...]: ...
    def __getitem__(self, at: int | slice) -> Transfer | tuple[Transfer, ...]:
        if isinstance(at, slice):
            return tuple(self[row] for row in range(*at.indices(len(self))))
        row = index(at)
        if not -len(self) <= row < len(self):
            raise IndexError(f"transfer {row} of {len(self)}")
        row %= len(self)
        c = self._columns
        low, high = c.at[row], c.at[row + 1]
        middle = (low + high) // 2
        region = Region(tuple(c.coords[low:middle]), tuple(c.coords[middle:high]))
        return Transfer(c.keys[c.key[row]], c.src[row], c.dst[row], region)

    def __iter__(self) -> Iterator[Transfer]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Plan({len(self)} transfers of {len(self.keys)} tensors, digest {self.digest[:8]})"


def _columns_from(transfers: Iterable[object]) -> Columns:
    """The table of `transfers`; PlanError where one is none, or does not fit the others."""
    numbers: dict[str, int] = {}
    ndims: list[int] = []
    key, src, dst, coords = array("q"), array("q"), array("q"), array("q")
    at = array("q", [0])
    problems: list[Problem] = []
    for row, transfer in enumerate(transfers):
        if not isinstance(transfer, Transfer):
            text = f"{transfer!r} is a {type(transfer).__name__}, not a Transfer"
            problems.append(Problem(f"transfer {row}", "type", text))
            continue
        region = transfer.region
        number = numbers.setdefault(transfer.key, len(numbers))
        if number == len(ndims):
            ndims.append(len(region.start))
        elif ndims[number] != len(region.start):
            problems.append(_ndim_problem(transfer.key, row, ndims[number], len(region.start)))
        try:
            src.append(transfer.src)
            dst.append(transfer.dst)
            coords.extend(region.start)
            coords.extend(region.stop)
        except OverflowError:
            text = f"transfer {row}: a number does not fit 64 bits"
            raise PlanError([*problems, Problem(transfer.key, "range", text)]) from None
        key.append(number)
        at.append(len(coords))
    if problems:
        raise PlanError(problems)
    return Columns(tuple(numbers), key, src, dst, at, coords)


def _ndim_problem(key: str, row: int, expected: int, found: int) -> Problem:
    text = f"transfer {row} has {found} dims, an earlier one of this key has {expected}"
    return Problem(key, "ndim", text)


def _digest_of(columns: Columns) -> str:
    state = blake2b(digest_size=16)
    for number in (FORMAT, len(columns.keys)):
        state.update(number.to_bytes(8, "little"))
    for key in columns.keys:
        text = key.encode("utf-8", "surrogatepass")
        state.update(len(text).to_bytes(8, "little"))
        state.update(text)
    ndims = array("q", _ndims(columns))
    for column in (ndims, columns.key, columns.src, columns.dst, columns.coords):
        state.update(len(column).to_bytes(8, "little"))
        state.update(_little_endian(column))
    return state.hexdigest()


def _little_endian(column: array[int]) -> bytes:
    if sys.byteorder == "little":
        return column.tobytes()
    turned = column[:]
    turned.byteswap()
    return turned.tobytes()


def _ndims(columns: Columns) -> list[int]:
    """The number of dims of every key (read off one row of each)."""
    rows = dict(zip(columns.key, count()))
    at = columns.at
    return [(at[rows[n] + 1] - at[rows[n]]) // 2 for n in range(len(columns.keys))]


def _columns_of(text: str) -> Columns:
    table = _table_of(text)
    keys = table["keys"]
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise PlanError(Problem("keys", "type", "not a list of strings"))
    names = ("ndims", "key", "src", "dst", "coords")
    columns = {name: _int_column(name, table[name]) for name in names}
    ndims, key, coords = columns["ndims"], columns["key"], columns["coords"]
    if len(ndims) != len(keys):
        text = f"{len(ndims)} entries for {len(keys)} keys"
        raise PlanError(Problem("ndims", "length", text))
    if ndims and not 0 <= min(ndims) <= max(ndims) <= len(coords):
        raise PlanError(Problem("ndims", "range", "a number is negative or too large"))
    if key and not 0 <= min(key) <= max(key) < len(keys):
        raise PlanError(Problem("key", "range", f"an index is negative or not below {len(keys)}"))
    at = array("q", accumulate((2 * ndims[number] for number in key), initial=0))
    if at[-1] != len(coords):
        text = f"{len(coords)} entries where the transfers need {at[-1]}"
        raise PlanError(Problem("coords", "length", text))
    return Columns(tuple(keys), key, columns["src"], columns["dst"], at, coords)


def _table_of(text: str) -> dict[str, object]:
    """The fields of a JSON form, each there once, none more; what they hold is not checked."""
    try:
        table = json.loads(text, object_pairs_hook=_without_duplicates)
    except PlanError:
        raise
    except (ValueError, RecursionError) as error:
        raise PlanError(Problem("plan", "json", f"not JSON: {error}")) from None
    if not isinstance(table, dict) or table.get("kind") != KIND:
        raise PlanError(Problem("plan", "kind", f"not a {KIND} object"))
    found = table.get("format")
    if type(found) is not int or found != FORMAT:
        raise PlanError(Problem("plan", "format", f"format {found!r}; this reads {FORMAT}"))
    problems = [Problem(name, "missing", "not there") for name in FIELDS if name not in table]
    problems += [Problem(name, "unknown", "no field") for name in table if name not in FIELDS]
    if problems:
        raise PlanError(problems)
    return table


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise PlanError(Problem("plan", "duplicate", "a field stands in it twice"))
    return table


def _int_column(name: str, values: object) -> array[int]:
    # set() and map() run at C's pace; a plan has millions of numbers.
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        raise PlanError(Problem(name, "type", "not a list of ints"))
    try:
        return array("q", values)
    except OverflowError:
        raise PlanError(Problem(name, "range", "a number does not fit 64 bits")) from None


def _column_problems(columns: Columns) -> list[Problem]:
    problems = _form_problems(columns)
    if problems:
        return problems
    for name, column in (("src", columns.src), ("dst", columns.dst), ("key", columns.key)):
        if min(column, default=0) < 0:
            problems.append(Problem(name, "range", "a number is negative"))
    if max(columns.key, default=-1) >= len(columns.keys):
        problems.append(Problem("key", "range", f"an index is not below {len(columns.keys)}"))
    if list(dict.fromkeys(columns.key)) != list(range(len(columns.keys))):
        problems.append(Problem("keys", "order", "not in the order of first appearance"))
    return problems or _region_problems(columns)


def _form_problems(columns: Columns) -> list[Problem]:
    """What is wrong with the types and lengths of the columns."""
    named = [(name, getattr(columns, name)) for name in ("key", "src", "dst", "at", "coords")]
    problems = [
        Problem(name, "type", "not an array of int64 (typecode 'q')")
        for name, column in named
        if not isinstance(column, array) or column.typecode != "q"
    ]
    if type(columns.keys) is not tuple or not all(isinstance(key, str) for key in columns.keys):
        problems.append(Problem("keys", "type", "not a tuple of strings"))
    if problems:
        return problems
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
    return problems


def _region_problems(columns: Columns) -> list[Problem]:
    ndims: dict[int, int] = {}
    problems: list[Problem] = []
    for row, number in enumerate(columns.key):
        low, high = columns.at[row], columns.at[row + 1]
        ndim, odd = divmod(high - low, 2)
        key = columns.keys[number]
        if odd or ndim < 0:
            text = f"transfer {row} has {high - low} coordinates, not two per dim"
            problems.append(Problem(key, "ndim", text))
            continue
        if ndims.setdefault(number, ndim) != ndim:
            problems.append(_ndim_problem(key, row, ndims[number], ndim))
            continue
        start, stop = columns.coords[low : low + ndim], columns.coords[low + ndim : high]
        if any(map(gt, start, stop)):
            problems.append(Problem(key, "region", f"transfer {row}: start behind stop"))
        elif ndim and min(start) < 0:
            problems.append(Problem(key, "range", f"transfer {row}: a negative index"))
    return problems
