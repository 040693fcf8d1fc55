"""What the package says of itself on import."""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import requires, version
from types import ModuleType

import pytest

import distcore.v1
import reshard


def test_the_version_is_that_of_the_metadata() -> None:
    assert reshard.__version__ == version("reshard")


def test_the_metadata_names_a_compatible_distcore() -> None:
    assert "distcore~=0.1.0" in (requires("reshard") or [])


def test_an_older_interface_is_refused_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcore.v1.registry.LEVEL", 0)
    with pytest.raises(ImportError, match=r"reshard needs level 1 of distcore\.v1.*offers level 0"):
        importlib.reload(reshard)
    assert distcore.v1.LEVEL == 1


@pytest.mark.parametrize("name", reshard.__all__)
def test_a_public_name_stays_what_it_is_whatever_is_imported(name: str) -> None:
    """A module of the same name would take the place of a function once it is imported."""
    for module in pkgutil.iter_modules(reshard.__path__):
        if module.name != "cli":
            importlib.import_module(f"reshard.{module.name}")
    assert callable(getattr(reshard, name))
    assert not isinstance(getattr(reshard, name), ModuleType)
