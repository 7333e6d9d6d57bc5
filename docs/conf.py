"""Sphinx configuration: `make docs` builds the pages, `sphinx-build -b doctest docs OUT` runs their code."""

import doctest

from sphinx.ext.doctest import DocTestBuilder, TestCode

import torchcache2

project = "torchcache2"
author = "The torchcache2 authors"
release = torchcache2.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.doctest",
]  # no intersphinx: a build needs no network
exclude_patterns = ["tables"]  # included by performance.md and measured.md
default_role = "py:obj"  # `name` in a docstring is a link if there is such a name

html_theme = "furo"
html_title = f"torchcache2 {release}"
html_static_path = ["_static"]
html_css_files = ["tables.css"]  # tables scroll on a narrow screen
html_js_files = ["copy.js"]  # a button on each block of code
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 3  # [text](page.md#heading) works, and is checked

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have types
autoclass_content = "class"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Unlike Sphinx's default, messages of exceptions are compared.
doctest_default_flags = doctest.ELLIPSIS | doctest.DONT_ACCEPT_TRUE_FOR_1
# What the examples in the docstrings take for granted. The logger may still write to another page's output.
# Without a name, what a page defines would count as Python's own.
doctest_global_setup = """
__name__ = "__main__"
import numpy as np
import torch
from torch import nn

from torchcache2 import *
set_logger_config()
_ = torch.manual_seed(0)
"""


class PageDocTestBuilder(DocTestBuilder):
    """Runs the blocks of a page as one doctest.

    Sphinx makes a doctest of each, all with the same names for their examples. The source of a class is then
    lost, or worse, another's, when a later block runs; and source is part of a key.
    """

    def test_group(self, group):
        """Join blocks that come from one file; their lines keep their numbers."""
        blocks = [code for code, *output in group.tests if not output]
        files = {code.filename for code in blocks}
        if len(blocks) == len(group.tests) > 1 and len(files) == 1:
            first, text = blocks[0], ""
            for code in blocks:
                line = (code.lineno or 0) - (first.lineno or 0)
                text += "\n" * max(1, line - text.count("\n")) + code.code
            place = first.filename, first.lineno, first.options
            group.tests = [[TestCode(text, "doctest", *place)]]
        return super().test_group(group)


def setup(app):
    """Put the builder in place of Sphinx's."""
    app.add_builder(PageDocTestBuilder, override=True)
