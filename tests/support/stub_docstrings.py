"""Docstrings of the stubs (.pyi) of public classes: each is the first paragraph of the module's docstring.

`python stub_docstrings.py` writes them. A name whose docstring the compiled module cannot carry, such as an
attribute in C, keeps the docstring of the stub.
"""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path

from docstrings import Public

import shmring

PACKAGE = Path(shmring.__file__).parent
FOLDERS = ("_arrays", "_comm", "_p2p")  # of the modules that define public classes
WIDTH = 110


def stubs():
    return [stub for folder in FOLDERS for stub in sorted((PACKAGE / folder).glob("*.pyi"))]


def module_of(stub):
    return importlib.import_module(".".join(stub.relative_to(PACKAGE.parent).with_suffix("").parts))


def definitions(body, owner):
    """Yield (node, runtime object) of the classes and functions that a stub defines; no special methods."""
    for node in body:
        name = getattr(node, "name", "__")
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or name == "__" or is_setter(node):
            continue
        if (name.startswith("__") and name != "__call__") or not hasattr(owner, name):
            continue
        item = getattr(owner, name)
        yield node, item
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, item)


def is_setter(node):
    return any(isinstance(each, ast.Attribute) and each.attr == "setter" for each in node.decorator_list)


def wanted(item):
    """Return the first paragraph of the docstring as one line, or "" if there is none of shmring's own."""
    is_own = not isinstance(item, type) or "__doc__" in vars(item)
    return Public("", item).summary if is_own and inspect.getdoc(item) else ""


def written(text, column):
    """Return the docstring in source form, in one line or in several lines with room for the quotes."""
    if column + len(text) + 6 <= WIDTH:
        return f'"""{text}"""'
    width = WIDTH - column - 3
    lines = textwrap.wrap(f'"""{text}', width, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * column}".join([*lines, '"""'])


def wrong(stub):
    """Return (node, docstring that it must have) of the definitions whose docstring differs."""
    found = definitions(ast.parse(stub.read_text()).body, module_of(stub))
    pairs = [(node, wanted(item)) for node, item in found]
    return [
        (node, summary) for node, summary in pairs if summary and summary != one_line(ast.get_docstring(node))
    ]


def one_line(text):
    return " ".join((text or "").split())


def own_docstrings():
    """Return the names of the attributes that only a stub documents."""
    return {
        node.name
        for stub in stubs()
        for node, item in definitions(ast.parse(stub.read_text()).body, module_of(stub))
        if not wanted(item) and ast.get_docstring(node)
    }


def corrected(stub):
    """Return the text of the stub with the docstrings that it must have."""
    lines = stub.read_text().splitlines()
    for node, summary in sorted(wrong(stub), key=lambda pair: -pair[0].lineno):
        column, first = node.col_offset + 4, node.body[0]
        docstring = " " * column + written(summary, column)
        if ast.get_docstring(node) is not None:
            lines[first.lineno - 1 : first.end_lineno] = [docstring]
        elif isinstance(first, ast.Expr):  # ...
            lines[first.lineno - 1] = f"{lines[first.lineno - 1][: first.col_offset].rstrip()}\n{docstring}"
        else:
            begin = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
            lines.insert(begin - 1, docstring)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for stub in stubs():
        stub.write_text(corrected(stub))
    print("now run: ruff format shmring")
