"""`python -m shmring.selftest` is the command `shmring selftest`."""

from .tools.selftest import main

if __name__ == "__main__":
    raise SystemExit(main())
