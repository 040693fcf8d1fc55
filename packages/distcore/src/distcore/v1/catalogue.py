"""Catalogue: a package's names, each loaded from its module when it is first used."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def on_first_use(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that loads some of its names late.

    `homes` has the module of each of these names, counted from `package`. So the package can be
    imported without what those modules need, torch above all.

        __getattr__, __dir__ = on_first_use(__name__, {"load": "loader"})

    The first gives AttributeError for any other name, as a module without it would.
    """
    namespace = vars(sys.modules[package])

    def load(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{home}"), name)
        namespace[name] = value  # the next access finds it without this function
        return value

    def names() -> list[str]:
        return sorted({*namespace, *homes})

    return load, names
