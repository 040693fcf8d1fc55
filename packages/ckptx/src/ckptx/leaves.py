"""Leaves: a nested state dict as one table of keys, named as torch's distributed checkpoint does.

Names of nested dicts and positions in lists join with '.'. A list is entered where it has tensors
or dicts in it; any other list, and every tuple, is one value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ckptx.errors import CheckpointPlanError
from distcore.v1 import Problem

StateDict: TypeAlias = Mapping[str, object]
Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where in the caller's state dict a value stands."""

    container: Mapping[object, object] | MutableSequence[object]
    name: str | int

    def put(self, value: object) -> None:
        """Replace the value. TypeError where the container cannot be changed."""
        if not isinstance(self.container, (MutableMapping, MutableSequence)):
            raise TypeError(f"a {type(self.container).__name__} cannot be changed")
        self.container[self.name] = value  # type: ignore[index]


@dataclass(slots=True)
class Leaves:
    """The tensors and the other values of a state dict by key.

    `paths` are the names and positions that lead to each key, names as strings as torch's own
    tables have them; `slots` say where each value may be replaced.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, object] = field(default_factory=dict)
    slots: dict[str, Slot] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def leaves_of(state_dict: StateDict) -> Leaves:
    """The leaves of a state dict. CheckpointPlanError names every key that two of them share."""
    found = Leaves()
    problems: list[Problem] = []
    for path, slot, leaf in _walk(state_dict, ()):
        key = ".".join(map(str, path))
        if key in found.paths:
            problems.append(Problem(key, "duplicate", "two entries have this name"))
            continue
        found.paths[key] = path
        if isinstance(leaf, torch.Tensor):
            found.tensors[key] = leaf
        else:
            found.values[key] = leaf
            found.slots[key] = slot
    if problems:
        raise CheckpointPlanError(problems)
    return found


def _walk(node: object, path: Path) -> Iterator[tuple[Path, Slot, object]]:
    """Each leaf, with the path to it."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _step(Slot(node, name), value, (*path, str(name)))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _step(Slot(node, number), value, (*path, number))


def _step(slot: Slot, value: object, path: Path) -> Iterator[tuple[Path, Slot, object]]:
    if isinstance(value, Mapping) or (isinstance(value, list) and _is_entered(value)):
        yield from _walk(value, path)
    else:
        yield path, slot, value


def _is_entered(values: list[object]) -> bool:
    return any(
        isinstance(value, (Mapping, torch.Tensor))
        or (isinstance(value, list) and _is_entered(value))
        for value in values
    )
