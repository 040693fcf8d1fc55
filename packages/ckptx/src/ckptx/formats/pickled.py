"""Pickled: the structure of a pickle as plain data; nothing that it names is imported or called.

A pickle is a program for a small stack machine. This one knows the instructions that build data.
Where a pickle calls something, or makes an object of a class, it leaves a `Record` of the name
and the arguments, which is inert. What a reader makes of the records it expects is its business;
records that it does not expect stay what they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from ckptx.errors import FormatError


@dataclass(frozen=True, slots=True)
class Global:
    """A name that a pickle uses: of a class, a function or a constant such as a dtype."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Record:
    """What a pickle would have called: the name, the arguments, and what was put in afterwards."""

    name: str
    args: object
    state: object = None
    items: list[object] = field(default_factory=list)

    def get(self, name: str) -> object:
        """An attribute out of the state; None where it has none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


@dataclass(frozen=True, slots=True)
class Persistent:
    """Something that lies outside the pickle, under the identifier given."""

    key: object


_MARK: Final = object()


def parse(data: bytes, *, file: str, offset: int = 0) -> object:
    """The data that a pickle describes. FormatError, with the byte of the file, where it is none.

    Tuples, lists, dicts, sets, numbers, strings and bytes are themselves. `OrderedDict` and
    `torch.Size` become dict and tuple; every other call becomes a Record, every other name a
    Global.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError) as error:
        what = f"it ends or refers to nothing ({type(error).__name__})"
    except (TypeError, ValueError, AttributeError) as error:
        what = str(error)
    at = offset + machine.at
    raise FormatError(f"not a pickle that can be read as data: {what}", file=file, offset=at)


class _Machine:
    """The stack, the memo and the place in the data."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        """Run to the end, and return what is on the stack then."""
        data = self.data
        while True:
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # "."
                return self.stack.pop()
            step = _STEPS.get(code)
            if step is None:
                self.at -= 1
                raise ValueError(f"the instruction {bytes([code])!r} is not known")
            step(self)

    def take(self, count: int) -> bytes:
        """The next bytes of the data."""
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise IndexError
        self.at += count
        return found

    def number(self, form: str) -> int:
        """The next number of the data."""
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return int(found)

    def line(self) -> str:
        """The next line of the data."""
        end = self.data.index(b"\n", self.at)
        found = self.data[self.at : end].decode()
        self.at = end + 1
        return found

    def marked(self) -> list[object]:
        """Everything above the last mark, taken off the stack."""
        stack = self.stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise IndexError
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def push_tuple(self, count: int) -> None:
        """Put the last `count` values together."""
        if count > len(self.stack):
            raise IndexError
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        self.stack.append(found)


Step = Callable[[_Machine], None]


def _push_sized(form: str, make: Callable[[bytes], object]) -> Step:
    return lambda m: m.stack.append(make(m.take(m.number(form))))


def _push_number(form: str) -> Step:
    return lambda m: m.stack.append(m.number(form))


def _push(make: Callable[[], object]) -> Step:
    return lambda m: m.stack.append(make())


def _tuple(count: int) -> Step:
    return lambda m: m.push_tuple(count)


def _skip(count: int) -> Step:
    def step(machine: _Machine) -> None:
        machine.take(count)

    return step


def _put(form: str) -> Step:
    def step(machine: _Machine) -> None:
        machine.memo[machine.number(form)] = machine.stack[-1]

    return step


def _get(form: str) -> Step:
    return lambda m: m.stack.append(m.memo[m.number(form)])


def _memoize(machine: _Machine) -> None:
    machine.memo[len(machine.memo)] = machine.stack[-1]


def _float(machine: _Machine) -> None:
    machine.stack.append(struct.unpack(">d", machine.take(8))[0])


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.stack.append(Global(module, machine.line()))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if not (isinstance(name, str) and isinstance(module, str)):
        raise TypeError("a name is not a string")
    machine.stack.append(Global(module, name))


def _call(machine: _Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    if not isinstance(args, tuple):
        raise TypeError("arguments are not a tuple")
    name = str(function)
    if name == "torch.Size" and len(args) == 1 and isinstance(args[0], (tuple, list)):
        machine.stack.append(tuple(args[0]))
    elif name == "collections.OrderedDict" and not args:
        machine.stack.append({})
    elif name == "_codecs.encode" and len(args) == 2 and args[1] == "latin1":
        machine.stack.append(str(args[0]).encode("latin1"))  # how protocol 2 writes bytes
    elif name in _SETS and len(args) == 1 and isinstance(args[0], list):
        machine.stack.append(_SETS[name](args[0]))
    else:
        machine.stack.append(Record(name, args))


_SETS: Final[dict[str, Callable[[list[object]], object]]] = {
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "__builtin__.set": set,
    "__builtin__.frozenset": frozenset,
}


def _new_ex(machine: _Machine) -> None:
    kwargs, args, cls = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    machine.stack.append(Record(str(cls), args, state=kwargs))


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if isinstance(target, Record):
        target.state = state
    elif not isinstance(target, dict):
        raise TypeError(f"a {type(target).__name__} has no state")


def _extend(target: object, found: list[object]) -> None:
    if isinstance(target, Record):
        target.items.extend(found)
    elif isinstance(target, list):
        target.extend(found)
    else:
        raise TypeError(f"a {type(target).__name__} is no list")


def _append(machine: _Machine) -> None:
    value = machine.stack.pop()
    _extend(machine.stack[-1], [value])


def _appends(machine: _Machine) -> None:
    found = machine.marked()
    _extend(machine.stack[-1], found)


def _update(target: object, found: list[object]) -> None:
    pairs = list(zip(found[::2], found[1::2], strict=True))
    if isinstance(target, Record):
        target.items.extend(pairs)
    elif isinstance(target, dict):
        target.update(pairs)
    else:
        raise TypeError(f"a {type(target).__name__} is no dict")


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])


def _set_items(machine: _Machine) -> None:
    found = machine.marked()
    _update(machine.stack[-1], found)


def _add_items(machine: _Machine) -> None:
    found = machine.marked()
    target = machine.stack[-1]
    if not isinstance(target, set):
        raise TypeError(f"a {type(target).__name__} is no set")
    target.update(found)


def _persistent(machine: _Machine) -> None:
    machine.stack.append(Persistent(machine.stack.pop()))


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


_STEPS: Final[dict[int, Step]] = {
    code[0]: step
    for code, step in {
        b"\x80": _skip(1),
        b"\x95": _skip(8),
        b"(": _push(lambda: _MARK),
        b"0": lambda m: _void(m.stack.pop()),
        b"1": lambda m: _void(m.marked()),
        b"2": lambda m: m.stack.append(m.stack[-1]),
        b"N": _push(lambda: None),
        b"\x88": _push(lambda: True),
        b"\x89": _push(lambda: False),
        b"J": _push_number("<i"),
        b"K": _push_number("<B"),
        b"M": _push_number("<H"),
        b"\x8a": _push_sized("<B", _long),
        b"\x8b": _push_sized("<I", _long),
        b"G": _float,
        b"X": _push_sized("<I", bytes.decode),
        b"\x8c": _push_sized("<B", bytes.decode),
        b"\x8d": _push_sized("<Q", bytes.decode),
        b"B": _push_sized("<I", bytes),
        b"C": _push_sized("<B", bytes),
        b"\x8e": _push_sized("<Q", bytes),
        b"\x96": _push_sized("<Q", bytearray),
        b")": _tuple(0),
        b"\x85": _tuple(1),
        b"\x86": _tuple(2),
        b"\x87": _tuple(3),
        b"t": lambda m: m.stack.append(tuple(m.marked())),
        b"]": _push(list),
        b"l": lambda m: m.stack.append(m.marked()),
        b"}": _push(dict),
        b"\x8f": _push(set),
        b"\x91": lambda m: m.stack.append(frozenset(m.marked())),
        b"a": _append,
        b"e": _appends,
        b"s": _set_item,
        b"u": _set_items,
        b"\x90": _add_items,
        b"q": _put("<B"),
        b"r": _put("<I"),
        b"\x94": _memoize,
        b"h": _get("<B"),
        b"j": _get("<I"),
        b"c": _global,
        b"\x93": _stack_global,
        b"R": _call,
        b"\x81": _call,
        b"\x92": _new_ex,
        b"b": _build,
        b"Q": _persistent,
    }.items()
}


def _void(_: object) -> None:
    """Drop a value."""
