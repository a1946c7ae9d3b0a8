"""`python -m shmring` is the command `shmring`."""

from .tools.command import main

raise SystemExit(main())
