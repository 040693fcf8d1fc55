"""Strategy: in a short text, how a model lies on ranks; and the layouts that follow from it.

`dp=2,fsdp=4,tp=2@8` is a mesh of 2 x 4 x 2 ranks that begins at rank 8, row-major. Its axes are

- `dp`: repeats every tensor;
- `fsdp`: cuts dim 0, after tensor parallelism has cut (as FSDP2 does);
- `tp`: cuts the dim that the model names, and repeats the rest;
- `ep`: gives each of its ranks a share of the experts, and repeats the rest;
- `pp`: gives each of its ranks a share of the layers; what is outside of layers is on the first
  rank, or on the last where it is named `norm` or `lm_head`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from math import prod

from distcore.v1 import Layout, Mesh, PlanError, Problem
from reshard.models import Model, Weight

AXES = ("pp", "ep", "dp", "fsdp", "tp")
_FORM = re.compile(r"(?:[a-z]+=[1-9][0-9]*)(?:,[a-z]+=[1-9][0-9]*)*(?:@[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Strategy:
    """The axes of a mesh with their sizes, in mesh order, and its first rank."""

    axes: tuple[tuple[str, int], ...]
    first: int = 0

    @classmethod
    def parse(cls, text: str) -> Strategy:
        """Read a text such as `dp=2,tp=4@8`; PlanError where it is none.

        >>> Strategy.parse("fsdp=8@4").num_ranks
        8
        """
        if not _FORM.fullmatch(text):
            raise PlanError(Problem(text, "mesh", "expected a text such as 'dp=2,tp=4@8'"))
        mesh, _, first = text.partition("@")
        pairs = [entry.split("=") for entry in mesh.split(",")]
        names = [name for name, _ in pairs]
        strange = sorted(set(names) - set(AXES))
        if strange or len(set(names)) < len(names):
            text = f"every axis is one of {', '.join(AXES)}, at most once; got {', '.join(names)}"
            raise PlanError(Problem("mesh", "axis", text))
        return cls(tuple((name, int(size)) for name, size in pairs), int(first or 0))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return prod(size for _, size in self.axes)

    def layouts(self, model: Model) -> dict[str, Layout]:
        """The layout of every tensor of `model`."""
        meshes: dict[tuple[int | None, int | None], Mesh] = {}
        found = {}
        for key, weight in model.weights.items():
            chosen = self._stage_of(key, weight, model), self._owner_of(weight, model)
            if chosen not in meshes:
                meshes[chosen] = self._mesh(*chosen)
            found[key] = Layout.from_mesh(
                shape=weight.shape,
                dtype=weight.dtype,
                mesh=meshes[chosen],
                placements=self._placements(weight, chosen),
            )
        return found

    def _size(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)

    def _stage_of(self, key: str, weight: Weight, model: Model) -> int | None:
        """The coordinate on `pp`, None where there is no such axis."""
        stages = self._size("pp")
        if stages == 1:
            return None
        if weight.layer is None:
            return stages - 1 if {"norm", "lm_head"} & set(key.split(".")) else 0
        return weight.layer * stages // model.num_layers

    def _owner_of(self, weight: Weight, model: Model) -> int | None:
        """The coordinate on `ep` of the ranks that hold an expert, None for what all hold."""
        owners = self._size("ep")
        if owners == 1 or weight.expert is None:
            return None
        return weight.expert * owners // model.num_experts

    def _mesh(self, stage: int | None, owner: int | None) -> Mesh:
        """The part of the mesh with these coordinates, as a nested list."""
        fixed = {"pp": stage, "ep": owner}
        kept = [size for name, size in self.axes if fixed.get(name) is None]
        ranks = [
            self.first + number
            for number, place in enumerate(product(*(range(size) for _, size in self.axes)))
            if all(
                fixed.get(name) in (None, digit)
                for (name, _), digit in zip(self.axes, place, strict=True)
            )
        ]
        level: list[Mesh] = list(ranks)
        for size in reversed(kept[1:]):
            level = [level[at : at + size] for at in range(0, len(level), size)]
        return level

    def _placements(self, weight: Weight, chosen: tuple[int | None, int | None]) -> list[str]:
        fixed = dict(zip(("pp", "ep"), chosen, strict=True))
        names = [name for name, _ in self.axes if fixed.get(name) is None] or ["dp"]
        placements = []
        for at, name in enumerate(names):
            if name == "tp" and weight.tp_dim is not None:
                placements.append(f"S({weight.tp_dim})")
            elif name == "fsdp" and weight.shape:
                # Tensor parallelism cuts first, wherever its axis stands.
                inner = weight.tp_dim == 0 and "tp" in names[at + 1 :] and self._size("tp") > 1
                placements.append(f"_S(0,{self._size('tp')})" if inner else "S(0)")
            else:
                placements.append("R")
        return placements
