"""How the learning rate of a matrix depends on its shape."""

from __future__ import annotations

from math import sqrt
from typing import Final

ADJUSTMENTS: Final = (None, "original", "match_rms_adamw", "none")


def adjusted_lr(lr: float, adjustment: str | None, rows: int, cols: int) -> float:
    """The learning rate for the orthogonal update of a matrix of this shape.

    - `None`, `"original"`: tall matrices step further, by the root of rows / cols.
    - `"match_rms_adamw"`: an update as large as those of AdamW usually are, so that its learning
      rate and weight decay may be kept (arXiv 2502.16982).
    - `"none"`: as it is.

    >>> adjusted_lr(1.0, None, 16, 4), adjusted_lr(1.0, None, 4, 16)
    (2.0, 1.0)
    """
    if adjustment in (None, "original"):
        return lr * sqrt(max(1, rows / cols))
    if adjustment == "match_rms_adamw":
        return lr * (0.2 * sqrt(max(rows, cols)))
    return lr
