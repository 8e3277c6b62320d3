"""Settings of Sphinx: `make docs` builds the site from the repository's Markdown pages."""

from __future__ import annotations

import kcl_pipeline

project = "kcl_pipeline"
version = release = kcl_pipeline.__version__
# Sphinx imports modules with TYPE_CHECKING set, which Dagster does not support.
for name in kcl_pipeline.__all__:
    getattr(kcl_pipeline, name)

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["docs/**.md", "tests/README.md", "*.md"]
exclude_patterns = [".*", "**/.*", "build", "dist", "node_modules"]
nitpicky = True

html_theme = "furo"
html_title = f"kcl_pipeline {release}"

myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True, "undoc-members": False, "show-inheritance": False}
napoleon_use_ivar = True
# An attribute called `bytes` is no ambiguity of the type. A test compares docs with the index.
suppress_warnings = ["ref.python", "toc.not_included"]
# Types of other libraries, and private modules of this one, have no page here.
nitpick_ignore_regex = [("py:.*", r"(?!kcl_pipeline\.[A-Za-z]+$).*")]
