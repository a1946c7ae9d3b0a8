"""Command lines of the examples: arguments whose errors are one line, and progress."""

import argparse
import os
import sys


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that says what is wrong, with exit status 2."""

    def __init__(self, **keywords):
        super().__init__(allow_abbrev=False, **keywords)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (more with --help)\n")


def at_least(least):
    """Return a type for add_argument(type=…): a whole number, at least `least`."""

    def parse(text):
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parse


def positive(text):
    """Convert a number above 0, for add_argument(type=…)."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def with_progress(count, rank, doing, unit, note=str):
    """Count to `count`: on rank 0 with a progress bar on a terminal, or in some ten lines without tqdm.

    note: called after each step; returns the text after the bar.
    """
    if rank > 0:
        yield from range(count)
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for number in range(count):
            yield number
            if (number + 1) % max(1, count // 10) == 0 or number + 1 == count:
                print(f"{doing}: {unit} {number + 1}/{count} {note()}".rstrip(), file=sys.stderr)
        return
    # The stderr of a rank under shmrun is a pipe. shmrun sets TQDM_DISABLE where it has no terminal itself.
    only_there = {} if "SHMRING_ENDED_FD" in os.environ else {"disable": None}
    with tqdm(total=count, desc=doing, unit=unit, **only_there) as bar:
        for number in range(count):
            yield number
            bar.set_postfix_str(note(), refresh=False)
            bar.update()
