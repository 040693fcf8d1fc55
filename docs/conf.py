"""Settings of the documentation's build."""

import importlib.metadata

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
