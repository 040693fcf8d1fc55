"""Every contract of the workspace, broken once in a copy of it, is seen by its tool."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources and of the tools' settings."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        src = Path("packages") / package / "src"
        shutil.copytree(
            ROOT / src, tmp_path / src, ignore=shutil.ignore_patterns("__pycache__", ".*")
        )
    return tmp_path


def add(tree: Path, module: str, text: str) -> None:
    """Add lines to a module, which is made where it is missing."""
    package, _, rest = module.partition("/")
    path = tree / "packages" / package / "src" / package / rest
    if not path.exists():
        path.write_text('"""A module."""\n\n')
    with path.open("a") as file:
        file.write(text + "\n")


def run(tree: Path, tool: str, *args: str) -> subprocess.CompletedProcess[str]:
    src = os.pathsep.join(str(tree / "packages" / package / "src") for package in PACKAGES)
    return subprocess.run(
        [str(Path(sys.executable).with_name(tool)), *args],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": src, "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_the_contracts_hold_in_the_copy(tree: Path) -> None:
    result = run(tree, "lint-imports")
    assert result.returncode == 0, result.stdout
    assert "Contracts: 4 kept, 0 broken." in result.stdout


@pytest.mark.parametrize(
    ("module", "line", "words"),
    [
        pytest.param(
            "ckptx/__init__.py",
            "import reshard",
            "ckptx is not allowed to import reshard:",
            id="sibling",
        ),
        pytest.param(
            "fttransport/probe.py",
            "def late() -> None:\n    import ownerplan",
            "fttransport.probe -> ownerplan (l.4)",
            id="sibling-imported-late",
        ),
        pytest.param(
            "reshard/probe.py",
            "import distcore",
            "reshard.probe -> distcore (l.3)",
            id="core-itself",
        ),
        pytest.param(
            "reshard/probe.py",
            "from distcore.v1.region import Region",
            "reshard.probe -> distcore.v1.region (l.3)",
            id="module-behind-the-interface",
        ),
        pytest.param(
            "ownerplan/probe.py",
            "from distcore.testing import rank_threads",
            "ownerplan.probe -> distcore.testing (l.3)",
            id="test-tools-in-sources",
        ),
        pytest.param(
            "reshard/plan.py",
            "import torch",
            "reshard.plan is not allowed to import torch:",
            id="planner-with-torch",
        ),
        pytest.param(
            "distcore/v1/region.py",
            "import torch",
            "distcore.v1.region is not allowed to import torch:",
            id="interface-with-torch",
        ),
        pytest.param(
            "distcore/v1/plan.py",
            "from distcore.v1 import runtime",
            "distcore.v1.plan is not allowed to import distcore.v1.runtime:",
            id="interface-with-runtime",
        ),
    ],
)
def test_an_import_that_breaks_a_contract_is_seen(
    tree: Path, module: str, line: str, words: str
) -> None:
    add(tree, module, line)
    result = run(tree, "lint-imports")
    assert result.returncode == 1, result.stdout
    assert words in result.stdout


def test_torch_behind_another_module_is_seen(tree: Path) -> None:
    add(tree, "ownerplan/probe.py", "import torch")
    add(tree, "ownerplan/plan.py", "from ownerplan import probe")
    result = run(tree, "lint-imports")
    assert result.returncode == 1, result.stdout
    assert "ownerplan.probe -> torch (l.3)" in result.stdout


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import torch.distributed", "TID251 `torch.distributed` is banned"),
        ("from torch import distributed", "TID251 `torch.distributed` is banned"),
        ("from torch.distributed.tensor import DTensor", "TID251 `torch.distributed` is banned"),
        ("import pickle", "TID251 `pickle` is banned"),
        ("from marshal import loads", "TID251 `marshal` is banned"),
        ("assert True", "S101 "),
        ("def many(a: int, b: int, c: int, d: int, e: int, f: int) -> None: ...", "PLR0917 "),
        ("from . import plan", "TID252 "),
    ],
)
def test_a_line_that_breaks_the_style_is_seen(tree: Path, line: str, words: str) -> None:
    add(tree, "reshard/probe.py", line)
    result = run(tree, "ruff", "check", "--output-format", "concise")
    assert result.returncode == 1, result.stdout
    found = [row for row in result.stdout.splitlines() if row.startswith("packages/reshard/")]
    assert any(words in row for row in found), result.stdout


def test_any_is_refused_in_the_interface_alone(tree: Path) -> None:
    line = "from typing import Any\n\n\ndef loose(x: Any) -> None: ..."
    add(tree, "distcore/v1/probe.py", line)
    add(tree, "reshard/probe.py", line)
    rows = run(tree, "ruff", "check", "--output-format", "concise").stdout.splitlines()
    assert [row.split(":")[0] for row in rows if "ANN401" in row] == [
        "packages/distcore/src/distcore/v1/probe.py"
    ]
