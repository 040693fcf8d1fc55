"""The rules of the repository that no other tool holds."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))

MODULE_LINES = 400
BODY_LINES = 40

# Modules that say nothing by their name.
VAGUE = {"utils", "util", "common", "helpers", "helper", "misc", "tools", "base", "core"}
# What loads code from data, and the one module that does so for who asks for it by name.
UNSAFE = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_OWNERS = {"packages/fttransport/src/fttransport/codecs.py"}
# Tests that belong to no single module, and why.
BESIDE = {
    "import": "what importing the package loads and costs",
    "public_surface": "the pinned public names",
    "reported_systems": "what other systems do with the input of a report",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=name_of)


def project(package: str) -> dict[str, Any]:
    with (ROOT / "packages" / package / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that a file imports, wherever in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function from its first statement on, its docstring left out."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def texts() -> Iterator[Path]:
    """The files of the repository that somebody wrote."""
    for top in (".ci", ".github", "docs", "packages", "tests"):
        yield from (path for path in (ROOT / top).rglob("*") if path.is_file())
    yield from (path for path in ROOT.iterdir() if path.is_file())


@each(SOURCES)
def test_a_module_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MODULE_LINES, f"{lines} lines; the bar is {MODULE_LINES}"


@each(SOURCES)
def test_a_function_is_short(path: Path) -> None:
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = {f.name: body_lines(f) for f in functions if body_lines(f) > BODY_LINES}
    assert long == {}, f"bodies over {BODY_LINES} lines: {long}"


@each(SOURCES)
def test_a_module_asserts_nothing(path: Path) -> None:
    tree = ast.parse(path.read_text())
    lines = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert lines == [], f"assert in lines {lines}; raise an error that says what is wrong"


@each(SOURCES)
def test_a_module_runs_no_code_from_data(path: Path) -> None:
    found = UNSAFE.intersection(
        name.split(".")[0] for name in imported(ast.parse(path.read_text()))
    )
    assert not found or name_of(path) in UNSAFE_OWNERS, f"imports {sorted(found)}"


@each(SOURCES)
def test_a_module_is_ascii(path: Path) -> None:
    assert path.read_text().isascii(), "not ASCII"


@each(SOURCES)
def test_a_module_is_named_for_one_noun(path: Path) -> None:
    assert path.stem not in VAGUE, f"{path.stem!r} says nothing"


@each([path for path in SOURCES if path.name == "__init__.py"])
def test_an_init_is_a_catalogue(path: Path) -> None:
    tree = ast.parse(path.read_text())
    defined = [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    strays = set(defined) - {"__getattr__", "__dir__"}
    assert not strays, f"defines {sorted(strays)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_its_sibling(package: str) -> None:
    """Here for the tests of a package too: import-linter sees only the sources."""
    others = set(PACKAGES) - {package, "distcore"}
    for path in (ROOT / "packages" / package).rglob("*.py"):
        roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
        assert not roots & others, f"{name_of(path)} imports {sorted(roots & others)}"


@pytest.mark.parametrize("package", sorted(set(PACKAGES) - {"distcore"}))
def test_a_package_uses_nothing_of_distcore_but_the_interface(package: str) -> None:
    """And its tests use the test tools besides."""
    allowed = {"distcore.v1", "distcore.v1.runtime"}
    found = []
    for part, more in (
        ("src", set[str]()),
        ("tests", {"distcore.testing", "distcore.testing.strategies"}),
    ):
        for path in sorted((ROOT / "packages" / package / part).rglob("*.py")):
            names = set(imported(ast.parse(path.read_text())))
            strays = {name for name in names if name.split(".")[0] == "distcore"} - allowed - more
            found += [f"{name_of(path)} imports {name}" for name in sorted(strays)]
    assert not found, "; ".join(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_what_every_package_has(package: str) -> None:
    home = ROOT / "packages" / package
    for needed in ("README.md", "CHANGELOG.md", f"src/{package}/py.typed", "tests"):
        assert (home / needed).exists(), f"{needed} is missing"
    version = project(package)["version"]
    assert f"## {version}" in (home / "CHANGELOG.md").read_text(), f"no {version} in CHANGELOG.md"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_names_its_siblings_with_a_compatible_range(package: str) -> None:
    needed = [Requirement(text) for text in project(package)["dependencies"]]
    ranges = {need.name: str(need.specifier) for need in needed if need.name in PACKAGES}
    assert package == "distcore" or "distcore" in ranges, "names no distcore"
    for name, text in ranges.items():
        assert re.fullmatch(r"~=\d+\.\d+\.\d+", text), f"{name}{text}: use ~=X.Y.0"


@pytest.mark.parametrize("package", PACKAGES)
def test_tests_mirror_the_sources(package: str) -> None:
    """A test file is named for a module, or for a module and an aspect of it."""
    home = ROOT / "packages" / package
    modules = {path.stem for path in (home / "src" / package).rglob("*.py")}
    folders = {path.parent.name for path in (home / "src" / package).rglob("__init__.py")}
    known = tuple(f"test_{name}_" for name in modules | folders | set(BESIDE))
    tests = sorted((home / "tests").rglob("test_*.py"))
    strays = [name_of(path) for path in tests if not f"{path.stem}_".startswith(known)]
    assert tests, "no tests"
    assert strays == [], f"no source module of that name: {strays}"


def test_the_workspace_names_all_packages() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        root = tomllib.load(file)
    assert sorted(root["project"]["dependencies"]) == PACKAGES
    assert sorted(root["tool"]["uv"]["sources"]) == PACKAGES
    assert sorted(root["tool"]["importlinter"]["root_packages"]) == PACKAGES
    assert sorted(root["tool"]["coverage"]["run"]["source_pkgs"]) == PACKAGES
    typed = set(root["tool"]["mypy"]["mypy_path"].split(":"))
    assert {f"packages/{package}/src" for package in PACKAGES} < typed


def test_ci_runs_the_test_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    line = next(line for line in readme.splitlines() if line.endswith("/nox"))
    install, command = line.rsplit(" && ", 1)
    script = [row.strip() for row in (ROOT / ".ci" / "run").read_text().splitlines()]
    assert f"if {install}; then" in script
    assert command in script


def test_nothing_names_a_registry_or_a_place_on_one_machine() -> None:
    host = re.compile(r"https?://[^\s\"')]*(?:/simple\b|pythonhosted|//pypi|\.pypi)", re.IGNORECASE)
    place = re.compile(r"(?<![\w./*{}-])/(?:home|root|work|Users|opt)/\w")
    skipped = {"__pycache__", "_build", ".hypothesis", ".mypy_cache", ".ruff_cache"}
    found = []
    for path in texts():
        if skipped & set(path.parts) or path.name in {"LICENSE", "uv.lock"}:
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [
            f"{name_of(path)}:{number}"
            for number, line in enumerate(lines, 1)
            if host.search(line) or place.search(line)
        ]
    assert not found, "; ".join(found)


def test_markdown_is_kept_simple() -> None:
    """Every page opens with one title."""
    for path in texts():
        if path.suffix == ".md" and "_build" not in path.parts and path.name != "LICENSE.md":
            assert path.read_text().startswith(("# ", "---\n", "```{")), name_of(path)
