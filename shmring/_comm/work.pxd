
from .._arrays.operands cimport Operand
from .._engine.engine cimport Engine
from .._engine.progress cimport Issued


cdef class Work(Issued):
    cdef Engine engine
    cdef Operand a, b       # hold the arrays' buffers
    cdef object answer      # return value of the call
    cdef object refusal     # error by which only this rank refused the call after it was issued
    cdef int notice_fd      # readable once the call is finished; -1 until requested
