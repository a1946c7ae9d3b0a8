"""Memory that a process can read, and no other process through the kernel."""

import ctypes
from pathlib import Path

import numpy as np
import pytest


def _lines():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "[vvar]" in line]


needs_page_with_the_time = pytest.mark.skipif(not _lines(), reason="there is no such page")


def page_with_the_time():
    """Return the kernel's page with the time."""
    address = int(_lines()[0].partition("-")[0], 16)
    return np.frombuffer((ctypes.c_char * 4096).from_address(address), "u1")
