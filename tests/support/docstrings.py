"""The public names and their docstrings, in NumPy's style, and a run of their examples.

`python docstrings.py ranks` runs the examples that use `comm`, each in the same two ranks, one after another.
`python docstrings.py alone` runs the others. An example's output is that of rank 0.
"""

import ast
import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
import textwrap
from typing import NamedTuple

import numpy as np

import shmring
from shmring import adapters, methods

RANKS = 2
MARKED = re.compile(r"(?m)^(\S.*)\n-{3,}\n")  # the title of a section


class Public(NamedTuple):
    name: str  # below shmring
    item: object

    @property
    def text(self):
        """Return the docstring, without the signature that Cython puts above it."""
        text = inspect.getdoc(self.item) or ""
        first, _, rest = text.partition("\n")
        return inspect.cleandoc(rest) if re.match(r"\w+(\.\w+)*\(.*\)( -> .*)?$", first) else text

    @property
    def summary(self):
        """Return the first paragraph as one line."""
        return " ".join(self.text.partition("\n\n")[0].split())

    @property
    def sections(self):
        """Return a dict from the title of a section to its text."""
        pieces = MARKED.split(self.text)
        return dict(zip(pieces[1::2], pieces[2::2], strict=True))

    @property
    def described(self):
        """Return the names of the section Parameters."""
        heads = re.findall(r"(?m)^(\S[^:\n]*?)(?: :.*)?$", self.sections.get("Parameters", ""))
        return [name for head in heads for name in head.split(", ")]

    @property
    def parameters(self):
        """Return the names of the signature, as the section Parameters shows them."""
        stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        found = inspect.signature(self.item).parameters.values()
        return [stars.get(each.kind, "") + each.name for each in found if each.name != "self"]

    @property
    def examples(self):
        """Return the program that the doctest-like examples are, or ""."""
        return "".join(example.source for example in doctest.DocTestParser().get_examples(self.text))

    @property
    def shown(self):
        """Return the code of the literal block in Examples, which no test can run, or ""."""
        _, found, code = self.sections.get("Examples", "").partition("::\n\n")
        return textwrap.dedent(code) if found else ""

    @property
    def uses_comm(self):
        return bool(self.examples) and "comm" in compile(self.examples, self.name, "exec").co_names

    @property
    def lacks(self):
        """Return the package that the examples import and that is not installed, or None."""
        roots = {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
            for node in ast.walk(ast.parse(self.examples))
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }
        return next((root for root in sorted(roots) if importlib.util.find_spec(root) is None), None)


def is_call(item):
    return inspect.isroutine(item)


def members(name, kind):
    """Yield the public methods and properties of a class of shmring, inherited ones too."""
    found = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("shmring"):
            found |= vars(each)
    for member, item in found.items():
        if not member.startswith("_") or member == "__call__":
            is_static = isinstance(item, (staticmethod, classmethod))
            yield Public(f"{name}.{member}", getattr(kind, member) if is_static else item)


def modules():
    """Yield the names of the public modules."""
    yield from ("model", "errors")
    yield from (f"methods.{found.name}" for found in pkgutil.iter_modules(methods.__path__))
    found = [found.name for found in pkgutil.iter_modules(adapters.__path__)]
    yield from (f"adapters.{name}" for name in found if not name.startswith("_"))


def items():
    """Yield (name, item) of every public class and function once."""
    for name in shmring.__all__:
        yield name, getattr(shmring, name)
    for path in modules():
        try:
            module = importlib.import_module(f"shmring.{path}")
        except ImportError as error:  # of an optional package
            if (error.name or "").startswith("shmring"):
                raise
            continue
        for name in getattr(module, "__all__", ("agreed",)):
            item = getattr(module, name)
            if getattr(item, "__module__", None) == module.__name__:
                yield f"{path}.{name}", item


def public():
    """Return every public class, function, method and property."""
    found = []
    for name, item in items():
        if inspect.isclass(item) or is_call(item):
            found.append(Public(name, item))
        if inspect.isclass(item):
            found += members(name, item)
    return found


class Any(doctest.OutputChecker):
    """Accept any output: on ranks other than rank 0."""

    def check_output(self, want, got, optionflags):
        return True


def run_examples(of, names, checker):
    """Run them. The first wrong output or exception raises, so that no other rank waits."""
    parsed = doctest.DocTestParser().get_doctest(of.text, dict(names), of.name, None, 0)
    doctest.DebugRunner(checker, verbose=False).run(parsed, clear_globs=False)


def run_in_rank(comm):
    chosen = [of for of in public() if of.uses_comm and not of.lacks]
    for of in chosen:
        names = {"comm": comm, "np": np, "shmring": shmring}
        if of.name == "Error":  # its example ends the communicator
            names["comm"] = comm.dup()
        run_examples(of, names, None if comm.rank == 0 else Any())
        comm.barrier()
    return len(chosen)


def run_alone():
    chosen = [of for of in public() if of.examples and not of.uses_comm and not of.lacks]
    for of in chosen:
        run_examples(of, {"np": np, "shmring": shmring}, None)
    return len(chosen)


if __name__ == "__main__":
    try:
        in_ranks = sys.argv[1] == "ranks"
        count = shmring.spawn(run_in_rank, RANKS, method="fork")[0] if in_ranks else run_alone()
        print(f"{count} programs")
    except doctest.DocTestFailure as failure:
        sys.exit(f"{failure.test.name}: {failure.example.source} gives {failure.got}")
