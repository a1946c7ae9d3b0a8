"""What is said when something takes long or goes wrong.

segment -> flight_recorder -> describe -> failures        the exception that a rank raises
                                 |
                                 +------> stall_warning   the line that is logged of a long wait
                                 |            ^
                             stacks ----------+           Python stacks of this and of other ranks

`flight_recorder` writes what this rank does and waits for, and reads the same of other ranks. It checks what
it reads: another process may have written anything. `describe` puts that into words.
"""
