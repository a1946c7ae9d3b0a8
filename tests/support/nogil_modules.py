"""The extension modules that run without the GIL, for the fault builds and the ThreadSanitizer runs.

A module belongs to them if every function of its .pyx is declared nogil, and so does one of MIXED.
"""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "shmring"
# Each has functions without the GIL that read or write shared memory, besides classes.
MIXED = ("_internode/context", "_p2p/ring_ends")
# From the word that defines a function to the colon that ends its head.
_FUNCTION = re.compile(
    r"^[ ]*(?:cdef|cpdef|def)\b(?![ ]+(?:class|extern|enum|struct|union)\b)[^\n=(]*\((?P<rest>.*?):$",
    re.MULTILINE | re.DOTALL,
)


def without_gil():
    """Return their paths below shmring/ without the suffix, as "_algorithms/choice"."""
    found = {_name(path) for path in PACKAGE.rglob("*.pyx") if runs_without_gil(path.read_text())}
    return tuple(sorted({*found, *MIXED}))


def runs_without_gil(text):
    """Return whether a .pyx defines functions, and all of them are nogil."""
    heads = [found["rest"] for found in _FUNCTION.finditer(re.sub(r"[ ]*#[^\n]*", "", text))]
    return bool(heads) and all(re.search(r"\)[^()]*\bnogil$", head) for head in heads)


def _name(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix()
