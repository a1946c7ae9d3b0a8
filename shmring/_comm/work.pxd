from .._arrays.operands cimport Operand
from .._engine.engine cimport Engine
from .._engine.progress cimport Issued


cdef class Work(Issued):
    cdef Engine engine
    cdef Operand a, b       # hold the arrays' buffers
    cdef object number, number_type   # array of shape () and the type of its result, if the call reduces a number
    cdef object return_value
    cdef object refusal     # error by which only this rank refused the call after it was issued
    cdef int notice_fd      # readable once the call is finished; -1 until requested

    cdef int finish(self) except -1
    cdef void let_go(self) noexcept


cdef object number_of(object array, type kind)
