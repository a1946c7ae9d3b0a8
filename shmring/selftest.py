"""`python -m shmring.selftest` is the command `shmring selftest`."""

import sys

from .tools.command import main

if __name__ == "__main__":
    raise SystemExit(main(["selftest", *sys.argv[1:]]))
