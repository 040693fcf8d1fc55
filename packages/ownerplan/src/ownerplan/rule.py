"""The rule by which a parameter group steps, and its arithmetic on local tensors.

It is the rule of torch.optim.Muon, operation for operation, so that results are equal bit for
bit; only where parameters are in half precision, one rounding differs. All but the orthogonal
matrix in the middle is done element by element, on shards as on wholes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from ownerplan.lr_adjustment import adjusted_lr
from ownerplan.matrix_view import Matrix
from ownerplan.newton_schulz import Schedule, schedule_of

_NARROW: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Rule:
    """The hyperparameters of a parameter group at one step."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    schedule: Schedule
    eps: float
    adjustment: str | None

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Rule:
        """The rule of an entry of `param_groups`; PlanError where it is none."""
        return cls(
            float(group["lr"]),
            float(group["weight_decay"]),
            float(group["momentum"]),
            bool(group["nesterov"]),
            schedule_of(group["ns_coefficients"], group["ns_steps"]),
            float(group["eps"]),
            group["adjust_lr_fn"],
        )

    def blend(self, buffer: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Take the gradient into the momentum `buffer`, in place; return what is to be stepped.

        The result may be the buffer itself, so it is only to be read.
        """
        buffer.lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(buffer, self.momentum) if self.nesterov else buffer

    def descend(self, param: torch.Tensor, update: torch.Tensor, matrix: Matrix) -> None:
        """Decay `param` and move it against `update`, in place; both are part of `matrix`."""
        step_lr = adjusted_lr(self.lr, self.adjustment, matrix.rows, matrix.cols)
        param.mul_(1 - self.lr * self.weight_decay)
        if param.dtype in _NARROW:
            # torch rounds the scaled update, or not, by where an element lies in memory, so that
            # shards would differ from wholes. Here the sum is rounded once, wherever it lies.
            param.copy_(torch.add(param.float(), update.float(), alpha=-step_lr))
        else:
            param.add_(update, alpha=-step_lr)
