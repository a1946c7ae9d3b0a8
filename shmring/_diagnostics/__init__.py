"""Reports and errors for calls that take long or fail.

segment -> flight_recorder -> describe -> failures        the exception that a rank raises
                                 |
                                 +------> stall_warning   the line that is logged about a long wait
                                 |            ^
                             stacks ----------+           Python stacks of this rank and of other ranks

`flight_recorder` writes the calls and waits of this rank, and reads those of other ranks. It checks what it
reads, because another process may have written anything. `describe` formats it for people.
"""
