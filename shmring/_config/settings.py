"""Settings from the environment: the only module that reads SHMRING_* variables.

Each variable is checked here, so that a typing mistake is an error that names the variable, not a slow or a
hanging job.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

SEGMENTS = ("memfd", "posix")  # the default comes first
ALGORITHMS = (
    *("auto", "direct", "ring", "bidirectional_ring", "halving_doubling"),
    *("tree", "double_tree", "master"),
)
LEAST_SINGLE_COPY_NBYTES = 64
PATHS = ("auto", "near", "far", "slots", "single_copy")
REPLACED = ("gloo",)  # backends of torch.distributed
ISAS = ("auto", "avx512", "avx2", "sse2", "neon", "scalar")  # as sr_kernels_isas() names them
MIN_KEY_CHARACTERS = 16
MAX_RANKS = 4096  # SR_MAX_RANKS
FIRST_PORT, LAST_PORT = 20000, 29999  # chosen ports lie below those that kernels give to outgoing connections
MAKE_A_KEY = 'python -c "import secrets; print(secrets.token_hex())"'  # in messages
CACHE_LINE_NBYTES = 64  # SR_CACHE_LINE of src/layout.h
DEFAULT_PORT = 21717  # below the ports that kernels assign to outgoing connections
_LINK_LOCAL = re.compile(r"^(\[?fe80:[^]%]*:[^]%]*)(%[^]]*)?", re.IGNORECASE)


def _wrong(name: str, text: str, allowed: str) -> ValueError:
    return ValueError(f"{name} is {text[:64]!r}; allowed: {allowed}")


def whole_number(text: str) -> int | None:
    """Return the number if text is at most 30 ASCII digits, else None. No setting needs more digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 30 else None


def _integer(least: int, most: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        number = whole_number(text)
        if number is None or not least <= number <= most:
            raise _wrong(name, text, f"a whole number from {least} to {most}")
        return number

    return parse


def _range(least: int, most: int) -> Callable[[str, str], tuple[int, int]]:
    def parse(name: str, text: str) -> tuple[int, int]:
        first, last = map(whole_number, text.partition("-")[::2])
        if first is None or last is None or not least <= first <= last <= most:
            raise _wrong(name, text, f"first-last, such as 25000-25999, within {least} to {most}")
        return first, last

    return parse


def _size(least: int, most: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        digits, factor = text, 1
        if text[-1:].upper() in ("K", "M"):
            digits, factor = text[:-1], {"K": 1 << 10, "M": 1 << 20}[text[-1:].upper()]
        nbytes = (whole_number(digits) or 0) * factor
        if not least <= nbytes <= most or nbytes % CACHE_LINE_NBYTES:
            raise _wrong(
                name, text, f"a multiple of 64 bytes from {least} to {most}, such as 65536, 64K or 1M"
            )
        return nbytes

    return parse


def _size_or_off(least: int, most: int) -> Callable[[str, str], int | None]:
    def parse(name: str, text: str) -> int | None:
        if text.lower() in ("auto", "off"):
            return 0 if text.lower() == "off" else None
        try:
            return _size(least, most)(name, text)
        except ValueError as error:
            raise _wrong(name, text, f"auto, off, or {str(error).partition('allowed: ')[2]}") from None

    return parse


def _power_of_two(least: int, most: int) -> Callable[[str, str], int]:
    def parse(name: str, text: str) -> int:
        with contextlib.suppress(ValueError):
            nbytes = _size(least, most)(name, text)
            if nbytes & (nbytes - 1) == 0:
                return nbytes
        raise _wrong(name, text, f"a power of two from {least} to {most}, such as 512 or 64K")

    return parse


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds <= 1e9:  # also refuses nan
        raise _wrong(name, text, "seconds, more than 0 (such as 0.5 or 1800)")
    return seconds


def _seconds_or_none(name: str, text: str) -> float:
    try:
        return 0.0 if float(text) == 0 else _seconds(name, text)
    except ValueError:
        raise _wrong(name, text, "seconds (such as 60), or 0 for none") from None


def _choice(allowed: tuple[str, ...]) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if text.lower() not in allowed:
            raise _wrong(name, text, ", ".join(allowed))
        return text.lower()

    return parse


def _text(most: int) -> Callable[[str, str], str]:
    def parse(name: str, text: str) -> str:
        if len(text.encode("utf-8", "surrogateescape")) > most or not text.isprintable():
            raise _wrong(name, text, f"printable text of at most {most} bytes")
        return text

    return parse


def _flag(name: str, text: str) -> bool:
    return _integer(0, 1)(name, text) == 1


def _setting(variable: str, parse: Callable[[str, str], Any], default: Any = None) -> Any:
    """Return a dataclass field. `parse` makes its value of the variable's text."""
    return field(default=default, metadata={"variable": variable, "parse": parse})


@dataclass(frozen=True)
class Settings:
    """The values of the SHMRING_* variables; None or "auto": not set."""

    rank: int | None = _setting("SHMRING_RANK", _integer(0, MAX_RANKS - 1))
    size: int | None = _setting("SHMRING_SIZE", _integer(1, MAX_RANKS))
    addr: str | None = _setting("SHMRING_ADDR", _text(256))
    port: int | None = _setting("SHMRING_PORT", _integer(1, 65535))
    # First and last port to listen on for ranks of other hosts.
    ports: tuple[int, int] | None = _setting("SHMRING_PORTS", _range(1, 65535))
    key: bytes | None = field(default=None, repr=False)  # of SHMRING_KEY or SHMRING_KEY_FILE
    node: str | None = _setting("SHMRING_NODE", _text(64))
    timeout_s: float = _setting("SHMRING_TIMEOUT", _seconds, 1800.0)
    stall_s: float = _setting("SHMRING_STALL", _seconds_or_none, 60.0)  # warn of a longer wait; 0: never
    segment: str = _setting("SHMRING_SEGMENT", _choice(SEGMENTS), "memfd")
    chunk_nbytes: int | None = _setting("SHMRING_CHUNK", _size(64, 1 << 30))
    depth: int | None = _setting("SHMRING_DEPTH", _integer(2, 4096))
    isa: str = _setting("SHMRING_ISA", _choice(ISAS), "auto")
    algorithm: str = _setting("SHMRING_ALGORITHM", _choice(ALGORITHMS), "auto")
    path: str = _setting("SHMRING_PATH", _choice(PATHS), "auto")
    # Least size of a single copy; 0: never.
    single_copy_nbytes: int | None = _setting(
        "SHMRING_SINGLE_COPY", _size_or_off(LEAST_SINGLE_COPY_NBYTES, 1 << 40)
    )
    trace: str | None = _setting("SHMRING_TRACE", _text(4096))
    # Descriptor of the file in which shmrun records the ranks that have ended.
    ended_fd: int | None = _setting("SHMRING_ENDED_FD", _integer(0, 2**31 - 1))
    # Restarts of this job by shmrun so far, for the script.
    restart: int = _setting("SHMRING_RESTART", _integer(0, 1_000_000), 0)
    # The process that has joined as this rank, for processes that it starts.
    joined: int | None = _setting("SHMRING_JOINED", _integer(1, 2**31 - 1))
    mpi4py: bool = _setting("SHMRING_MPI4PY", _flag, False)  # `import mpi4py` means shmring's stand-in
    # The backend of torch.distributed in whose place shmring stands.
    replaces: str | None = _setting("SHMRING_REPLACES", _choice(REPLACED))
    tuning: str = _setting("SHMRING_TUNING", _text(4096), "auto")  # "none", or a file; rank 0's value holds
    # Bytes sent between hosts at once; 0: as tuned; rank 0's value holds.
    wire_slice_nbytes: int = _setting("SHMRING_WIRE_SLICE", _size(4096, 1 << 28), 0)
    # 0: by the number of ranks; tests use small rings.
    message_ring_nbytes: int = _setting("SHMRING_MESSAGE_RING", _power_of_two(512, 1 << 30), 0)
    # First sequence number; tests start near the wrap of 32 and 64 bits.
    first_seq: int = _setting("SHMRING_FIRST_SEQ", _integer(0, (1 << 64) - 1), 0)

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, *, timeout_s: float = 1800.0
    ) -> Settings:
        """Read and check every variable. Raises ValueError, which names the first wrong variable.

        `timeout_s` is the timeout without SHMRING_TIMEOUT.
        """
        found: dict[str, Any] = {"key": _key(environ), "timeout_s": timeout_s}
        for setting in fields(cls):
            # An empty variable counts as unset: `SHMRING_CHUNK= python …` is how a shell removes one.
            variable = setting.metadata.get("variable", "")
            if variable and (text := environ.get(variable, "").strip()):
                found[setting.name] = setting.metadata["parse"](variable, text)
        settings = cls(**found)
        settings._check_rank_and_size()
        return settings

    def _check_rank_and_size(self) -> None:
        if (self.rank is None) != (self.size is None):
            missing, there = ("RANK", "SIZE") if self.rank is None else ("SIZE", "RANK")
            raise ValueError(
                f"SHMRING_{there} is set but SHMRING_{missing} is not: set both (shmrun does) or neither"
            )
        if self.rank is not None and self.size is not None and self.rank >= self.size:
            raise ValueError(
                f"SHMRING_RANK is {self.rank}; allowed: 0 to {self.size - 1}, as SHMRING_SIZE is {self.size}"
            )


def replaced_backend() -> str | None:
    """Return the value of SHMRING_REPLACES alone. Raises ValueError if it is wrong."""
    name = "SHMRING_REPLACES"
    return Settings.from_environment({name: os.environ.get(name, "")}).replaces


@dataclass(frozen=True)
class Survey:
    """All SHMRING_* variables, valid or not; the key is hidden."""

    given: dict[str, str]
    wrong: list[str]  # one message for each wrong variable
    unknown: dict[str, str | None]  # unknown names, each with the setting of the most similar name

    @classmethod
    def of(cls, environ: Mapping[str, str] = os.environ) -> Survey:
        """Read all variables. After each error, drop the wrong variable and read the others again."""
        given = {name: text for name, text in sorted(environ.items()) if name.startswith("SHMRING_")}
        left, wrong = _Asked(given), []
        while True:
            try:
                Settings.from_environment(left)
                break
            except ValueError as error:
                wrong.append(str(error))
                if not left.drop(re.findall("SHMRING_[A-Z_]+", str(error))):
                    break
        unknown = {name: _nearest(name, left.asked) for name in given if name not in left.asked}
        hidden = {name: "(hidden)" for name in given if "KEY" in name and name != "SHMRING_KEY_FILE"}
        return cls(given | hidden, wrong, unknown)


class _Asked(dict[str, str]):
    """An environment that records the variables read from it: these are all settings that exist."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(environ)
        self.asked: set[str] = set()

    def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
        self.asked.add(name)
        return super().get(name, default)

    def drop(self, names: list[str]) -> bool:
        """Drop variables; return whether one was set. Rank and size are dropped together."""
        pair = {"SHMRING_RANK", "SHMRING_SIZE"}
        found = self.keys() & set(names)
        for name in found | (pair & self.keys() if found & pair else set()):
            del self[name]
        return bool(found)


def _nearest(name: str, names: Collection[str]) -> str | None:
    from difflib import get_close_matches  # imported late: jobs need not load it

    prefix = "SHMRING_"
    found = get_close_matches(name.removeprefix(prefix), [one.removeprefix(prefix) for one in names], 1, 0.75)
    return prefix + found[0] if found else None


def address_text(host: str, port: int) -> str:
    """Format an address for `parse_address`: IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if host.count(":") > 1 and not host.startswith("[") else f"{host}:{port}"


def parse_address(name: str, text: str) -> tuple[str, int]:
    """Return (host, port) of "host:port", "host" or "[::1]:port". Raises ValueError if it is invalid."""
    if not isinstance(text, str):
        raise TypeError(f"{name} is {text!r}; it must be a text such as 'host:{DEFAULT_PORT}'")
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        is_whole = bool(bracket) and port[:1] in ("", ":")
        port, has_port = port[1:], bool(port)
    elif text.count(":") > 1:  # an IPv6 address without brackets cannot have a port
        host, port, has_port, is_whole = text, "", False, True
    else:
        host, colon, port = text.partition(":")
        has_port, is_whole = bool(colon), True
    if not is_whole or not _is_host(host):
        raise _wrong(name, text, "'host:port', 'host' or '[IPv6 address]:port', the host of rank 0")
    if host in ("0.0.0.0", "::"):
        raise _wrong(name, text, "an address of the host of rank 0, to which the others can connect")
    if _LINK_LOCAL.match(host) and "%" not in host:  # no kernel takes it
        raise _wrong(name, text, "a link-local address with an interface of this host, such as fe80::1%eth0")
    return host, _integer(1, 65535)(f"the port in {name}", port) if has_port else DEFAULT_PORT


def with_interface(address: str, interface: str) -> str:
    """Return the address, with this interface in place of its own if it is a link-local IPv6 address."""
    return _LINK_LOCAL.sub(lambda found: f"{found[1]}%{interface}", address)


def is_numeric(host: str) -> bool:
    """Return whether a host is given by its address, and not by a name."""
    import ipaddress  # here, since few programs need it

    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _is_host(text: str) -> bool:
    if ":" not in text:
        return re.fullmatch(r"[A-Za-z0-9._-]{1,253}", text) is not None
    import ipaddress  # here, since few programs need it

    with contextlib.suppress(ValueError):
        return bool(ipaddress.IPv6Address(text))
    return False


def _key(environ: Mapping[str, str]) -> bytes | None:
    """Return the key from SHMRING_KEY or the file that SHMRING_KEY_FILE names. Messages never show it."""
    text, path = environ.get("SHMRING_KEY", "").strip(), environ.get("SHMRING_KEY_FILE", "").strip()
    if text and path:
        raise ValueError("SHMRING_KEY and SHMRING_KEY_FILE are both set: set one of them")
    name = "SHMRING_KEY"
    if path:
        text, name = _read_key_file(path), f"the key in SHMRING_KEY_FILE ({path})"
    if not text:
        return None
    if not MIN_KEY_CHARACTERS <= len(text) <= 1024:
        raise ValueError(
            f"{name} has {len(text)} characters; allowed: {MIN_KEY_CHARACTERS} to 1024 "
            f"(make one: {MAKE_A_KEY})"
        )
    return text.encode("utf-8", "surrogateescape")


def _read_key_file(path: str) -> str:
    # Check the open file: after a check by path, another file could replace it. Symbolic links are allowed,
    # as Kubernetes volumes use them. O_NONBLOCK: opening a pipe would wait for its writer.
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)

    try:
        with open(path, encoding="utf-8", errors="surrogateescape", opener=opener) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ValueError(
                    f"SHMRING_KEY_FILE is {path!r} with mode {stat.S_IMODE(status.st_mode):04o} and owner "
                    f"{status.st_uid}; allowed: a file of your own with mode 0600 (chmod 600 {path})"
                )
            text = file.read(4096).strip()
    except OSError as error:
        raise ValueError(f"SHMRING_KEY_FILE is {path!r}, which cannot be read: {error.strerror}") from error
    if not text:
        raise ValueError(f"SHMRING_KEY_FILE is {path!r}, which is empty")
    return text
