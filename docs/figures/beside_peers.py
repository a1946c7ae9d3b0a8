"""Plot all_reduce beside its peers from the tables of docs/measured/performance.md: time by size, on log
axes."""

import math
import re
from pathlib import Path

from drawing import FAINT, Sheet

PAGE = Path(__file__).resolve().parents[1] / "measured" / "performance.md"
TABLES = ("2 ranks", "4 ranks on 2 cores")  # the heads of the first columns
COLOURS = {
    "Gloo": "#cf222e",
    "MPI": "#bf8700",
    "shmring": "#0969da",
    "zero-copy": "#1a7f37",
    "copy limit": FAINT,
}
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
LEFT, TOP, WIDTH, HEIGHT, GAP = 62, 44, 330, 300, 56
LEAST_NBYTES, MOST_NBYTES, LEAST_US, MOST_US = 5, 100 << 20, 0.03, 200_000


def table(head):
    """Return {column: [(bytes, µs)]} of the table whose first column is called `head`."""
    lines = PAGE.read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip(" *") for cell in line.strip("|").split("|")])
    names, found = rows[0][1:], {}
    for size, *cells in rows[2:]:
        number, unit = size.split()
        for name, cell in zip(names, cells, strict=True):
            if cell:
                point = int(number) * UNITS[unit], float(cell.replace(",", ""))
                found.setdefault(name, []).append(point)
    return found


def between(value, least, most):
    return math.log(value / least) / math.log(most / least)


def panel(sheet, left, title, lines):
    def at(nbytes, us):
        x = left + WIDTH * between(nbytes, LEAST_NBYTES, MOST_NBYTES)
        return x, TOP + HEIGHT * (1 - between(us, LEAST_US, MOST_US))

    sheet.text(left + WIDTH / 2, TOP - 12, title)
    for us, name in (
        (0.1, "0.1 µs"),
        (1, "1 µs"),
        (10, "10 µs"),
        (100, "100 µs"),
        (1e3, "1 ms"),
        (1e4, "10 ms"),
        (1e5, "100 ms"),
    ):
        _, y = at(LEAST_NBYTES, us)
        sheet.line([(left, y), (left + WIDTH, y)], "#eaeef2")
        sheet.text(left - 6, y + 4, name, anchor="end", small=True, colour=FAINT)
    for nbytes, name in (
        (8, "8 B"),
        (4096, "4 KiB"),
        (65536, "64 KiB"),
        (1 << 20, "1 MiB"),
        (64 << 20, "64 MiB"),
    ):
        x, y = at(nbytes, LEAST_US)
        sheet.line([(x, TOP), (x, y)], "#eaeef2")
        sheet.text(x, y + 18, name, small=True, colour=FAINT)
    for name, colour in COLOURS.items():
        points = [at(*point) for point in lines[name]]
        sheet.line(points, colour, 2, "5 4" if name == "copy limit" else "")
        for point in points:
            sheet.dot(*point, colour)


def machine():
    """Return the machine of the tables, as the page names it."""
    return re.search(r"on (2 cores of an AMD EPYC \(Zen 4\)) that share an L3", PAGE.read_text())[1]


def peers():
    width = LEFT + 2 * WIDTH + GAP + 24
    sheet = Sheet(
        width,
        TOP + HEIGHT + 84,
        "all_reduce of float32: time against size, beside MPI, Gloo and a plain copy",
    )
    for number, head in enumerate(TABLES):
        panel(sheet, LEFT + number * (WIDTH + GAP), f"all_reduce, {head}", table(head))
    for number, (name, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 20 + 140 * number, TOP + HEIGHT + 46
        sheet.line([(x, y), (x + 26, y)], colour, 2, "5 4" if name == "copy limit" else "")
        sheet.text(x + 33, y + 4, name, anchor="start", small=True)
    note = f"{machine()}, medians; lower is faster. MPI: the fastest of three. "
    note += "Tables: docs/measured/performance.md"
    sheet.text(LEFT, TOP + HEIGHT + 74, note, anchor="start", small=True, colour=FAINT)
    return sheet
