"""Contents: what the files of a checkpoint hold, by key, whatever their format."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptx.stored import StoredTensor, StoredValue


@dataclass(slots=True)
class Contents:
    """The tensors, the other values, and each key's place in the nested state dict, where known."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    values: dict[str, StoredValue] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
