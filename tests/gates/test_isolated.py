"""The session `isolated` refuses what only a fresh environment of wheels can show.

Each test lays a small workspace with this one's noxfile, in which one package more lies under
`packages/`, and runs its session. Nothing needs torch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

METADATA = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "{version}"
requires-python = ">=3.11"
dependencies = [{needs}]

[tool.hatch.build.targets.wheel]
packages = ["src/{name}"]
"""


def package(tree: Path, name: str, *, version: str = "0.1.0", needs: str = "", text: str) -> None:
    home = tree / "packages" / name
    (home / "src" / name).mkdir(parents=True)
    (home / "tests").mkdir()
    (home / "pyproject.toml").write_text(METADATA.format(name=name, version=version, needs=needs))
    (home / "src" / name / "__init__.py").write_text('"""A probe."""\n\n' + text)
    (home / "tests" / f"test_{name}.py").write_text(
        f'"""A test."""\n\nimport {name}\n\n\ndef test_it() -> None:\n    assert {name}.__doc__\n'
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A workspace without packages, with this one's sessions."""
    for name in ("noxfile.py", "constraints.txt", "conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "import_alone.py", tmp_path / "tests")
    root = (ROOT / "pyproject.toml").read_text()
    start, end = root.index("[project]"), root.index("[tool.uv]")
    own = '[project]\nname = "probes"\nversion = "0"\nrequires-python = ">=3.11"\n\n'
    (tmp_path / "pyproject.toml").write_text(root[:start] + own + root[end:])
    return tmp_path


def isolated(tree: Path, name: str) -> subprocess.CompletedProcess[str]:
    own = ("UV_CONSTRAINT", "UV_BUILD_CONSTRAINT", "VIRTUAL_ENV", "PYTHONPATH")
    return subprocess.run(
        [sys.executable, "-m", "nox", "--no-color", "--session", f"isolated({name})"],
        cwd=tree,
        env={key: value for key, value in os.environ.items() if key not in own},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=110,
    )


def test_a_package_that_declares_what_it_needs_passes(tree: Path) -> None:
    package(tree, "probe", needs='"idna"', text="import idna\n\nname = idna.__name__\n")
    result = isolated(tree, "probe")
    assert result.returncode == 0, result.stdout
    assert "probe: imported 1 modules" in result.stdout
    assert "1 passed" in result.stdout


def test_an_undeclared_dependency_fails(tree: Path) -> None:
    package(tree, "probe", text="import idna\n\nname = idna.__name__\n")
    result = isolated(tree, "probe")
    assert result.returncode != 0, result.stdout
    assert "No module named 'idna'" in result.stdout


def test_an_undeclared_dependency_of_one_module_fails(tree: Path) -> None:
    """Also where it comes with the test tools, and no test imports the module."""
    package(tree, "probe", text="")
    (tree / "packages/probe/src/probe/plan.py").write_text('"""A plan."""\n\nimport numpy\n')
    result = isolated(tree, "probe")
    assert result.returncode != 0, result.stdout
    assert "probe.plan needs 'numpy', which the metadata of probe does not name" in result.stdout


def test_an_undeclared_sibling_fails(tree: Path) -> None:
    package(tree, "other", text="")
    package(tree, "probe", text="import other\n\nname = other.__name__\n")
    result = isolated(tree, "probe")
    assert result.returncode != 0, result.stdout
    assert "No module named 'other'" in result.stdout


def test_a_range_that_the_built_wheels_break_fails(tree: Path) -> None:
    package(tree, "other", version="0.2.0", text="")
    package(tree, "probe", needs='"other~=0.1.0"', text="import other\n\nname = other.__name__\n")
    result = isolated(tree, "probe")
    assert result.returncode != 0, result.stdout
    assert "other>=0.1.0,<0.2.dev0" in result.stdout.replace("\n", " ")
    assert "unsatisfiable" in result.stdout
