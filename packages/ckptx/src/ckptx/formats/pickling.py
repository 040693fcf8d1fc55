"""Pickling: structure written as a pickle, for files that torch reads with its own unpickler.

Only what such files hold can be written: plain data, names, and the two ways in which a pickle
makes an object. No object of the running program is ever taken apart.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

from ckptx.formats.pickled import Global, Persistent


@dataclass(frozen=True, slots=True)
class Call:
    """The result of a call, as the reader of the pickle will make it."""

    function: Global
    args: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class New:
    """An object of a class without arguments, whose state is set afterwards."""

    cls: Global
    state: object


def pickled(value: object) -> bytes:
    """The pickle (protocol 2) of plain data, Globals, Calls and News.

    TypeError names the type of anything else.
    """
    writer = _Writer()
    writer.parts.append(b"\x80\x02")
    writer.add(value)
    writer.parts.append(b".")
    return b"".join(writer.parts)


class _Writer:
    """The parts written so far, and which names the reader knows by number."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.known: dict[Global, int] = {}

    def add(self, value: object) -> None:
        """Write what makes the reader push `value`."""
        if value is None or isinstance(value, bool):
            self.parts.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
        elif type(value) in _LEAVES:
            self.parts.append(_leaf(value))
        elif isinstance(value, Global):
            self._name(value)
        elif isinstance(value, (Call, New, Persistent)):
            self._made(value)
        elif isinstance(value, (tuple, list, dict, set, frozenset)):
            self._container(value)
        else:
            raise TypeError(f"a {type(value).__name__} is no plain data: {value!r:.80}")

    def _name(self, name: Global) -> None:
        if name in self.known:
            self.parts.append(b"j" + struct.pack("<I", self.known[name]))
            return
        self.known[name] = number = len(self.known)
        self.parts.append(f"c{name.module}\n{name.name}\n".encode())
        self.parts.append(b"r" + struct.pack("<I", number))

    def _made(self, value: Call | New | Persistent) -> None:
        if isinstance(value, Persistent):
            self.add(value.key)
            self.parts.append(b"Q")
        elif isinstance(value, Call):
            self._name(value.function)
            self.add(value.args)
            self.parts.append(b"R")
        else:
            self._name(value.cls)
            self.parts.append(b")\x81")
            self.add(value.state)
            self.parts.append(b"b")

    def _container(self, value: Iterable[object]) -> None:
        if isinstance(value, dict):
            self.parts.append(b"}(")
            for key, item in value.items():
                self.add(key)
                self.add(item)
            self.parts.append(b"u")
        elif isinstance(value, tuple):
            self._all(b"(", value, b"t")
        elif isinstance(value, list):
            self._all(b"](", value, b"e")
        else:
            self._name(Global("builtins", "set" if isinstance(value, set) else "frozenset"))
            self._all(b"](", sorted(value, key=repr), b"e")
            self.parts.append(b"\x85R")

    def _all(self, before: bytes, values: Iterable[object], behind: bytes) -> None:
        self.parts.append(before)
        for value in values:
            self.add(value)
        self.parts.append(behind)


_LEAVES = frozenset({int, float, str, bytes})


def _leaf(value: object) -> bytes:
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, bytes):
        return b"B" + struct.pack("<I", len(value)) + value
    if not isinstance(value, int):
        raise TypeError(f"a {type(value).__name__} is no plain data")
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data
