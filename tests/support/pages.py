"""The fenced blocks of README.md and docs/, and how each is run.

A comment above a block gives its environment; a block without a comment is a whole program. Further lines
of the comment are Python code that the page does not show; it runs before the block.

    <!-- in: rank -->    in each of two ranks, with `comm`, `np`, `shmring` and names of such blocks above it
    <!-- in: main -->    under `if __name__ == "__main__":`, below the lines of the comment
    <!-- in: torch -->   in a process group of torch, by adapters/torch/test_page.py
    <!-- file: a.py -->  is saved as that file; the other blocks of the page run beside it
    <!-- needs: ray -->  needs an optional package
    <!-- not run: why -->
    <!-- output -->      is not run: the block above it prints exactly these lines, in any order

If the comment beside a print() is a Python literal, or a literal and an explanation after a colon, this
print() has to print the literal, and nothing else, each time it runs. To check this, `marked` makes it
end its line with the print's own line number. `python pages.py PAGE` runs the first kind of block.
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
WAYS = {"in", "file", "needs", "not run", "command", "output"}
MARK = "  # line "


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
        """Return a dict from the line of a print() to the text that it has to print."""
        if self.language != "python":
            return {}
        return {self.line + number - 1: text for number, text in promises(self.code).items()}

    @property
    def marked(self):
        """Return the code; each print() that promises something also prints its line of the page."""
        lines = [line.encode() for line in self.code.splitlines()]  # columns count bytes
        for call in prints(self.code):
            if call.end_lineno in promises(self.code):
                end, column = call.end_lineno - 1, call.end_col_offset - 1
                mark = f', end="{MARK}{self.line + end}\\n"'.encode()
                lines[end] = lines[end][:column] + mark + lines[end][column:]
        return b"\n".join(lines).decode() + "\n"

    def broken_promises(self, printed):
        """Return (line, promise, printed) of each print() of the marked code that printed something else."""
        found = {line: set() for line in self.promised}
        for text, line in re.findall(rf"^(.*){MARK}(\d+)$", printed, re.M):
            found.get(int(line), set()).add(text)
        return [(line, text, found[line]) for line, text in self.promised.items() if found[line] != {text}]


def without_marks(printed):
    return re.sub(rf"{MARK}\d+$", "", printed, flags=re.M)


def prints(code):
    nodes = ast.walk(ast.parse(code))
    return [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"]


def promises(code):
    """Return a dict from the last line of a print() to the literal beside it."""
    found = {}
    for call in prints(code):
        after = code.splitlines()[call.end_lineno - 1].encode()[call.end_col_offset :].decode()
        text = after.strip().removeprefix("# ")
        literal = next(filter(is_literal, (text, text.partition(": ")[0])), None)
        if literal:
            found[call.end_lineno] = literal
    return found


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
        exec(compile("\n" * (block.line - 1) + block.marked, block.page, "exec"), names)


if __name__ == "__main__":
    shmring.spawn(run_in_rank, RANKS, [Path(sys.argv[1])], method="fork")
