"""`python -m shmring` is the command `shmring`. May know: command."""

from .tools.command import main

raise SystemExit(main())
