"""registry: the level that a package needs, and the implementations that are installed."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, version
from pathlib import Path

import pytest

from distcore.v1 import LEVEL, PlanError, providers, require


def installed(folder: Path, package: str, role: str, **points: str) -> None:
    """Write the metadata of an installed package that offers `points` for `role`."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {package}\nVersion: 1.0\n")
    lines = [f"[distcore.v1.{role}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_level_up_to_ours_is_offered() -> None:
    for level in range(1, LEVEL + 1):
        require(level, by="somebody")


def test_a_level_that_is_missing_is_an_import_error_that_says_how_to_mend_it() -> None:
    with pytest.raises(ImportError) as caught:
        require(LEVEL + 1, by="reshard")
    assert str(caught.value) == (
        f"reshard needs level {LEVEL + 1} of distcore.v1, but distcore {version('distcore')} "
        f"offers level {LEVEL}; run: pip install --upgrade distcore"
    )


@pytest.mark.parametrize("level", ["1", 1.0, True, None])
def test_a_level_that_is_no_int_is_refused(level: int) -> None:
    with pytest.raises(PlanError, match=r"level: .* not an int"):
        require(level, by="somebody")


def test_an_unknown_role_has_no_providers() -> None:
    assert providers("nobody-offers-this") == {}


def test_providers_are_found_by_name_and_loaded_only_on_request(site: Path) -> None:
    (site / "offered_here.py").write_text("def plan() -> str:\n    return 'planned'\n")
    installed(site, "one", "test-role", zeta="offered_here:plan", alpha="not_there:x")
    found = providers("test-role")
    assert list(found) == ["alpha", "zeta"]
    assert all(isinstance(point, EntryPoint) for point in found.values())
    assert "offered_here" not in sys.modules
    assert found["zeta"].load()() == "planned"
    del sys.modules["offered_here"]


def test_other_roles_are_left_out(site: Path) -> None:
    installed(site, "one", "test-role", alpha="a:b")
    installed(site, "two", "test-role-2", beta="a:b")
    assert list(providers("test-role")) == ["alpha"]


def test_one_name_offered_twice_is_an_import_error(site: Path) -> None:
    installed(site, "one", "test-role", alpha="a:b")
    installed(site, "two", "test-role", alpha="c:d", beta="e:f")
    with pytest.raises(ImportError, match="'alpha' is offered twice") as caught:
        providers("test-role")
    assert "one (a:b)" in str(caught.value)
    assert "two (c:d)" in str(caught.value)
