"""Sphinx configuration: Markdown pages, Google docstrings, nothing fetched from the network."""

from importlib import metadata

project = "lightning-osdp"
author = "the lightning-osdp authors"
copyright = f"2026, {author}"  # noqa: A001 (Sphinx asks for this name)
release = metadata.version("lightning-osdp")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"lightning-osdp {release}"

myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # `Plan.save` in a docstring links where there is something to link to
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # Lightning's docstrings are Lightning's to publish
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 100
