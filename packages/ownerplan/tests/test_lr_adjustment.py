"""How the learning rate depends on the shape."""

from __future__ import annotations

import pytest

from ownerplan.lr_adjustment import adjusted_lr


@pytest.mark.parametrize(
    ("adjustment", "rows", "cols", "expected"),
    [
        (None, 16, 4, 2.0),
        (None, 4, 16, 1.0),
        ("original", 9, 1, 3.0),
        ("original", 5, 5, 1.0),
        ("match_rms_adamw", 100, 25, 2.0),
        ("match_rms_adamw", 25, 100, 2.0),
        ("none", 16, 4, 1.0),
    ],
)
def test_adjustments(adjustment: str | None, rows: int, cols: int, expected: float) -> None:
    assert adjusted_lr(1.0, adjustment, rows, cols) == pytest.approx(expected)
    assert adjusted_lr(0.5, adjustment, rows, cols) == pytest.approx(expected / 2)
