"""The public surface of distcore.v1 is what public_surface.json says, and it only grows.

After a change of the interface, raise `LEVEL` and write the file anew:

    python packages/distcore/tests/test_public_surface.py

Nothing is written while the level is the recorded one, unless `--unreleased` says that no release
has offered this level yet.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest

FILE = Path(__file__).with_name("public_surface.json")
MODULES = ("distcore.v1", "distcore.v1.runtime")
SPECIAL = {"__call__", "__eq__", "__getitem__", "__hash__", "__iter__", "__len__", "__lt__"}
Kind = inspect._ParameterKind

Names = dict[str, dict[str, str]]
"""Public name -> what belongs to it (its signature, its members) -> text."""


def parameter_text(parameter: inspect.Parameter) -> str:
    text = parameter.name
    if parameter.kind in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD):
        text = ("*" if parameter.kind is Kind.VAR_POSITIONAL else "**") + text
    if parameter.annotation is not parameter.empty:
        text += f": {parameter.annotation}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def signature_of(function: object) -> str:
    """The signature as text, the same in every version of Python."""
    if not callable(function):
        return "?"
    signature = inspect.signature(function)
    parts: list[str] = []
    last = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if last is Kind.POSITIONAL_ONLY and kind is not last:
            parts.append("/")
        if kind is Kind.KEYWORD_ONLY and last not in (kind, Kind.VAR_POSITIONAL):
            parts.append("*")
        last = kind
        parts.append(parameter_text(parameter))
    if last is Kind.POSITIONAL_ONLY:
        parts.append("/")
    result = signature.return_annotation
    return f"({', '.join(parts)})" + ("" if result is signature.empty else f" -> {result}")


def member_of(member: object) -> str:
    if isinstance(member, property):
        return "property" + signature_of(member.fget).removeprefix("(self)")
    if isinstance(member, classmethod | staticmethod):
        return type(member).__name__ + " " + signature_of(member.__func__)
    return signature_of(member) if inspect.isfunction(member) else type(member).__name__


def class_of(kind: type) -> dict[str, str]:
    """The bases of a class, how it is made, its annotated fields and its public members."""
    found = {"class": ", ".join(base.__qualname__ for base in kind.__mro__[1:-1])}
    if "__init__" in vars(kind) and not getattr(kind, "_is_protocol", False):
        found["__init__"] = signature_of(vars(kind)["__init__"])
    for name, annotation in inspect.get_annotations(kind).items():
        if not name.startswith("_"):
            found[name] = f"field {annotation}"
    for name, member in vars(kind).items():
        if not name.startswith("_") and name not in found:
            found[name] = member_of(member)
        elif name in SPECIAL and member is not None:
            found[name] = member_of(member) if name == "__call__" else "special"
    return dict(sorted(found.items()))


def surface_of(module: ModuleType) -> Names:
    found: Names = {}
    for name in sorted(module.__all__):
        thing = getattr(module, name)
        if inspect.isclass(thing):
            found[name] = class_of(thing)
        elif inspect.isfunction(thing):
            found[name] = {"function": signature_of(thing)}
        else:
            alias = isinstance(thing, str) or get_origin(thing) is not None
            found[name] = {"alias": str(thing)} if alias else {"constant": type(thing).__name__}
    return found


def found_surface() -> dict[str, object]:
    level = import_module("distcore.v1").LEVEL
    return {"level": level, **{name: surface_of(import_module(name)) for name in MODULES}}


def recorded_surface() -> dict[str, object]:
    recorded: dict[str, object] = json.loads(FILE.read_text(encoding="utf-8"))
    return recorded


def flattened(surface: dict[str, object]) -> dict[str, str]:
    """`"distcore.v1.Region.shape" -> text`, for every entry."""
    return {
        f"{module}.{name}.{member}": str(text)
        for module, names in surface.items()
        if isinstance(names, dict)
        for name, members in names.items()
        for member, text in members.items()
    }


def differences(recorded: dict[str, object], found: dict[str, object]) -> list[str]:
    old, new = flattened(recorded), flattened(found)
    lines = [f"gone: {entry}" for entry in sorted(old.keys() - new.keys())]
    lines += [f"new: {entry}" for entry in sorted(new.keys() - old.keys())]
    lines += [
        f"changed: {entry}: {old[entry]} -> {new[entry]}"
        for entry in sorted(old.keys() & new.keys())
        if old[entry] != new[entry]
    ]
    return lines


def refusal(
    recorded: dict[str, object], found: dict[str, object], *, unreleased: bool
) -> str | None:
    """Why the found surface must not be recorded, or None where it may."""
    lines = differences(recorded, found)
    gone = [line for line in lines if line.startswith("gone")]
    if unreleased or not lines:
        return None
    if gone:
        return "v1 only grows; a break becomes distcore.v2:\n" + "\n".join(gone)
    if int(str(found["level"])) <= int(str(recorded["level"])):
        return f"the interface changed: raise LEVEL above {recorded['level']}:\n" + "\n".join(lines)
    return None


def main(arguments: list[str]) -> str | None:
    found = found_surface()
    text = refusal(recorded_surface(), found, unreleased="--unreleased" in arguments)
    if text is None:
        FILE.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return text


def test_the_surface_is_the_recorded_one() -> None:
    recorded, found = recorded_surface(), found_surface()
    lines = differences(recorded, found)
    assert not lines, "raise LEVEL and run this file as a script:\n" + "\n".join(lines)
    assert recorded["level"] == found["level"]


def test_the_catalogue_names_everything_public_and_nothing_else() -> None:
    module = import_module("distcore.v1")
    public = {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(thing)
    }
    assert public == set(module.__all__)
    assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_says_what_it_is(name: str) -> None:
    module = import_module(name)
    things = {name: getattr(module, name) for name in module.__all__}
    silent = [
        name
        for name, thing in things.items()
        if (inspect.isclass(thing) or inspect.isfunction(thing)) and not inspect.getdoc(thing)
    ]
    assert silent == []


RECORDED: dict[str, object] = {"level": 3, "m": {"f": {"function": "(a: int)"}, "g": {"x": "y"}}}
NAMES = {"f": {"function": "(a: int)"}, "g": {"x": "y"}}
GROWN = {**NAMES, "h": {"function": "()"}}
CHANGED = {**NAMES, "f": {"function": "(a: int, b: int = 0)"}}
SHRUNK = {"f": NAMES["f"]}


@pytest.mark.parametrize(
    ("level", "names", "text"),
    [
        (3, NAMES, None),
        (3, GROWN, "raise LEVEL above 3:\nnew: m.h.function"),
        (3, CHANGED, "changed: m.f.function: (a: int) -> (a: int, b: int = 0)"),
        (2, GROWN, "raise LEVEL above 3"),
        (4, GROWN, None),
        (4, CHANGED, None),
        (4, SHRUNK, "only grows; a break becomes distcore.v2:\ngone: m.g.x"),
    ],
)
def test_a_change_is_recorded_only_with_a_raised_level(
    level: int, names: Names, text: str | None
) -> None:
    found: dict[str, object] = {"level": level, "m": names}
    refused = refusal(RECORDED, found, unreleased=False)
    assert (refused is None) if text is None else (refused is not None and text in refused)
    assert refusal(RECORDED, found, unreleased=True) is None


def test_signatures_are_written_out_in_full() -> None:
    def function(a: int, /, b: str = "x", *c: int, d: bool, **e: float) -> None: ...
    def keywords(a: int, *, b: int) -> None: ...

    assert signature_of(function) == (
        "(a: int, /, b: str = 'x', *c: int, d: bool, **e: float) -> None"
    )
    assert signature_of(keywords) == "(a: int, *, b: int) -> None"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
