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
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "shmring"
html_static_path = ["page.css"]
html_css_files = ["page.css"]
default_role = "py:obj"  # the docstrings' single backticks: links, if they name something public
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [
    ("Parameters of several methods", "params_style"),
    ("Errors of every collective", "params_style"),
    ("Errors of one-sided methods", "params_style"),
]

# Classes whose objects only calls make: showing the constructor's arguments would mislead.
MADE_BY_CALLS = {
    *("Adoption", "Arena", "Comm", "Lock", "Plan", "ProbedMessage", "Reduction"),
    *("SharedArray", "Status", "Trace", "Transfer", "Work"),
}
C_TYPES = re.compile(r"\b(?:uintptr_t|size_t|str|bool) (?=\w)")


def signature(app, what, name, item, options, arguments, returns):
    """Return the signature to show. Cython has written it above the docstring, with C's types and `self`."""
    if arguments is None:
        return None
    if name.rpartition(".")[2] in MADE_BY_CALLS:
        return "", None
    return re.sub(r"^\(self(, )?", "(", C_TYPES.sub("", arguments)), returns


def docstring(app, what, name, item, options, lines):
    """Escape the markup of reStructuredText: docstrings are plain text with backticks and sections."""
    member = ".".join(name.split(".")[-2:])
    stub = stub_members().get(member)
    if stub and not any(lines):  # attributes of classes in C have their docstrings in the stub
        lines[:] = (ast.get_docstring(stub) or "").splitlines()
    is_code = False
    for number, line in enumerate(lines):
        is_code = line.startswith(">>>") or (is_code and line.strip() != "")
        if not is_code:
            pieces = re.split(r"(`[^`]*`)", line)
            pieces[1::2] = [f":code:{piece}" if piece.startswith("`.") else piece for piece in pieces[1::2]]
            pieces[::2] = [re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", piece) for piece in pieces[::2]]
            lines[number] = "".join(pieces)
    if stub and what in ("attribute", "property") and stub.returns:
        lines += ["", f":type: {ast.unparse(stub.returns)}"]


@functools.cache
def stub_members():
    """Return a dict from "Class.name" to the first definition in the stubs."""
    found = {}
    for stub in Path(shmring.__file__).parent.rglob("*.pyi"):
        for node in ast.parse(stub.read_text()).body:
            for member in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(member, ast.FunctionDef):
                    found.setdefault(f"{node.name}.{member.name}", member)
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
    app.connect("autodoc-process-docstring", docstring, priority=400)  # before napoleon
    app.add_directive("command-help", CommandHelp)
