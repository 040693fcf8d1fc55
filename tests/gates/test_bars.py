"""Every rule of test_repo.py, broken once in a small tree, is seen."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PROJECT = """
[project]
name = "{name}"
version = "0.1.0"
dependencies = [{needs}]
"""
LONG_BODY = "def long() -> None:\n    '''Long.'''\n" + "    print()\n" * 41
INTERFACE = "test_a_package_uses_nothing_of_distcore_but_the_interface"
# What is wrong in the package `one`: a file, its text, the rule that sees it, and how it says so.
BROKEN = [
    ("src/one/long.py", "\n" * 401, "test_a_module_is_short", "401 lines"),
    ("src/one/body.py", LONG_BODY, "test_a_function_is_short", "{'long': 41}"),
    ("src/one/claim.py", "assert True\n", "test_a_module_asserts_nothing", "assert in lines [1]"),
    ("src/one/late.py", "def f():\n    import pickle\n", "test_a_module_runs_no_code", "'pickle'"),
    ("src/one/accent.py", "# \u00e9\n", "test_a_module_is_ascii", "not ASCII"),
    ("src/one/utils.py", "", "test_a_module_is_named_for_one_noun", "'utils' says nothing"),
    ("src/one/sub/__init__.py", "class Thing: ...\n", "test_an_init_is_a_catalogue", "'Thing'"),
    ("src/one/behind.py", "from distcore.v1.layout import Layout\n", INTERFACE, "v1.layout"),
    ("tests/test_body.py", "from distcore.groups import x\n", INTERFACE, "distcore.groups"),
    ("tests/test_long.py", "import two\n", "test_no_package_imports_its_sibling", "['two']"),
    ("tests/test_stray.py", "", "test_tests_mirror_the_sources", "test_stray.py"),
    ("CHANGELOG.md", "## 0.0.9\n", "test_a_package_has_what_every", "no 0.1.0 in CHANGELOG.md"),
    (
        "pyproject.toml",
        PROJECT.format(name="one", needs='"distcore>=0.1"'),
        "test_a_package_names_its_siblings_with_a_compatible_range",
        "distcore>=0.1: use ~=X.Y.0",
    ),
    (
        "README.md",
        "see https:" + "//example.org/" + "simple/x\n",
        "test_nothing_names_a_registry",
        "packages/one/README.md:1",
    ),
    ("run.sh", "cd /" + "work/x\n", "test_nothing_names_a_registry", "packages/one/run.sh:1"),
    ("notes.md", "no title\n", "test_markdown_is_kept_simple", "packages/one/notes.md"),
]


def lay(tree: Path) -> None:
    """Lay two packages that keep every rule, and break `one`."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_repo.py", tree / "tests")
    for package, needs in (("distcore", ""), ("one", ""), ("two", '"distcore~=0.1.0"')):
        files = {
            "pyproject.toml": PROJECT.format(name=package, needs=needs),
            "README.md": "# A package\n",
            "CHANGELOG.md": "# Changelog\n\n## 0.1.0\n",
            f"src/{package}/py.typed": "",
            f"src/{package}/__init__.py": "",
            f"tests/test_{package}.py": "",
        }
        broken = {name: text for name, text, _, _ in BROKEN} if package == "one" else {}
        for name, text in {**files, **broken}.items():
            path = tree / "packages" / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pytest prints of test_repo.py in a tree in which everything is wrong."""
    tree = tmp_path_factory.mktemp("tree")
    lay(tree)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/test_repo.py"),
            *("-q", "--tb=no", "-p", "no:cacheprovider"),
        ],
        cwd=tree,
        env={**os.environ, "COLUMNS": "1000"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return [row for row in result.stdout.splitlines() if row.startswith("FAILED")]


@pytest.mark.parametrize(
    ("name", "rule", "words"), [(name, rule, words) for name, _, rule, words in BROKEN]
)
def test_a_broken_rule_is_seen(failed: list[str], name: str, rule: str, words: str) -> None:
    rows = [row for row in failed if rule in row and words in row]
    assert len(rows) == 1, failed
    assert "[packages/" not in rows[0] or f"[packages/one/{name}]" in rows[0]


def test_what_keeps_the_rules_passes(failed: list[str]) -> None:
    assert not [row for row in failed if "[two]" in row or "[packages/two/" in row]
    assert len([row for row in failed if "utils.py" in row]) == 1
