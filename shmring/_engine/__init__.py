"""Run calls to their end, in the foreground or in the background, and report errors.

engine: Engine, one communicator on one rank
  |-- state             its memory (Group), its settings, the tables of names that Python reads
  |-- wait              a call in the foreground: pause, yield, sleep, check for dead and late ranks
  |-- blame             the rank that this one waits for: for errors, and for the warning about a long wait
  |-- progress          calls in the background, and the thread that steps them
  |     |-- queue           the calls of one communicator, in the order of issue or by priority
  |-- liveness_thread   the parked thread by which other ranks see that this one is alive

trace_buffer            the recorded calls of an engine, for `Comm.trace`

A call arrives as a Call of `_core/group`; `_internode/data_movement` chooses the functions that run it.
"""
