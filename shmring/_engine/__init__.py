"""Run calls to their end, in the foreground or in the background, and report errors.

engine: Engine, one communicator on one rank
  |-- state         the segment's format; its memory (Group); the liveness thread, by which other ranks see
  |                 that this one is alive; the calls of other hosts; the warning about a long wait
  |-- wait          a call in the foreground: pause, yield, sleep, check for dead and late ranks
  |-- progress      calls in the background, and the thread that steps them
        |-- queue   the calls of one communicator, in the order of issue or by priority

A call arrives as a Call of `_core/group`. Its `enter` and `step` have been set by `Group.choose_algorithm`:
`_algorithms/choice` on one host, `_internode/choice` over several.
"""
