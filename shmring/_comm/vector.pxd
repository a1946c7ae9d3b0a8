from .collectives cimport Collectives


cdef class VectorCollectives(Collectives):
    pass


# Run a collective of pieces that differ in length, or issue it. Return its result or its Work.
cdef object run_vector(Collectives comm, int kind, object x, object root, object out, object like, object async_op,
                       object timeout)
