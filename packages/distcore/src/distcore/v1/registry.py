"""The version of the interface, and where its implementations are found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from distcore.v1.integers import as_int

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

LEVEL: Final = 1
"""How much of `distcore.v1` this release offers. It only grows; see VERSIONING.md."""


def require(level: int, *, by: str) -> None:
    """Raise ImportError unless this distcore offers `level` of v1 to the package `by`.

    Called on import by every package that builds on v1, since an installer can be told to ignore
    version ranges.
    """
    if as_int(level, "level") > LEVEL:
        from importlib.metadata import version

        raise ImportError(
            f"{by} needs level {level} of distcore.v1, but distcore {version('distcore')} offers "
            f"level {LEVEL}; run: pip install --upgrade distcore"
        )


def providers(role: str) -> dict[str, EntryPoint]:
    """The installed implementations of a role of v1 (`"resharder"`, `"transport"`, ...), by name.

    Nothing is imported until `EntryPoint.load()` is called on one of them. ImportError where two
    installed packages offer the same name, since either choice would be a guess.
    """
    from importlib.metadata import entry_points

    named: dict[str, EntryPoint] = {}
    for point in sorted(entry_points(group=f"distcore.v1.{role}"), key=lambda point: point.name):
        other = named.setdefault(point.name, point)
        if other is not point:
            raise ImportError(
                f"the {role} {point.name!r} is offered twice: by {_offered_by(other)} and by "
                f"{_offered_by(point)}; uninstall one of them"
            )
    return named


def _offered_by(point: EntryPoint) -> str:
    return f"{point.dist.name if point.dist else 'an unknown package'} ({point.value})"
