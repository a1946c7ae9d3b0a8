
from .._core.group cimport Call
from .state cimport State


cdef int await_same_call(State state, Call *c, object notifications) except -1
cdef tuple mismatched_calls(State state)
cdef tuple find_remote_mismatch(State state, Call *c, object notifications)
cdef tuple last_call_of(State state, int rank, object notifications)
cdef int most_suspect(State state, Call *c, object notifications) except -1
