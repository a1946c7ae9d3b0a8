"""Settings: the valid values of each SHMRING_* variable, and the errors for others."""

import dataclasses
import os

import pytest

from shmring._config.settings import Settings, Survey

KEY = "0123456789abcdef0123456789abcdef"


def settings(**variables):
    return Settings.from_environment({f"SHMRING_{name}": value for name, value in variables.items()})


def test_nothing_set_gives_the_defaults():
    assert settings() == Settings()
    assert settings().timeout_s == 1800.0
    assert settings().segment == "memfd"


def test_empty_means_unset():
    fields = ("RANK", "SIZE", "TIMEOUT", "CHUNK", "SEGMENT", "KEY", "KEY_FILE", "ISA")
    assert settings(**dict.fromkeys(fields, "")) == Settings()


def test_the_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("SHMRING_TIMEOUT", "2.5")
    assert Settings.from_environment().timeout_s == 2.5


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("CHUNK", "65536", "chunk_nbytes", 65536),
        ("CHUNK", "64K", "chunk_nbytes", 65536),
        ("CHUNK", "64k", "chunk_nbytes", 65536),
        ("CHUNK", "1M", "chunk_nbytes", 1 << 20),
        ("CHUNK", "64", "chunk_nbytes", 64),
        ("DEPTH", "4", "depth", 4),
        ("TIMEOUT", "0.5", "timeout_s", 0.5),
        ("STALL", "2.5", "stall_s", 2.5),
        ("STALL", "0", "stall_s", 0.0),
        ("SEGMENT", "POSIX", "segment", "posix"),
        ("ISA", "avx2", "isa", "avx2"),
        ("ALGORITHM", "ring", "algorithm", "ring"),
        ("PATH", "far", "path", "far"),
        ("NODE", " a ", "node", "a"),
        ("PORT", "29500", "port", 29500),
        ("PORTS", "25000-25999", "ports", (25000, 25999)),
        ("PORTS", "25000-25000", "ports", (25000, 25000)),
        ("ADDR", "job 7", "addr", "job 7"),
        ("KEY", KEY, "key", KEY.encode()),
        ("SINGLE_COPY", "auto", "single_copy_nbytes", None),
        ("SINGLE_COPY", "off", "single_copy_nbytes", 0),
        ("SINGLE_COPY", "256K", "single_copy_nbytes", 256 << 10),
        ("TRACE", "/tmp/trace.json", "trace", "/tmp/trace.json"),
        ("WIRE_SLICE", "4K", "wire_slice_nbytes", 4096),
    ],
)
def test_good_values_are_taken(name, text, field, value):
    assert getattr(settings(**{name: text}), field) == value


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("RANK", "-1", "whole number"),
        ("RANK", "1.0", "whole number"),
        ("RANK", "9" * 5000, "whole number"),
        ("CHUNK", "9" * 5000, "a multiple of 64 bytes from 64 to"),
        ("PORTS", "1-" + "9" * 5000, "first-last"),
        ("RANK", "²", "whole number"),
        ("SIZE", "0", "from 1"),
        ("SIZE", "100000", "to 4096"),
        ("PORT", "65536", "65535"),
        ("PORTS", "25000", "first-last"),
        ("PORTS", "25001-25000", "first-last"),
        ("PORTS", "0-10", "first-last"),
        ("PORTS", "10-65536", "first-last"),
        ("PORTS", "a-b", "first-last"),
        ("TIMEOUT", "0", "seconds"),
        ("TIMEOUT", "-3", "seconds"),
        ("TIMEOUT", "nan", "seconds"),
        ("TIMEOUT", "inf", "seconds"),
        ("TIMEOUT", "soon", "seconds"),
        ("SEGMENT", "mmap", "memfd, posix"),
        ("CHUNK", "64G", "such as"),
        ("CHUNK", "100", "a multiple of 64 bytes"),
        ("CHUNK", "M", "such as"),
        ("CHUNK", "0", "such as"),
        ("DEPTH", "1", "from 2"),
        ("MESSAGE_RING", "1000", "a power of two from 512 to"),
        ("MESSAGE_RING", "many", "a power of two from 512 to"),
        ("WIRE_SLICE", "64", "4096 to"),
        ("ISA", "mmx", "avx512"),
        ("ALGORITHM", "magic", "direct"),
        ("PATH", "middle", "near"),
        ("SINGLE_COPY", "on", "auto, off, or a multiple of 64 bytes from 64 to"),
        ("SINGLE_COPY", "100", "auto, off, or a multiple of 64 bytes"),
        ("NODE", "a\nb", "printable"),
        ("NODE", "x" * 65, "64 bytes"),
        ("KEY", "short", "16 to 1024"),
    ],
)
def test_wrong_values_are_errors_that_name_variable_value_and_what_is_allowed(name, text, allowed):
    with pytest.raises(ValueError, match=f"SHMRING_{name}") as caught:
        settings(**{name: text})
    assert allowed in str(caught.value)
    assert name == "KEY" or repr(text[:64]) in str(caught.value)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "SHMRING_SIZE is not"),
        ({"SIZE": "2"}, "SHMRING_RANK is not"),
        ({"RANK": "2", "SIZE": "2"}, "allowed: 0 to 1"),
        ({"KEY": KEY, "KEY_FILE": "/nowhere"}, "both set"),
    ],
)
def test_variables_have_to_fit_together(variables, expected):
    with pytest.raises(ValueError, match=expected):
        settings(**variables)


def test_key_is_never_shown():
    assert KEY not in repr(settings(KEY=KEY))
    with pytest.raises(ValueError, match="characters") as caught:
        settings(KEY="secret?")
    assert "secret?" not in str(caught.value)


def test_key_file_of_ones_own_is_read(tmp_path):
    path = tmp_path / "key"
    path.write_text(KEY + "\n")
    path.chmod(0o600)
    assert settings(KEY_FILE=str(path)).key == KEY.encode()


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_key_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(mode)
    with pytest.raises(ValueError, match=f"{mode:04o}.*0600"):
        settings(KEY_FILE=str(path))


def test_key_file_that_is_missing_empty_or_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        settings(KEY_FILE=str(tmp_path / "missing"))
    empty = tmp_path / "empty"
    empty.touch(0o600)
    with pytest.raises(ValueError, match="empty"):
        settings(KEY_FILE=str(empty))
    descriptors = os.listdir("/proc/self/fd")
    with pytest.raises(ValueError, match="Is a directory"):
        settings(KEY_FILE=str(tmp_path))
    assert os.listdir("/proc/self/fd") == descriptors
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo, 0o600)  # reading it would wait for ever
    with pytest.raises(ValueError, match="0600"):
        settings(KEY_FILE=str(fifo))


@pytest.mark.parametrize("moment", ["open", "stat", "fstat"])
def test_a_key_file_is_checked_and_read_by_one_descriptor(tmp_path, monkeypatch, moment):
    path, other = tmp_path / "key", tmp_path / "other"
    path.write_text(KEY)
    path.chmod(0o600)
    other.write_text("of somebody who may write to the directory")
    other.chmod(0o644)
    real = getattr(os, moment)

    def then_replace(*arguments, **keywords):
        result = real(*arguments, **keywords)
        if other.exists() and arguments[0] != str(other):
            other.rename(path)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(os, moment, then_replace)
        key = settings(KEY_FILE=str(path)).key
    assert key == KEY.encode()


def test_a_key_file_may_be_a_link(tmp_path):
    path, link = tmp_path / "key", tmp_path / "link"  # as in a volume of Kubernetes
    path.write_text(KEY)
    path.chmod(0o600)
    link.symlink_to(path)
    assert settings(KEY_FILE=str(link)).key == KEY.encode()


def test_settings_do_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings().depth = 3


def surveyed(**variables):
    return Survey.of({"PATH": "/bin", **{f"SHMRING_{name}": text for name, text in variables.items()}})


def test_a_survey_tells_every_wrong_one_once():
    found = surveyed(DEPTH="x", CHUNK="7", TIMEOUT="1", ISA="best", RANK="3", SIZE="2")
    assert sorted(text.partition(" ")[0] for text in found.wrong) == [
        "SHMRING_CHUNK", "SHMRING_DEPTH", "SHMRING_ISA", "SHMRING_RANK",
    ]  # fmt: skip
    assert found.unknown == {}
    assert found.given["SHMRING_TIMEOUT"] == "1"
    assert "PATH" not in found.given
    assert surveyed(RANK="0", SIZE="x").wrong == [
        "SHMRING_SIZE is 'x'; allowed: a whole number from 1 to 4096"
    ]
    assert len(surveyed(RANK="0").wrong) == 1
    assert surveyed() == Survey({}, [], {})


def test_a_survey_goes_on_where_a_message_names_another_variable():
    found = surveyed(KEY=KEY, KEY_FILE="/nowhere", NODE="a\nSHMRING_DEPTH", DEPTH="0")
    assert any("both set" in text for text in found.wrong)
    assert any(text.startswith("SHMRING_NODE is") for text in found.wrong)


def test_a_survey_knows_the_names_there_are():
    found = surveyed(TIMOUT="3", SEGMENTS="posix", WEATHER="fine", KEY=KEY, KEYS=KEY, KEY_FILE="")
    assert found.unknown == {
        "SHMRING_KEYS": "SHMRING_KEY",
        "SHMRING_TIMOUT": "SHMRING_TIMEOUT",
        "SHMRING_SEGMENTS": "SHMRING_SEGMENT",
        "SHMRING_WEATHER": None,
    }
    assert KEY not in repr(found)
