"""The output of several ranks as it appears on a terminal and in a log."""

import fcntl
import os

import pytest

from shmring._launch import output_mux


class Place:
    """A terminal or a log that streams of ranks end in."""

    kind = output_mux.Screen

    def __init__(self, tty, prefix=True):
        self.read_fd, self.write_fd = os.pipe()
        fcntl.fcntl(self.write_fd, fcntl.F_SETPIPE_SZ, 1 << 20)  # so that writing needs no reader
        self.screen = self.kind(tty, output_mux.Front(1 if prefix else 0))
        self.streams = [self.stream(rank) for rank in range(2)]

    def stream(self, rank):
        return output_mux.Stream(rank, self.write_fd, self.screen, live=rank == 0)

    def printed(self, *pieces):
        """The output after each (rank, bytes) has been fed."""
        for rank, data in pieces:
            self.streams[rank].feed(data)
        os.write(self.write_fd, b"$")
        return os.read(self.read_fd, 1 << 20)[:-1].decode()

    def close(self):
        os.close(self.read_fd)
        os.close(self.write_fd)


@pytest.fixture
def log():
    place = Place(tty=False)
    yield place
    place.close()


@pytest.fixture
def terminal():
    place = Place(tty=True)
    yield place
    place.close()


@pytest.fixture
def plain():
    place = Place(tty=False, prefix=False)
    yield place
    place.close()


@pytest.mark.parametrize("place", ["log", "terminal"])
def test_lines_carry_their_rank(place, request):
    place = request.getfixturevalue(place)
    assert place.printed((0, b"a\nb\n"), (1, b"c\n")) == "0| a\n0| b\n1| c\n"


def test_in_a_log_lines_stay_whole(log):
    assert log.printed((0, b"half"), (1, b"other\n"), (0, b" line\n")) == "1| other\n0| half line\n"


def test_on_a_terminal_the_unfinished_line_of_rank_0_moves_down(terminal):
    assert terminal.printed((0, b"name? ")) == "0| name? "
    assert terminal.printed((1, b"news\n")) == "\r\x1b[K1| news\n0| name? "
    assert terminal.printed((0, b"yes\n")) == "\r\x1b[K0| name? yes\n"
    assert terminal.printed((1, b"more\n")) == "1| more\n"


def test_unfinished_lines_of_other_ranks_wait(terminal, log):
    for place in (terminal, log):
        assert place.printed((1, b"50%\r60%\r")) == ""
        assert place.printed((1, b"100%\n")) == "1| 100%\n"


def test_a_progress_bar_is_drawn_at_once_on_a_terminal(terminal):
    assert terminal.printed((0, b"\r 0%")) == "0|  0%"
    assert terminal.printed((0, b"\r50%")) == "\r\x1b[K0| 50%"
    assert terminal.printed((1, b"news\n")) == "\r\x1b[K1| news\n0| 50%"
    assert terminal.printed((0, b"\r100%\n")) == "\r\x1b[K0| 100%\n"


def test_a_progress_bar_comes_back_after_a_line_in_pieces(terminal):
    other = terminal.stream(0)  # the bar is on one of its streams, its other output on the other
    assert terminal.printed((0, b"\r50%")) == "0| 50%"
    other.feed(b"news")
    assert terminal.printed() == "\r\x1b[K0| news"
    other.feed(b"\n")
    assert terminal.printed() == "\r\x1b[K0| news\n0| 50%"
    other.feed(b"more")
    assert terminal.printed((0, b"\r60%")) == "\r\x1b[K0| more\r\x1b[K0| 60%"
    assert terminal.printed((0, b"\r70%\n")) == "\r\x1b[K0| 70%\n0| more"
    other.feed(b"\n")
    assert terminal.printed((1, b"end\n")) == "\r\x1b[K0| more\n1| end\n"


def test_a_bar_that_ends_while_it_is_covered_does_not_come_back(terminal):
    other = terminal.stream(0)
    terminal.streams[0].feed(b"50%")
    other.feed(b"news")
    assert terminal.printed((0, b" done\n")) == "0| 50%\r\x1b[K0| news\r\x1b[K0| 50% done\n0| news"
    other.feed(b"\n")
    assert terminal.printed() == "\r\x1b[K0| news\n"


def test_a_progress_bar_is_passed_on_at_once_in_a_log_too(log):
    assert log.printed((0, b"\r 0%")) == "0|  0%"
    assert log.printed((0, b"\r50%")) == "\r0| 50%"
    assert log.printed((0, b"\r100%\n")) == "\r0| 100%\n"
    assert log.printed((0, b"next\n")) == "0| next\n"


def test_a_progress_bar_in_a_log_ends_for_other_ranks_lines(log):
    assert log.printed((0, b"\r 0%"), (1, b"news\n"), (0, b"\r50%")) == "0|  0%\n1| news\n0| 50%"
    assert log.printed((1, b"more\n")) == "\n1| more\n"
    log.streams[0].close()
    assert log.printed() == ""  # the bar has been printed already


def test_long_bars_do_not_grow_the_memory(log):
    for percent in range(1000):
        log.streams[0].feed(b"\r%100d" % percent)
        log.printed()
    assert len(log.streams[0].rest) < 200


def test_without_prefix_lines_are_unchanged(plain):
    assert plain.printed((0, b"a\r\nb\n"), (1, b"10%\r20%\r\n")) == "a\r\nb\n10%\r20%\r\n"


def test_a_bar_whose_carriage_return_comes_last_is_seen(log, terminal):
    assert log.printed((0, b"50%\r")) == "0| 50%"
    assert log.printed((0, b"60%\r")) == "\r0| 60%"
    assert log.printed((1, b"news\n"), (0, b"70%\r")) == "\n1| news\n0| 70%"
    assert log.printed((0, b"\n")) == "\n"
    assert list(log.streams[0].tail) == ["70%"]
    assert terminal.printed((0, b"50%\r")) == "0| 50%"
    assert terminal.printed((0, b"60%\r")) == "\r\x1b[K0| 60%"
    assert terminal.printed((0, b"\n")) == "\r\x1b[K0| 60%\n"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_windows_line_end_may_come_in_pieces(log, terminal, rank):
    assert log.printed((rank, b"line\r"), (rank, b"\n")) == f"{rank}| line\n"
    assert terminal.printed((rank, b"line\r"), (rank, b"\n")).endswith(f"{rank}| line\n")


def test_without_prefix_every_byte_of_a_bar_is_passed_on(plain):
    assert plain.printed((0, b"10%\r20%\r")) == "10%\r20%\r"
    assert plain.printed((0, b"\r30%")) == "\r30%"
    assert plain.printed((1, b"news\n"), (0, b"\r40%\r")) == "\nnews\n\r40%\r"
    assert plain.printed((1, b"more\n"), (0, b"done\r\n")) == "\nmore\ndone\r\n"
    assert plain.printed((0, b"next\n")) == "next\n"


def test_without_a_reader_output_is_kept_and_nothing_raised(terminal):
    nobody, fd = os.pipe()
    os.close(nobody)
    stream = output_mux.Stream(0, fd, terminal.screen, live=True)
    stream.feed(b"lost\nunfinished")
    stream.close()
    terminal.screen.finish()
    os.close(fd)
    assert isinstance(terminal.screen.error, BrokenPipeError)
    assert list(stream.tail) == ["lost", "unfinished"]


def test_windows_line_ends(log):
    assert log.printed((1, b"a\r\nb\r\n")) == "1| a\n1| b\n"


def test_empty_lines_and_broken_text(log):
    log.streams[1].feed(b"\n\xff\n")
    assert os.read(log.read_fd, 100) == b"1| \n1| \xff\n"
    assert list(log.streams[1].tail) == ["", "\ufffd"]


def test_a_last_line_without_an_end_gets_one(log):
    log.streams[1].feed(b"last words")
    log.streams[1].close()
    log.streams[1].close()
    assert log.printed() == "1| last words\n"


def test_endless_lines_are_cut(log, monkeypatch):
    monkeypatch.setattr(output_mux, "_LONGEST_LINE_NBYTES", 60_000)
    log.streams[1].feed(b"x" * 70_000)
    assert len(os.read(log.read_fd, 1 << 20)) == 70_004
    assert log.streams[1].rest == b""


def test_without_a_prefix_endless_lines_are_cut_only_for_another_line(plain, monkeypatch):
    monkeypatch.setattr(output_mux, "_LONGEST_LINE_NBYTES", 4)
    for rank in range(2):
        assert plain.printed((rank, b"first"), (rank, b"again"), (rank, b"end\n")) == "firstagainend\n"
    assert plain.printed((0, b"first"), (1, b"one\n"), (0, b"again\n")) == "first\none\nagain\n"
    assert plain.printed((1, b"Traceback (most recent call last):\n"), (1, b"  longer")).endswith("  longer")
    assert plain.streams[1].rest == b""


def test_the_tail_is_what_was_left_on_the_lines(log):
    log.streams[0].feed(b"\r10%\r20%\nTraceback\n  File\n")
    assert list(log.streams[0].tail) == ["20%", "Traceback", "  File"]
    log.printed()
    log.streams[0].feed(b"line\n" * 1000)
    assert len(log.streams[0].tail) == 200


def test_the_unfinished_line_is_ended_before_something_else_is_printed(terminal):
    terminal.streams[0].feed(b"50%")
    terminal.screen.finish()
    terminal.screen.finish()
    assert terminal.printed() == "0| 50%\n"


def test_hidden_output_leaves_its_last_lines():
    hidden = output_mux.Stream(1, -1, None)
    hidden.feed(b"line\nrest")
    hidden.close()
    assert list(hidden.tail) == ["line", "rest"]


def test_prefixes_are_aligned_and_coloured():
    assert output_mux.Front(1).of([3]) == b"3| "
    assert output_mux.Front(2).of([3]) == b" 3| "
    assert output_mux.Front(3).of([4, 2, 3]) == b"2-4| "
    assert output_mux.Front(1, colour=True).of([0]) == b"\x1b[36m0|\x1b[0m "


def test_one_screen_for_one_place(tmp_path):
    def make(tty):
        return output_mux.Screen(tty, output_mux.Front(1))

    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        first, second = output_mux.screens(out.fileno(), err.fileno(), make)
        assert first is not second
        first, second = output_mux.screens(out.fileno(), out.fileno(), make)
        assert first is second
