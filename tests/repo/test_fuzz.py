"""The parsers give a value or BadFrame for any bytes."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring._bootstrap import handshake
from shmring._bootstrap.handshake import BadFrame
from tests.repo import fuzz_frames


@given(st.one_of(st.binary(max_size=400), st.binary(min_size=2030, max_size=2060)))
def test_no_bytes_confuse_the_parsers(data):
    fuzz_frames.one_input(data)


def test_the_fuzzer_begins_with_what_is_valid():
    frames = [handshake.MAGIC + seed for seed in fuzz_frames.seeds()[:6]]
    for frame in frames:
        valid = 0
        for parser in fuzz_frames.PARSERS:
            try:
                fuzz_frames.check(parser(frame))
                valid += parser is not handshake.kind_of
            except BadFrame:
                pass
        assert valid == 1


def test_a_parser_that_raises_something_else_is_found(monkeypatch):
    monkeypatch.setattr(fuzz_frames, "PARSERS", (lambda packet: packet[300],))
    with pytest.raises(IndexError):
        fuzz_frames.one_input(b"x")


@pytest.mark.slow
def test_a_short_run_of_the_fuzzer():
    pytest.importorskip("atheris", reason="needs atheris (pip install atheris; wheels for x86-64 Linux)")
    command = [sys.executable, fuzz_frames.__file__, "-runs=20000", "-seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Done 20000 runs" in done.stderr
