"""Tree: nested dicts of tensors as one flat dict."""

from __future__ import annotations

from collections.abc import Mapping

from distcore.v1 import PlanError, Problem

SINGLE = "tensor"
"""The key of a tensor that is given alone."""


def flatten(tree: object, name: str) -> dict[str, object]:
    """The leaves of `tree` by their path, joined with dots, in the order of the dicts.

    A leaf alone has the key `"tensor"`; None and leaves that are None are left out. PlanError
    where two leaves have one path, or a key is no text.
    """
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        return {SINGLE: tree}
    found: dict[str, object] = {}
    problems: list[Problem] = []
    _collect(tree, (), found, problems)
    if problems:
        raise PlanError([Problem(p.where, p.kind, f"{name}: {p.text}") for p in problems])
    return found


def _collect(
    tree: Mapping[object, object],
    path: tuple[str, ...],
    found: dict[str, object],
    problems: list[Problem],
) -> None:
    for part, value in tree.items():
        if not isinstance(part, str | int):
            where = ".".join(path) or "the tree"
            problems.append(Problem(where, "key", f"{part!r} is neither a text nor a number"))
            continue
        place = (*path, str(part))
        key = ".".join(place)
        if isinstance(value, Mapping):
            _collect(value, place, found, problems)
        elif key in found:
            problems.append(Problem(key, "key", "stands in the tree twice"))
        elif value is not None:
            found[key] = value
