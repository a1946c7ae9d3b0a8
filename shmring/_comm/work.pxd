
from .._arrays.operands cimport Operand
from .._engine.engine cimport Engine
from .._engine.progress cimport Issued


cdef class Work(Issued):
    cdef Engine engine
    cdef Operand a, b       # what the arrays' buffers are held by
    cdef object answer      # what the call returns
    cdef object refusal     # the error by which this rank alone refused it after it was issued
    cdef int notice_fd      # readable once the call is finished; -1 until somebody wants it
