"""Settings of the documentation's build."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from sphinx.application import Sphinx
from sphinx.ext.napoleon import Config, GoogleDocstring

project = "shardworks"
author = "the shardworks authors"
copyright = "the shardworks authors, Apache-2.0"
release = importlib.metadata.version("distcore")

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "examples"]
default_role = "py:obj"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": False}
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_title = "shardworks"
html_copy_source = False


def read_sections(_app: Sphinx, what: str, *rest: Any) -> None:
    """Read `Args:` and the like where they may stand.

    The extension that does this everywhere would take the first colon in the docstring of a
    property for the end of a type.
    """
    if what not in {"property", "attribute", "data"}:
        lines: list[str] = rest[-1]
        lines[:] = GoogleDocstring(lines, Config(), what=what).lines()


def setup(app: Sphinx) -> None:
    """Connect what this build adds to Sphinx."""
    app.connect("autodoc-process-docstring", read_sections)
