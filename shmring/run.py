"""`python -m shmring.run` is the command `shmrun`."""

import sys

from ._launch.shmrun import main

if __name__ == "__main__":
    sys.exit(main())
