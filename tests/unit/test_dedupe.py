"""Lines that several ranks print, shown once: in each rank's order, soon, and above unfinished lines."""

import os
import random
import re

import pytest

from shmring._launch import dedupe, output_mux
from shmring._system import cpulist


class Place:
    """A terminal or a log that streams of ranks end in, with a clock of its own."""

    def __init__(self, tty, monkeypatch, nprocs):
        self.now = 0.0
        monkeypatch.setattr(dedupe.time, "monotonic", lambda: self.now)
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.screen = dedupe.Dedupe(tty, output_mux.Front(3))
        self.out = [self.stream(rank) for rank in range(nprocs)]
        self.err = [self.stream(rank) for rank in range(nprocs)]

    def stream(self, rank):
        return output_mux.Stream(rank, self.write_fd, self.screen, live=rank == 0)

    def printed(self, *pieces):
        """The output after each (rank, bytes) has been fed."""
        for rank, data in pieces:
            self.out[rank].feed(data)
        try:
            return os.read(self.read_fd, 1 << 20).decode()
        except BlockingIOError:
            return ""

    def after(self, seconds):
        self.now += seconds
        self.screen.release(self.now)
        return self.printed()


@pytest.fixture
def place(monkeypatch):
    """Makes them."""
    made = []

    def make(tty, nprocs=3):
        made.append(Place(tty, monkeypatch, nprocs))
        return made[-1]

    yield make
    for one in made:
        os.close(one.read_fd)
        os.close(one.write_fd)


@pytest.fixture
def log(place):
    return place(tty=False)


@pytest.fixture
def terminal(place):
    return place(tty=True)


def test_the_same_line_of_all_is_one_at_once(log):
    assert log.printed((0, b"epoch 1\n"), (2, b"epoch 1\n")) == ""
    assert log.printed((1, b"epoch 1\n")) == "0-2| epoch 1\n"


def test_of_some_it_is_shown_after_a_moment(log):
    assert log.printed((0, b"a\n"), (2, b"a\n")) == ""
    assert log.screen.due_at == dedupe.HOLD_S < 1
    assert log.after(dedupe.HOLD_S / 2) == ""
    assert log.after(dedupe.HOLD_S) == "0,2| a\n"
    assert log.screen.due_at == float("inf")
    assert log.printed((1, b"a\n")) == ""
    assert log.after(dedupe.HOLD_S) == "  1| a\n"


def test_repeated_lines_are_not_one_line(log):
    assert log.printed((0, b"a\na\n"), (1, b"a\na\n"), (2, b"a\na\n")) == "0-2| a\n0-2| a\n"


def test_a_line_joins_none_that_is_before_an_earlier_one_of_its_rank(log):
    pieces = (0, b"a\nb\n"), (1, b"b\na\n"), (2, b"x\n")
    assert log.printed(*pieces) + log.after(1) == "  0| a\n0-1| b\n  1| a\n  2| x\n"


def test_who_has_ended_is_not_waited_for(log):
    log.out[2].close()
    assert log.printed((0, b"a\n"), (1, b"a\n")) == ""  # its stderr is open still
    log.err[2].close()
    assert log.printed() == "0-1| a\n"
    for stream in (*log.out[:2], *log.err[:2]):
        stream.feed(b"last\n")
        stream.close()
        stream.close()
    assert log.printed() == "0-1| last\n0-1| last\n"


def test_much_of_one_rank_is_not_held_for_the_others(log):
    text = b"".join(b"line %d\n" % at for at in range(5000))
    assert log.printed((1, text)).count("\n") >= 3000
    log.screen.finish()
    assert log.printed().endswith("  1| line 4999\n")


def test_on_a_terminal_a_prompt_stays_below(terminal):
    assert terminal.printed((0, b"name? ")) == "  0| name? "
    assert terminal.printed((1, b"news\n"), (2, b"news\n")) == ""
    assert terminal.after(1) == "\r\x1b[K1-2| news\n  0| name? "


def test_on_a_terminal_a_finished_line_stays_until_it_is_reported_whose_it_is(terminal):
    assert terminal.printed((0, b"epoch 1")) == "  0| epoch 1"  # print() writes the end of a line by itself
    assert terminal.printed((0, b"\n"), (1, b"epoch 1\n")) == ""
    assert terminal.printed((2, b"epoch 1\n")) == "\r\x1b[K0-2| epoch 1\n"
    assert terminal.printed((0, b"next")) == "  0| next"


def test_on_a_terminal_what_follows_a_held_line_is_drawn_below_it(terminal):
    assert terminal.printed((0, b"a"), (0, b"\n")) == "  0| a"
    assert terminal.printed((0, b"name? ")) == "\r\x1b[K  0| name? "
    assert terminal.after(1) == "\r\x1b[K  0| a\n  0| name? "


def test_a_progress_bar_goes_on_while_lines_are_held(terminal):
    terminal.err[0].feed(b"\r10%")
    assert terminal.printed((0, b"a\n"), (1, b"a\n")) == "  0| 10%"
    terminal.err[0].feed(b"\r20%")
    assert terminal.printed((2, b"a\n")) == "\r\x1b[K  0| 20%\r\x1b[K0-2| a\n  0| 20%"
    terminal.err[0].feed(b"\r100%\n")
    terminal.screen.finish()
    assert terminal.printed() == "\r\x1b[K  0| 100%\n"


def test_a_bar_comes_back_after_a_line_in_pieces_that_was_held(terminal):
    bar = terminal.err[0]
    bar.feed(b"\r10%")
    assert terminal.printed((0, b"a"), (0, b"\n")) == "  0| 10%\r\x1b[K  0| a"
    assert terminal.after(1) == "\r\x1b[K  0| a\n  0| 10%"
    assert terminal.printed((0, b"b"), (0, b"\n")) == "\r\x1b[K  0| b"
    bar.feed(b"\r20%")
    assert terminal.printed() == "\r\x1b[K  0| 20%"
    bar.feed(b"\r30%\n")
    assert terminal.after(1) == "\r\x1b[K  0| b\n  0| 20%\r\x1b[K  0| 30%\n"
    assert terminal.printed((0, b"c")) == "  0| c"


def test_a_progress_bar_in_a_log_stands_behind_what_came_before(log):
    assert log.printed((0, b"a\n\r10%")) == "  0| a\n  0| 10%"
    assert log.printed((0, b"\r100%\n")) == "\r  0| 100%\n"
    assert log.printed((0, b"b\n"), (1, b"b\n"), (2, b"b\n")) == "0-2| b\n"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("tty", [False, True])
def test_each_rank_has_all_its_lines_in_their_order(place, tty, seed):
    chance, four = random.Random(seed), place(tty, nprocs=4)
    written, begun, shown = {rank: [] for rank in range(4)}, {}, ""
    for turn in range(400):
        stream = chance.choice(four.out + four.err)
        if turn < 300 and stream not in begun:  # the last turns and those after them only finish
            begun[stream] = chance.choice("abc") * chance.randrange(1, 3)
            stream.feed(chance.choice([b"", b"", b"\r"]) + begun[stream].encode())
        if stream in begun and chance.random() < 0.7:
            written[stream.rank].append(begun.pop(stream))
            stream.feed(b"\n")
        shown += four.printed() + four.after(chance.choice([0, 0.01, 0.15]))
    for stream, text in begun.items():
        written[stream.rank].append(text)
        stream.feed(b"\n")
    four.screen.finish()
    # Rank 0's bars are in a log where they began, not where they ended.
    lines = re.findall(r"([\d,-]+)\| (\w+)\n", shown + four.printed())
    for rank, own in written.items():
        if tty or rank > 0:
            assert [text for whose, text in lines if rank in cpulist.parse(whose)] == own
    assert any(len(cpulist.parse(whose)) > 1 for whose, _ in lines)
