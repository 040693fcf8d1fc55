"""The version of the interface, and where its implementations are found."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points, version
from typing import Final

LEVEL: Final = 1
"""How much of `distcore.v1` this release offers. It only grows; see VERSIONING.md."""


def require(level: int, *, by: str) -> None:
    """Raise ImportError unless this distcore offers `level` of v1 to the package `by`.

    Called on import by every package that builds on v1, since an installer can be told to ignore
    version ranges.
    """
    if level > LEVEL:
        raise ImportError(
            f"{by} needs level {level} of distcore.v1, but distcore {version('distcore')} offers "
            f"level {LEVEL}; run: pip install --upgrade distcore"
        )


def providers(role: str) -> dict[str, EntryPoint]:
    """The installed implementations of a role of v1 (`"resharder"`, `"transport"`, ...), by name.

    Nothing is imported until `EntryPoint.load()` is called on one of them.
    """
    found = entry_points(group=f"distcore.v1.{role}")
    return {point.name: point for point in sorted(found, key=lambda point: point.name)}
