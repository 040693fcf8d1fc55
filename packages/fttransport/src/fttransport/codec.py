"""Codec: a tree of values as JSON data, and back, without running any code from it.

A node of the data is null, true, false, an int, a finite float or a string for itself, a list for
a list, and otherwise an object with one member whose name says the kind. A dict of strings and
tensors, of which large states mostly consist, is two columns. Anything that has no kind here is
refused with its key path.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import ModuleType
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor

from fttransport.errors import CodecRefused, IntegrityError

Node: TypeAlias = Any
"""JSON data."""

Keep: TypeAlias = Callable[[Sequence[Tensor]], list[int]]
"""Is told of tensors in the order of the tree, and numbers them."""
Paths: TypeAlias = Callable[[], list[str]]
Find: TypeAlias = Callable[[list[Any], Paths], Sequence[Tensor]]
"""Gives the tensors of numbers, and may ask at which key paths they stand. The numbers come from
outside: a ValueError or TypeError where there is none of that number."""

MAX_DEPTH: Final = 100
_DTYPES: Final = {str(v)[6:]: v for v in vars(torch).values() if isinstance(v, torch.dtype)}


class Codec:
    """Turns trees into JSON data and back.

    `types` are the dataclasses and enums that may occur besides the plain kinds; both sides name
    the same. A dataclass is rebuilt from its fields, without calling its constructor.
    """

    def __init__(self, types: Iterable[type] = ()) -> None:
        self._types: dict[str, type] = {}
        for kind in types:
            if not (dataclasses.is_dataclass(kind) or issubclass(kind, Enum)):
                raise TypeError(f"{kind!r} is neither a dataclass nor an enum")
            self._types[_name_of(kind)] = kind

    def encode(self, tree: object, keep: Keep) -> Node:
        """The data of a tree, whose tensors `keep` numbers."""
        return _Encoder(self, keep).node(tree, "", 0)

    def decode(self, node: Node, find: Find) -> object:
        """The tree of the data, for whose tensors `find` is asked in the order of the tree.

        IntegrityError where the data are not what `encode` makes, CodecRefused where they name
        a type that is not among `types`.
        """
        try:
            return _Decoder(self, find).value(node, "", 0)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, CodecRefused):
                raise
            raise IntegrityError(f"the description of the state is malformed: {error}") from error

    def opaque(self, value: object, path: str) -> Node:
        """The data of a value without a kind here: refused."""
        where = f"state{path}"
        raise CodecRefused(
            f"{where}: a {type(value).__module__}.{type(value).__qualname__} is not sent; "
            "send plain values and tensors, or register a dataclass or enum with Codec(types=...)"
        )

    def reopen(self, data: str, path: str) -> object:
        """The value of such data: refused."""
        raise CodecRefused(f"state{path}: the source sent a pickle, which this side does not open")

    def name_if_registered(self, kind: type) -> str | None:
        """The name under which a type travels, or None."""
        name = _name_of(kind)
        return name if self._types.get(name) is kind else None

    def registered(self, name: object, path: str) -> type:
        """The type of a name; CodecRefused where it is not registered."""
        kind = self._types.get(name) if isinstance(name, str) else None
        if kind is None:
            raise CodecRefused(f"state{path}: the type {name!r} is not registered on this side")
        return kind


def step_into(path: str, key: object) -> str:
    """The key path of a child."""
    return f"{path}[{key!r}]"


def step_into_each(path: str, keys: Iterable[object]) -> list[str]:
    """The key paths of children."""
    return [f"{path}[{key!r}]" for key in keys]


def walk(tree: object) -> list[tuple[str, Tensor]]:
    """Every tensor of a tree with its key path; values that hold no tensors are passed over."""
    found: list[tuple[str, Tensor]] = []
    _walk(tree, "", found)
    return found


def _walk(tree: object, path: str, found: list[tuple[str, Tensor]]) -> None:
    if isinstance(tree, Tensor):
        found.append((path, tree))
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, Tensor):
                found.append((f"{path}[{key!r}]", value))
            else:
                _walk(value, step_into(path, key), found)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            _walk(value, step_into(path, index), found)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            _walk(getattr(tree, field.name), f"{path}.{field.name}", found)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class _Encoder:
    def __init__(self, codec: Codec, keep: Keep) -> None:
        self._codec = codec
        self._keep = keep

    def node(self, value: object, path: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise CodecRefused(f"state{path}: nested more than {MAX_DEPTH} deep")
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if isinstance(value, Tensor):
            return {"x": self._keep([value])[0]}
        if kind is list:
            return self._nodes(cast("list[object]", value), path, depth)
        if kind is dict or kind is OrderedDict:
            ordered = "o" if kind is OrderedDict else ""
            columns = self._columns(cast("dict[object, object]", value))
            if columns is not None:
                return {f"{ordered}dx": columns}
            return {f"{ordered}d": self._items(value, path, depth)}
        found = self._leaf(value)
        return self._rare(value, path, depth) if found is None else found

    def _leaf(self, value: object) -> Node:
        kind = type(value)
        if kind is float:
            number = cast("float", value)
            return number if math.isfinite(number) else {"f": str(number)}
        if kind is bytes:
            return {"b": base64.b64encode(cast("bytes", value)).decode("ascii")}
        if kind is torch.dtype:
            return {"dtype": str(value).removeprefix("torch.")}
        if kind is torch.device:
            return {"device": str(value)}
        if kind is torch.Size:
            return {"size": list(cast("torch.Size", value))}
        return None

    def _rare(self, value: object, path: str, depth: int) -> Node:
        kind = type(value)
        if kind is tuple:
            return {"t": self._nodes(cast("tuple[object, ...]", value), path, depth)}
        fields = getattr(kind, "_fields", None)
        if isinstance(value, tuple) and isinstance(fields, tuple):
            return {"nt": [_name_of(kind), list(fields), self._nodes(value, path, depth)]}
        name = self._codec.name_if_registered(kind)
        if name is None:
            return self._codec.opaque(value, path)
        if isinstance(value, Enum):
            return {"e": [name, value.name]}
        rows = [
            [f.name, self.node(getattr(value, f.name), f"{path}.{f.name}", depth + 1)]
            for f in dataclasses.fields(cast("Any", value))
        ]
        return {"dc": [name, rows]}

    def _nodes(self, values: Iterable[object], path: str, depth: int) -> list[Node]:
        return [
            self.node(value, step_into(path, index), depth + 1)
            for index, value in enumerate(values)
        ]

    def _columns(self, value: dict[object, object]) -> list[Node] | None:
        """The keys and the numbers of a dict of strings and tensors; None for another."""
        tensors = list(value.values())
        if not tensors or set(map(type, value)) != {str}:
            return None
        if not all(issubclass(kind, Tensor) for kind in set(map(type, tensors))):
            return None
        return [list(value), self._keep(cast("list[Tensor]", tensors))]

    def _items(self, value: object, path: str, depth: int) -> list[Node]:
        rows = []
        for key, child in cast("dict[object, object]", value).items():
            below = step_into(path, key)
            rows.append([self.node(key, below, depth + 1), self.node(child, below, depth + 1)])
        return rows


class _Decoder:
    def __init__(self, codec: Codec, find: Find) -> None:
        self._codec = codec
        self._find = find
        self._kinds: dict[str, Callable[[Any, str, int], object]] = {
            "x": lambda data, path, depth: self._find([data], lambda: [path])[0],
            "dx": lambda data, path, depth: dict(self._columns(data, path)),
            "odx": lambda data, path, depth: OrderedDict(self._columns(data, path)),
            "d": lambda data, path, depth: dict(self._items(data, path, depth)),
            "od": lambda data, path, depth: OrderedDict(self._items(data, path, depth)),
            "t": lambda data, path, depth: tuple(self._values(data, path, depth)),
            "nt": self._named,
            "e": self._member,
            "dc": self._record,
            "f": lambda data, path, depth: float(data),
            "b": lambda data, path, depth: base64.b64decode(data, validate=True),
            "dtype": lambda data, path, depth: _DTYPES[data],
            "device": lambda data, path, depth: torch.device(data),
            "size": lambda data, path, depth: torch.Size(data),
            "p": lambda data, path, depth: self._codec.reopen(data, path),
        }

    def value(self, node: Node, path: str, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested more than {MAX_DEPTH} deep")
        if node is None or isinstance(node, bool | int | str | float):
            return node
        if isinstance(node, list):
            return self._values(node, path, depth)
        ((kind, data),) = node.items()
        return self._kinds[kind](data, path, depth)

    def _values(self, nodes: list[Node], path: str, depth: int) -> list[object]:
        return [
            self.value(node, step_into(path, index), depth + 1)
            for index, node in enumerate(_listed(nodes))
        ]

    def _columns(self, data: Any, path: str) -> Iterator[tuple[str, Tensor]]:
        keys, numbers = map(_listed, data)
        if not set(map(type, keys)) <= {str} or len(keys) != len(numbers):
            raise ValueError("a dict of tensors whose keys and numbers do not match")
        return zip(keys, self._find(numbers, lambda: step_into_each(path, keys)), strict=True)

    def _items(self, rows: list[Node], path: str, depth: int) -> Iterator[tuple[Any, object]]:
        for key_node, child in _listed(rows):
            key = self.value(key_node, path, depth + 1)
            yield key, self.value(child, step_into(path, key), depth + 1)

    def _named(self, data: Any, path: str, depth: int) -> object:
        name, fields, nodes = data
        values = self._values(nodes, path, depth)
        if len(values) != len(_listed(fields)):
            raise ValueError(f"{name} has {len(fields)} fields and {len(values)} values")
        return tuple.__new__(_namedtuple_of(name, tuple(fields)), values)

    def _member(self, data: Any, path: str, depth: int) -> object:
        name, member = data
        kind = self._codec.registered(name, path)
        if not issubclass(kind, Enum):
            raise ValueError(f"{name} is not an enum")
        return kind[member]

    def _record(self, data: Any, path: str, depth: int) -> object:
        name, rows = data
        kind = self._codec.registered(name, path)
        if not dataclasses.is_dataclass(kind):
            raise ValueError(f"{name} is not a dataclass")
        expected = [field.name for field in dataclasses.fields(kind)]
        if [row[0] for row in _listed(rows)] != expected:
            raise ValueError(f"{name} has other fields than {expected}")
        made = object.__new__(kind)
        for field, child in rows:
            value = self.value(child, f"{path}.{field}", depth + 1)
            object.__setattr__(made, field, value)
        return made


def _listed(data: object) -> list[Node]:
    if not isinstance(data, list):
        raise TypeError(f"expected a list, got {type(data).__name__}")
    return data


def _namedtuple_of(name: str, fields: tuple[str, ...]) -> type[tuple[Any, ...]]:
    """The namedtuple that this process already has under that name, or one made alike."""
    module, _, qualname = name.partition(":")
    found: object = sys.modules.get(module)
    for part in qualname.split("."):
        # Looked up, never asked for: asking may import or run something.
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    is_it = isinstance(found, type) and issubclass(found, tuple)
    if is_it and getattr(found, "_fields", None) == fields:
        return cast("type[tuple[Any, ...]]", found)
    return namedtuple(qualname.rpartition(".")[2], fields)  # noqa: PYI024 - made at run time
