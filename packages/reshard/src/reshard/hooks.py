"""Hooks: what is done to a tensor before it is sent, and with what has arrived."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

Before: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
After: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Hook:
    """What is done to one tensor on either end, on each run. Both act on local tensors.

    `before(local)` returns what is sent instead, in the local tensor's shape; the local tensor
    itself stays as it is. `after(received, local)` writes what has arrived into the destination,
    which nothing else writes: `received` has the destination's local shape and the dtype of the
    wire, and is used again on the next run. Hooks are local: a rank may have them or not.
    """

    before: Before | None = None
    after: After | None = None
