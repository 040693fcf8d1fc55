"""A catalogue loads a module when one of its names is first used, and once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from distcore.v1 import on_first_use

PACKAGE = """
from distcore.v1 import on_first_use
early = 1
__getattr__, __dir__ = on_first_use(__name__, {"late": "inner", "gone": "inner"})
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    home = tmp_path / "a_catalogue"
    home.mkdir()
    (home / "__init__.py").write_text(PACKAGE)
    (home / "inner.py").write_text("late = object()\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("a_catalogue")
    for name in ("a_catalogue", "a_catalogue.inner"):
        sys.modules.pop(name, None)


def test_a_name_is_loaded_when_it_is_used(package: ModuleType) -> None:
    assert "a_catalogue.inner" not in sys.modules
    assert package.late is sys.modules["a_catalogue.inner"].late
    assert vars(package)["late"] is package.late


def test_every_name_is_listed_before_it_is_loaded(package: ModuleType) -> None:
    assert {"early", "late", "gone"} <= set(dir(package))
    assert dir(package) == sorted(dir(package))
    assert "a_catalogue.inner" not in sys.modules


def test_other_names_are_missing_as_in_any_module(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match="module 'a_catalogue' has no attribute 'other'"):
        _ = package.other
    assert not hasattr(package, "other")


def test_a_name_that_its_module_has_not(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=r"'a_catalogue\.inner' has no attribute 'gone'"):
        _ = package.gone


def test_a_package_that_is_not_imported_has_no_names() -> None:
    with pytest.raises(KeyError, match="nowhere_at_all"):
        on_first_use("nowhere_at_all", {})
