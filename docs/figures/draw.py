"""Draw the figures of the documentation: python docs/figures/draw.py

The figures of algorithms and memory are drawings; peers.svg is a plot of the tables in
docs/measured/performance.md.
"""

from pathlib import Path

from beside_peers import peers
from drawing import FAINT, SHADES, Sheet

HERE = Path(__file__).resolve().parent


def architecture():
    sheet = Sheet(
        680, 330, "Two hosts of two ranks: a shared segment on each host, TCP connections between the hosts"
    )
    starters = "spawn · shmrun · torchrun, mpiexec, srun · multiprocessing, pools, joblib, Dask, Ray"
    sheet.box(20, 12, 640, 34, "started by: " + starters, "#f6f8fa", small=True)
    layers = ("your program: NumPy, torch …", "Comm: calls, plans, errors", "engine: steps, waits, deaths")
    for host in range(2):
        x = 20 + 350 * host
        sheet.box(x, 62, 290, 232, shade="#f6f8fa")
        sheet.text(x + 145, 312, f"host {host}")
        for local in range(2):
            rank, left = 2 * host + local, x + 10 + 138 * local
            sheet.text(left + 66, 80, f"rank {rank}")
            for row, text in enumerate(layers):
                sheet.box(left, 88 + 34 * row, 132, 34, "", SHADES[rank])
                first, _, second = text.partition(": ")
                sheet.text(left + 66, 103 + 34 * row, first, small=True)
                sheet.text(left + 66, 116 + 34 * row, second, small=True, colour="#57606a")
            sheet.arrow(left + 56, 192, left + 56, 222)
            sheet.arrow(left + 76, 222, left + 76, 192)
        sheet.box(x + 10, 224, 270, 62, "")
        sheet.text(x + 145, 244, "one segment of shared memory")
        sheet.text(x + 145, 260, "call lines · staging buffers · message rings", small=True)
        sheet.text(x + 145, 276, "arrays that all ranks map", small=True)
    sheet.arrow(302, 167, 378, 167)
    sheet.arrow(378, 181, 302, 181)
    sheet.text(340, 156, "TCP", small=True)
    return sheet


def call_line():
    sheet = Sheet(
        680, 190, "A call line for each rank: number, fingerprint, payload; every rank reads all lines"
    )
    for rank in range(2):
        y = 30 + 70 * rank
        sheet.text(12, y + 24, f"rank {rank}", anchor="start")
        sheet.text(12, y + 40, "writes", anchor="start", small=True, colour=FAINT)
        for x, width, text in (
            (70, 70, "seq 8 B"),
            (140, 110, "fingerprint 8 B"),
            (250, 200, "payload 48 B"),
        ):
            sheet.box(x, y, width, 44, text, SHADES[rank], small=True)
        for reader in range(2):
            sheet.arrow(452, y + 22, 548, 52 + 70 * reader)
    for reader in range(2):
        sheet.box(550, 30 + 70 * reader, 118, 44, "folds 0, then 1", small=True)
    sheet.text(
        70,
        172,
        "payload is written first, seq last: a rank that sees seq sees the rest",
        anchor="start",
        small=True,
    )
    return sheet


def direct():
    sheet = Sheet(
        680, 250, "Chunks through slots: every rank reduces one slice of all ranks' slots, for all ranks"
    )
    titles = ((95, "x, private"), (300, "slots, shared"), (480, "reduced slices"), (615, "out, private"))
    for x, title in titles:
        sheet.text(x, 18, title)
    for rank in range(3):
        y = 34 + 68 * rank
        for piece in range(3):
            sheet.box(30 + 44 * piece, y, 44, 36, f"{rank}.{piece}", SHADES[piece], small=True)
            own = piece == rank
            sheet.box(
                235 + 44 * piece,
                y,
                44,
                36,
                "" if own else f"{rank}.{piece}",
                "#ffffff" if own else SHADES[piece],
            )
        sheet.arrow(166, y + 18, 230, y + 18)
        sheet.box(440, y, 80, 36, f"Σ slice {rank}", SHADES[rank], small=True)
        for source in range(3):
            sheet.arrow(369, 52 + 68 * source, 436, y + 18, FAINT)
        sheet.box(565, y, 100, 36, "Σ0 Σ1 Σ2", small=True)
        for target in range(3):
            sheet.arrow(522, y + 18, 561, 52 + 68 * target, FAINT)
    note = (
        "A rank's own slice is not staged. While one chunk is staged, another is reduced, a third copied out."
    )
    sheet.text(12, 240, note, anchor="start", small=True)
    return sheet


def push():
    sheet = Sheet(
        680, 220, "Reduce and push: rank r loads slice r of every array and stores the sum into every array"
    )
    for rank in range(3):
        y = 24 + 58 * rank
        for x, what in ((110, "before"), (470, "after")):
            for piece in range(3):
                text = f"{rank}.{piece}" if what == "before" else f"Σ{piece}"
                sheet.box(x + 50 * piece, y, 50, 34, text, SHADES[piece], small=True)
        sheet.text(12, y + 22, f"array of {rank}", anchor="start")
        sheet.box(330, y, 70, 34, f"rank {rank}", SHADES[rank], small=True)
        for other in range(3):
            sheet.arrow(262, 41 + 58 * other, 326, y + 17, FAINT)
            sheet.arrow(402, y + 17, 466, 41 + 58 * other, FAINT)
    sheet.text(110, 208, "loads slice r of all", anchor="start", small=True)
    sheet.text(470, 208, "stores the sum into all", anchor="start", small=True)
    return sheet


def ring():
    sheet = Sheet(680, 210, "A ring of four: each rank sends one slice to the next in every step")
    for rank in range(4):
        x = 30 + 165 * rank
        sheet.box(x, 40, 110, 40, f"rank {rank}", SHADES[rank])
        if rank < 3:
            sheet.arrow(x + 112, 60, x + 162, 60)
    sheet.line([(580, 82), (580, 104), (85, 104)])
    sheet.arrow(85, 104, 85, 84)
    steps = (
        "first, each rank sends one slice of its own, a different one on each rank",
        "then it adds its own slice to the received one and sends the sum on: after N-1 steps all sums exist",
        "in N-1 more steps the sums go around: together 2(N-1) steps, with 1/N of the message each",
    )
    for line, text in enumerate(steps):
        sheet.text(30, 138 + 24 * line, text, anchor="start", small=True)
    return sheet


def double_tree():
    sheet = Sheet(
        680, 250, "Two binary trees of the same eight ranks: leaves of one are inner nodes of the other"
    )
    children = {0: (4,), 4: (2, 6), 2: (1, 3), 6: (5, 7)}
    for tree in range(2):
        numbers = [rank if tree == 0 else 7 - rank for rank in range(8)]
        sheet.text(170 + 340 * tree, 22, ("first", "second")[tree] + " half of the message")
        level, depth = [0], 0
        while level:
            for node in level:
                x, y = 50 + 340 * tree + 34 * numbers[node], 48 + 44 * depth
                for child in children.get(node, ()):
                    sheet.line([(x, y + 12), (50 + 340 * tree + 34 * numbers[child], y + 32)])
                sheet.box(x - 13, y - 12, 26, 24, str(numbers[node]), SHADES[tree if node % 2 == 0 else 2])
            level, depth = [child for node in level for child in children.get(node, ())], depth + 1
    note = "sums go up, results down, in chunks; a rank with children in one tree is a leaf of the other"
    sheet.text(340, 236, note, small=True)
    return sheet


def hosts():
    sheet = Sheet(
        680, 260, "Two hosts of two ranks: reduce in memory, exchange slices by TCP, gather in memory"
    )
    for host in range(2):
        x, ranks, slices = 20 + 340 * host, (36, 546)[host], (206, 376)[host]
        sheet.box(x, 30, 300, 180, shade="#f6f8fa")
        sheet.text(x + 150, 22, f"host {host}")
        for local in range(2):
            y = 50 + 80 * local
            sheet.box(ranks, y, 98, 50, f"rank {2 * host + local}", SHADES[2 * host + local])
            sheet.box(slices, y, 98, 50, f"slice {local} of host {host}", SHADES[local], small=True)
            start, end = ((136, 202), (544, 478))[host]
            for source in range(2):
                sheet.arrow(start, 75 + 80 * source, end, y + 25, FAINT)
    for local in range(2):
        y = 68 + 80 * local
        sheet.arrow(306, y, 372, y)
        sheet.arrow(374, y + 14, 308, y + 14)
    note = (
        "inside: shared memory; between hosts: a TCP connection for each slice and pair of hosts, no leader"
    )
    sheet.text(340, 234, note, small=True)
    sheet.text(340, 252, "every byte is sent to other hosts once for all ranks of a host", small=True)
    return sheet


def segment():
    sheet = Sheet(680, 250, "The segment: header, a lane for each rank, staging buffers, message rings")
    rows = (
        ("header, one page", "ranks, lengths, tables of sizes, the abort word", "#f6f8fa"),
        (
            "lane of rank 0, six pages",
            "call lines, counters, event, liveness, last calls, waits, stacks",
            SHADES[0],
        ),
        ("lane of rank 1", "each line by one writer", SHADES[1]),
        (
            "staging buffer of rank 0",
            "slots for chunks; allocated before the first touch",
            SHADES[0],
        ),
        ("staging buffer of rank 1", "", SHADES[1]),
        ("message rings", "one from each rank to each other; pages allocated at first use", "#f6f8fa"),
    )
    for row, (name, what, shade) in enumerate(rows):
        sheet.box(20, 16 + 37 * row, 240, 37, name, shade)
        sheet.text(276, 39 + 37 * row, what, anchor="start", small=True)
    return sheet


FIGURES = (architecture, call_line, direct, push, ring, double_tree, hosts, segment, peers)

if __name__ == "__main__":
    for figure in FIGURES:
        (HERE / f"{figure.__name__}.svg").write_text(str(figure()))
