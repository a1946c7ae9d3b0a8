"""The public class Comm, one facet in each file, and the objects that its methods return.

Comm  ->  Messages        ->  FusedCollectives  ->  VectorCollectives  ->  Collectives
comm      point_to_point      fused                 vector                 collectives
            |                                                                |
          Endpoint                                                         Work
          endpoint                                                         work

-> stands for: inherits from. Messages has an Endpoint, which owns all state of its messages. A collective in
the background is a Work.

init              a world -> a Comm
awaitable         waiting for a Work or a Transfer in a coroutine
objects           frames: pickled objects as bytes, for the `*_object` methods
ops               the reductions by name
error_feedback    rounding errors of compressed transfers, added to the next call
bucketer          Bucketer: gradients reduced bucket by bucket
trace_file        Trace: the calls of the ranks over time, as a file for Perfetto

A method allocates the result, takes the arrays (`_arrays/operands`), describes the call, and has the
engine run it (`_engine/engine`).
"""
