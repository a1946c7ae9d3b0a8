"""The settings of Sphinx: sphinx-build -W --keep-going -b html docs build/docs

Signatures and docstrings come from the modules themselves, the options of commands from their parsers.
"""

import ast
import contextlib
import functools
import importlib
import io
import os
import re
from pathlib import Path
from unittest import mock

from docutils import nodes
from docutils.parsers.rst import Directive

import shmring

project = "shmring"
copyright = "the authors of shmring"
release = version = shmring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "shmring"
html_static_path = ["page.css"]
html_css_files = ["page.css"]
default_role = "code"  # the docstrings' single backticks
autodoc_member_order = "bysource"

# Classes whose objects only calls make: showing the constructor's arguments would mislead.
MADE_BY_CALLS = {"Adoption", "Comm", "Plan", "SharedArray", "Status", "Transfer", "Work"}
C_TYPES = re.compile(r"\b(?:uintptr_t|size_t|str|bool) (?=\w)")


def signature(app, what, name, item, options, arguments, returns):
    """Return the signature to show. Cython has written it above the docstring, with C's types and `self`."""
    if arguments is None:
        return None
    if name.rpartition(".")[2] in MADE_BY_CALLS:
        return "", None
    return re.sub(r"^\(self(, )?", "(", C_TYPES.sub("", arguments)), returns


def docstring(app, what, name, item, options, lines):
    """Escape the markup of reStructuredText: docstrings are plain text with backticks."""
    if not any(lines):  # attributes of classes in C have their docstrings in the stub
        lines[:] = stub_docstrings().get(".".join(name.split(".")[-2:]), "").splitlines()
    for number, line in enumerate(lines):
        pieces = re.split(r"(`[^`]*`)", line)
        pieces[::2] = [re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
        lines[number] = "".join(pieces)


@functools.cache
def stub_docstrings():
    """Return a dict from "Class.name" to its docstring in the stubs."""
    found = {}
    for stub in Path(shmring.__file__).parent.rglob("*.pyi"):
        for node in ast.parse(stub.read_text()).body:
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef):
                    found[f"{node.name}.{member.name}"] = ast.get_docstring(member) or ""
    return found


class CommandHelp(Directive):
    """{command-help} MODULE: show its --help output, then that of each of its subcommands."""

    required_arguments = 1

    def run(self):
        module = self.arguments[0]
        first = help_of(module)
        shown = [literal(first)]
        for name in re.findall(r"^    (\w+)(?:  |$)", first, re.M):
            section = nodes.section(ids=[f"shmring-{name}"])
            section += [nodes.title(text=f"shmring {name}"), literal(help_of(module, name))]
            shown.append(section)
        return shown


def help_of(module, *command):
    place = {"COLUMNS": "100", "HOME": "/home/you", "NO_COLOR": "1", "XDG_CACHE_HOME": ""}
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, place),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        importlib.import_module(module).main([*command, "--help"])
    return said.getvalue()


def literal(text):
    return nodes.literal_block(text, text, language="text")


def setup(app):
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", docstring)
    app.add_directive("command-help", CommandHelp)
