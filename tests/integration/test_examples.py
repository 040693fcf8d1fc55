"""The examples run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_demo_is_exact_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Four ranks, and twenty steps of training, are what `nox -s demo` starts."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--ranks", str(ranks), "--steps", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "weights bit-equal to one process: 0 tensors differ" in result.stdout
    assert "OwnerMuon, 2 steps, bit-equal to one process: 0 tensors differ" in result.stdout
    assert "rollout, version 2, bit-equal to the trainer: 0 tensors differ" in result.stdout
