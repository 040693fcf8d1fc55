"""torchft's own tests of such transports, and its Manager, with ours, where it is installed.

Left out are the tests of its reader-writer lock, which is private and has no counterpart here.
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


@pytest.mark.parametrize("transport", ["HTTPTransport", "PGTransport"])
def test_its_manager_heals_replicas_that_join_and_come_again(transport: str) -> None:
    result = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("torchft_manager.py")), transport],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout == f"{transport}: healed 2 times, equal: True\n"
