"""What the package says of itself on import."""

from __future__ import annotations

import importlib
from importlib.metadata import requires, version

import pytest

import distcore.v1
import ownerplan


def test_the_version_is_that_of_the_metadata() -> None:
    assert ownerplan.__version__ == version("ownerplan")


def test_the_metadata_names_a_compatible_distcore() -> None:
    assert "distcore~=0.1.0" in (requires("ownerplan") or [])


def test_an_older_interface_is_refused_on_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distcore.v1.registry.LEVEL", 0)
    with pytest.raises(
        ImportError, match=r"ownerplan needs level 1 of distcore\.v1.*offers level 0"
    ):
        importlib.reload(ownerplan)
    assert distcore.v1.LEVEL == 1


def test_every_name_of_the_catalogue_is_there() -> None:
    assert set(ownerplan.__all__) <= set(dir(ownerplan))
    assert all(getattr(ownerplan, name) is not None for name in ownerplan.__all__)
    assert len(ownerplan.__all__) == len(set(ownerplan.__all__))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ownerplan.nothing
