"""The fenced blocks of README.md and docs/, and how each is run.

A comment above a block gives its environment; a block without a comment is a whole program. Further lines
of the comment are Python code that the page does not show; it runs before the block.

    <!-- in: rank -->    in each of two ranks, with `comm`, `np`, `shmring` and names of such blocks above it
    <!-- in: main -->    under `if __name__ == "__main__":`, below the lines of the comment
    <!-- in: torch -->   in a process group of torch, by adapters/torch/test_page.py
    <!-- file: a.py -->  is saved as that file; the other blocks of the page run beside it
    <!-- needs: ray -->  needs an optional package
    <!-- not run: why -->

If the comment beside a print() is a Python literal, the block has to print it. `python pages.py PAGE` runs
the first kind.
"""

import ast
import importlib.util
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import shmring

ROOT = Path(__file__).resolve().parents[2]
RANKS = 2
COMMENT = r"<!--(?:(?!-->).)*-->"
FENCED = re.compile(rf"^((?:{COMMENT}\n)*)```([^\n]*)\n(.*?)^```$", re.M | re.S)
WAYS = {"in", "file", "needs", "not run", "command"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # the first of its code
    language: str
    code: str
    how: dict[str, str]
    hidden: str  # Python that runs before it

    @property
    def name(self):
        return f"{self.page.name}:{self.line}"

    @property
    def promised(self):
        """Return the expected output, as given by its comments."""
        return [text for text in re.findall(r"^ *print\(.*\) +# (.+)$", self.code, re.M) if is_literal(text)]


def is_literal(text):
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return True


def pages():
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page):
    text = page.read_text()
    return [block(page, text, found) for found in FENCED.finditer(text)]


def block(page, text, found):
    how, hidden = {}, []
    for comment in re.findall(COMMENT, found[1], re.S):
        first, *rest = comment[4:-3].strip().splitlines()
        way, _, value = first.partition(":") if ":" in first else first.partition(" ")
        how[way] = value.strip()
        hidden += rest
    line = text.count("\n", 0, found.start(3)) + 1
    return Block(page, line, found[2], found[3], how, "\n".join(hidden))


def lacks(block):
    """The package that it needs and that is not installed here, or None."""
    need = block.how.get("needs", "os")
    return need if importlib.util.find_spec(need) is None else None


def in_ranks(page):
    return [block for block in blocks(page) if block.how.get("in") == "rank" and not lacks(block)]


def run_in_rank(comm, page):
    """Run the blocks one after another, each with the names of those before it."""
    names = {"comm": comm, "np": np, "shmring": shmring}
    for block in in_ranks(page):
        exec(block.hidden, names)
        exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), names)


if __name__ == "__main__":
    shmring.spawn(run_in_rank, RANKS, [Path(sys.argv[1])], method="fork")
