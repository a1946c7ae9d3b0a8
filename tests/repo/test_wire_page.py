"""docs/explanation/wire-format.md describes every frame as the code defines it: offsets, sizes, numbers."""

import importlib
import re
import shutil
import struct
import subprocess
from hashlib import sha256
from pathlib import Path

import pytest

from shmring import __version__
from shmring._bootstrap import handshake
from shmring._lifecycle import membership

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
PAGE = ROOT / "docs" / "explanation" / "wire-format.md"
if not PAGE.is_file():
    pytest.skip("needs the checkout", allow_module_level=True)

TEXT = PAGE.read_text()
# "`struct x` of `src/y.h`, 40 bytes" and the table below it.
FRAMES = re.findall(r"^`(?:struct )?(\w+)` of `([\w/.]+)`, (\d+) bytes[^|]*?\n\n((?:\|.*\n)+)", TEXT, re.M)
PYTHON = [frame for frame in FRAMES if frame[1].endswith(".py")]
C = [frame for frame in FRAMES if frame[1].endswith(".h")]
COMPILER = shutil.which("cc") or shutil.which("gcc")


def rows(table):
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines()[2:]]


def items_of(layout):
    """(offset, size) of each item of a struct.Struct."""
    order, items = layout.format[0], re.findall(r"\d+s|[a-zA-Z]", layout.format[1:])
    assert order in "!<", "an order without holes"
    offset = 0
    for item in items:
        size = struct.calcsize(order + item)
        yield offset, size
        offset += size


def test_all_frames_of_the_page_are_found():
    assert len(FRAMES) == len(re.findall(r"^`.*, \d+ bytes", TEXT, re.M)) >= 12
    assert {name for name, *_ in C} == set(re.findall(r"`struct (\w+)`", TEXT))


@pytest.mark.parametrize("frame", PYTHON, ids=lambda frame: frame[0])
def test_a_frame_of_python(frame):
    name, path, nbytes, table = frame
    module = importlib.import_module(f"shmring.{path.removesuffix('.py').replace('/', '.')}")
    layout = getattr(module, name)
    assert layout.size == int(nbytes)
    assert [(int(offset), int(size)) for offset, size, _ in rows(table)] == list(items_of(layout))


def test_every_layout_of_the_handshake_is_on_the_page():
    for path in ("_bootstrap/handshake.py", "_bootstrap/host_map.py"):
        made = re.findall(r"^(_[A-Z]+) = struct\.Struct", (ROOT / "shmring" / path).read_text(), re.M)
        assert made
        assert set(made) == {name for name, where, *_ in PYTHON if where == path}


def test_constants_of_the_handshake():
    assert '| `MAGIC` | "shmr", then the first 4 bytes of the SHA-256 of "shmring " and the version' in TEXT
    expected = b"shmr" + sha256(f"shmring {__version__}".encode()).digest()[:4]
    assert expected == handshake.MAGIC
    for name, value in re.findall(r"^\| `([A-Z_]+)` \| (\d+) \|(?: [^|]+ \|)?$", TEXT, re.M):
        if not name.startswith("SR_"):
            assert getattr(handshake, name) == int(value), name
    for name, value in re.findall(r"^\| `([A-Z]+)` \| `([a-z]+)` \|", TEXT, re.M):
        assert getattr(handshake, name) == value.encode(), name
    kinds = re.search(
        r"^# Kinds of frames between proven ranks\.\n(.+) =", Path(handshake.__file__).read_text(), re.M
    )
    for kind in kinds[1].split(", "):
        assert re.search(rf"^\| `{kind}` \| {getattr(handshake, kind)} \|", TEXT, re.M), kind
    classes = re.search(r"classes of errors are, from 0 on: ([^.]+)\.", TEXT)[1]
    assert re.findall(r"\w+", classes) == [error.__name__ for error in handshake._ERRORS]
    assert "a length of 2 bytes (`_LENGTH`" in TEXT
    assert importlib.import_module("shmring._bootstrap.framed_socket")._LENGTH.format == "!H"


def test_roles_of_the_proofs():
    output = re.search(r"the role: `(\w+)` in the acceptor's proof, `(\w+)` in the connector's", TEXT)
    for role, file, prover in zip(
        output.groups(), ("acceptor", "connector"), ("proof = ", "proof = "), strict=True
    ):
        text = (ROOT / "shmring" / "_bootstrap" / f"{file}.py").read_text()
        assert re.search(rf'{prover}request\.prove\(b"{role}"', text), file


def test_membership():
    assert re.search(rf"^\| `SR_VIEW_NBYTES` \| {membership.NBYTES} \|", TEXT, re.M)
    phases = ", ".join(phase.name.lower() for phase in membership.Phase)
    assert f"the phase: {phases}" in TEXT


def printed_by_c(tmp_path, lines):
    """Return the output of a program that includes the headers of src/ and has these lines."""
    source, program = tmp_path / "program.c", tmp_path / "program"
    headers = "".join(f'#include "{header}"\n' for header in sorted({path[4:] for _, path, *_ in C}))
    head = f'#include <stdio.h>\n#include <string.h>\n{headers}#include "kernels/kernels.h"\n'
    source.write_text(head + "\n".join(["int main(void)", "{", *lines, "}", ""]))
    includes = [f"-I{folder}" for folder in [ROOT / "src", *(ROOT / "src").glob("*/")]]
    flags = ["-std=c11", "-D_GNU_SOURCE", "-pthread", *includes]
    subprocess.run([COMPILER, *flags, source, "-o", program], check=True, timeout=50)
    return subprocess.run([program], capture_output=True, text=True, check=True, timeout=50).stdout.split()


needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")


@needs_compiler
def test_frames_of_c(tmp_path):
    """Fields are found by setting all their bits, as some of them are bit-fields."""
    lines, expected = [], []
    for name, _, nbytes, table in C:
        lines.append(f'printf("{name} %zu\\n", sizeof(struct {name}));')
        expected += [name, nbytes]
        for offset, size, field, _ in rows(table):
            field = field.strip("`")
            lines.append(f"{{ struct {name} frame; memset(&frame, 0, sizeof frame); frame.{field} = -1;")
            lines.append(
                "const unsigned char *byte = (const unsigned char *)&frame; size_t begin = 0, n = 0;"
            )
            lines.append("while (begin < sizeof frame && byte[begin] != 255) begin++;")
            lines.append("for (size_t i = 0; i < sizeof frame; i++) n += byte[i] == 255;")
            lines.append(f'printf("{field} %zu %zu\\n", begin, n); }}')
            expected += [field, offset, size]
        assert sum(int(size) for _, size, *_ in rows(table)) == int(nbytes), "no hole, and no field left out"
    assert printed_by_c(tmp_path, lines) == expected


@needs_compiler
def test_constants_of_c(tmp_path):
    constants = re.findall(r"^\| `(SR_\w+)` \| `?(0x[0-9a-f]+|\d+)`? \|", TEXT, re.M)
    assert len(constants) > 15
    lines = [f'printf("%llu\\n", (unsigned long long){name});' for name, _ in constants]
    values = dict(zip((name for name, _ in constants), printed_by_c(tmp_path, lines), strict=True))
    assert values == {name: str(int(value, 0)) for name, value in constants}


def test_every_kind_of_frame_of_a_channel_is_on_the_page():
    header = next((ROOT / path).read_text() for name, path, *_ in C if name.endswith("_call"))
    kinds = re.search(r"enum \w+_what \{(.+?)\};", header, re.S)[1]
    for name in re.findall(r"^\s+(SR_\w+)", kinds, re.M):
        assert re.search(rf"^\| `{name}` \| \d", TEXT, re.M), name
