"""Packages of different releases meet through the interface, or say at once why they do not.

The older and the newer distcore are made up: the wheel of this tree with another version and
another level. Only pure modules are imported, so nothing needs torch. The session `mixed` does
the same with real releases, once there are any.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SIBLINGS = ("ckptx", "fttransport", "ownerplan", "reshard")
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(*command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=100
    )


def release(tree: Path, version: str, level: int) -> Path:
    """A wheel of distcore as if it were the release `version`, which offers `level`."""
    home = tree / f"distcore-{version}"
    shutil.copytree(ROOT / "packages/distcore", home, ignore=shutil.ignore_patterns("tests"))
    for path, pattern, text in (
        ("pyproject.toml", r'^version = ".*"$', f'version = "{version}"'),
        ("src/distcore/v1/registry.py", r"^LEVEL: Final = \d+$", f"LEVEL: Final = {level}"),
    ):
        changed, count = re.subn(pattern, text, (home / path).read_text(), flags=re.MULTILINE)
        assert count == 1
        (home / path).write_text(changed)
    built = run("uv", "build", "--quiet", "--wheel", "--out-dir", str(tree), cwd=home)
    assert built.returncode == 0, built.stderr
    return next(tree.glob(f"distcore-{version}-*.whl"))


def installed(tree: Path, wheel: Path) -> str:
    """The Python of an environment with that distcore and this tree's other packages, forced."""
    python = str(tree / "env" / "bin" / "python")
    homes = [str(ROOT / "packages" / name) for name in SIBLINGS]
    for command in (
        ("uv", "venv", "--quiet", "--python", sys.executable, str(tree / "env")),
        ("uv", "pip", "install", "--quiet", "--python", python, "--no-deps", str(wheel), *homes),
        ("uv", "pip", "install", "--quiet", "--python", python, "numpy"),
    ):
        result = run(*command)
        assert result.returncode == 0, result.stderr
    return python


def test_an_older_distcore_is_refused_by_name(tmp_path: Path) -> None:
    python = installed(tmp_path, release(tmp_path, "0.0.9", level=0))
    for name in SIBLINGS:
        result = run(python, "-c", f"import {name}")
        assert result.returncode != 0
        assert (
            f"ImportError: {name} needs level 1 of distcore.v1, but distcore 0.0.9 offers level 0; "
            "run: pip install --upgrade distcore" in result.stderr
        )


@pytest.mark.parametrize("name", SIBLINGS)
def test_an_older_distcore_is_refused_by_the_metadata_too(name: str) -> None:
    metadata = (ROOT / "packages" / name / "pyproject.toml").read_text()
    assert '"distcore~=0.1.0"' in metadata


def test_a_newer_distcore_of_the_same_series_serves_the_older_packages(tmp_path: Path) -> None:
    python = installed(tmp_path, release(tmp_path, "0.1.9", level=2))
    for name in ("fttransport", "ownerplan", "reshard"):
        result = run(python, "-c", f"import {name}; print({name}.__version__)")
        assert result.returncode == 0, result.stderr
