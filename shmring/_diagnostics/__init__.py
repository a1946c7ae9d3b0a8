"""Reports and errors for calls that take long or fail.

segment -> flight_recorder -> describe -> failures        the exception that a rank raises
                                 |
                                 +------> stall_warning   the line that is logged about a long wait
                                 |            ^
                             stacks ----------+           Python stacks of this rank and of other ranks

`flight_recorder` publishes the waits of this rank, and reads the calls and waits of all ranks. `_core/group`
records the calls. `flight_recorder` checks what it reads, because another process may have written anything.
`describe` formats it for people.
"""
