"""What an import loads, in a fresh interpreter that holds all packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PLANS = sorted(f"{path.parent.name}.plan" for path in ROOT.glob("packages/*/src/*/plan.py"))


@pytest.mark.parametrize("module", [*PACKAGES, "distcore.v1", *PLANS])
def test_a_pure_module_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-I", "-W", "error", "-c", code], timeout=60, check=False
    )
    assert result.returncode == 0
