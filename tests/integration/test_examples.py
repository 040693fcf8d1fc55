"""The examples run as a user runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_the_demo_is_exact_on_its_own_model(tmp_path: Path) -> None:
    """Four ranks, and twenty steps of training, are what `nox -s demo` starts."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--ranks", "2", "--steps", "4"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "weights bit-equal to one process: 0 tensors differ" in result.stdout
    assert "rank 1: SIGKILL" in result.stdout
    assert "bit-equal to one process that was never hurt: 0 tensors differ" in result.stdout
    assert "rollout, version 2, bit-equal to the trainer: 0 tensors differ" in result.stdout
