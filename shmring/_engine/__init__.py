"""Runs calls to their end, at once or in the background, and says what went wrong.

engine: Engine, one communicator on one rank
  |-- state             its memory (Group), its settings, the tables of names that Python reads
  |-- wait              a call in the foreground: pause, yield, sleep, look for dead and late ranks
  |-- blame             which rank keeps this one waiting: for errors, and for the warning about a long wait
  |-- progress          calls in the background, and the thread that steps them
  |     |-- queue           the calls of one communicator, in the order of issue or by priority
  |-- liveness_thread   the parked thread by which other ranks see that this one lives

trace_buffer            what an engine did, for `Comm.trace`

A call arrives as a Call of `_core/group`; `_internode/data_movement` chooses the functions that run it.
"""
