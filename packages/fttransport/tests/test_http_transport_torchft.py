"""torchft's own tests of its checkpoint transports, run on ours, where its wheel is installed.

Left out are those of its reader-writer lock, which is private and has no counterpart here.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("parameterized")
if not any((Path(place) / "torchft").is_dir() for place in sys.path):
    pytest.skip("torchft is not installed", allow_module_level=True)


def test_the_tests_in_torchft_s_wheel_pass() -> None:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("torchft_shim.py"))],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr[-4000:]
