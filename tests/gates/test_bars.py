"""Every rule of test_repo.py, broken once in a small tree, is seen."""

from __future__ import annotations

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
# What is wrong in the broken tree: the file, its text, and the test that sees it.
BROKEN = [
    ("src/one/long.py", "\n" * 401, "test_a_module_is_short"),
    ("src/one/body.py", LONG_BODY, "test_a_function_is_short"),
    ("src/one/claim.py", "assert True\n", "test_a_module_asserts_nothing"),
    ("src/one/late.py", "def f():\n    import pickle\n", "test_a_module_runs_no_code_from_data"),
    ("src/one/accent.py", "# caf\u00e9\n", "test_a_module_is_ascii"),
    ("src/one/utils.py", "", "test_a_module_is_named_for_one_noun"),
    ("src/one/sub/__init__.py", "class Thing: ...\n", "test_an_init_is_a_catalogue"),
    ("tests/test_long.py", "import two\n", "test_no_package_imports_its_sibling"),
    (
        "tests/test_body.py",
        "from distcore.groups import x\n",
        "test_tests_use_the_interface_of_distcore_and_its_test_tools",
    ),
    ("tests/test_stray.py", "", "test_tests_mirror_the_sources"),
    ("CHANGELOG.md", "## 0.0.9\n", "test_a_package_has_what_every_package_has"),
    (
        "pyproject.toml",
        PROJECT.format(name="one", needs='"distcore>=0.1"'),
        "test_a_package_names_its_siblings_with_a_compatible_range",
    ),
    (
        "README.md",
        "see " + "https://files." + "pythonhosted.org/x\n",
        "test_nothing_names_a_registry_or_a_place_on_one_machine",
    ),
    ("notes.md", "no title\n", "test_markdown_is_kept_simple"),
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints of test_repo.py in a tree in which everything is wrong."""
    tree = tmp_path_factory.mktemp("tree")
    for package in ("one", "two"):
        home = tree / "packages" / package
        (home / "tests").mkdir(parents=True)
        (home / "pyproject.toml").write_text(PROJECT.format(name=package, needs=""))
    for name, text, _ in BROKEN:
        path = tree / "packages" / "one" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "test_repo.py", tree / "tests")
    result = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "tests/test_repo.py"),
            *("-q", "--tb=no", "-p", "no:cacheprovider"),
        ],
        cwd=tree,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return result.stdout


@pytest.mark.parametrize(("name", "test"), [(name, test) for name, _, test in BROKEN])
def test_a_broken_rule_is_seen(seen: str, name: str, test: str) -> None:
    failed = [line for line in seen.splitlines() if line.startswith("FAILED") and test in line]
    per_file = name.startswith("src/")
    assert any(f"[packages/one/{name}]" in line or not per_file for line in failed), seen


def test_what_is_right_passes(seen: str) -> None:
    """The empty modules of the broken tree fail nothing but the rule that they break."""
    rows = [row for row in seen.splitlines() if row.startswith("FAILED")]
    assert not [row for row in rows if "utils.py" in row and "one_noun" not in row]
