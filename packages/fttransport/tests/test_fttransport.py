"""What the package says of itself on import."""

from __future__ import annotations

import importlib
from importlib.metadata import requires, version

import pytest

import distcore.v1
import fttransport


def test_the_version_is_that_of_the_metadata() -> None:
    assert fttransport.__version__ == version("fttransport")


def test_the_metadata_names_a_compatible_distcore() -> None:
    assert "distcore~=0.1.0" in (requires("fttransport") or [])


def test_an_older_interface_is_refused_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcore.v1.registry.LEVEL", 0)
    with pytest.raises(
        ImportError, match=r"fttransport needs level 1 of distcore\.v1.*offers level 0"
    ):
        importlib.reload(fttransport)
    assert distcore.v1.LEVEL == 1
