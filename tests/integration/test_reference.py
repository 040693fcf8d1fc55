"""Every public function and class has its entry in the documentation."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
ENTRY = re.compile(r"^\.\. auto\w+:: (\S+)$", re.MULTILINE)
MODULES = [
    "ckptx",
    "ckptx.exchange_utils",
    "distcore",
    "distcore.testing",
    "distcore.v1",
    "distcore.v1.runtime",
    "fttransport",
    "ownerplan",
    "ownerplan.owner_planning",
    "reshard",
    "reshard.xferdtensor_python",
]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_documented(name: str) -> None:
    entries = {entry for page in DOCS.glob("*.md") for entry in ENTRY.findall(page.read_text())}
    # A name that several modules offer has one entry.
    known = {entry.rpartition(".")[2] for entry in entries}
    module = import_module(name)
    public = [public for public in module.__all__ if not public.startswith("_")]
    kinds = (inspect.isclass, inspect.isfunction)
    named = [one for one in public if any(kind(getattr(module, one)) for kind in kinds)]
    assert [one for one in named if one not in known] == []
