"""How Sphinx makes the site: ``make docs`` writes it to ``build/docs``, where every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "proto"), str(ROOT)]

project = "RingTune"
author = "RingTune"
copyright = "RingTune"  # noqa: A001 - the name that Sphinx reads
html_title = "RingTune"
html_theme = "furo"
html_static_path: list[str] = []
html_copy_source = False
html_show_copyright = False

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["**/__pycache__"]
nitpicky = False

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]
suppress_warnings = ["misc.highlighting_failure"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
add_module_names = False
