"""The public class Comm, one facet in each file, and the objects that its methods return.

Comm                 comm
Allocation           allocation            arrays that all ranks of the host map (`_arrays/allocator`)
Messages             point_to_point        has an Endpoint: its messages under way, and what came (endpoint)
ObjectCollectives    object_collectives    of pickled objects, as frames (`_arrays/objects`)
FusedCollectives     fused                 of many arrays as one
VectorCollectives    vector                of pieces of different lengths
Collectives          collectives           in the background: a Work (work); their checks: `arguments`

Each class inherits from the one below it.

init              a world -> a Comm
awaitable         waiting for a Work or a Transfer in a coroutine
ops               the reductions by name
error_feedback    rounding errors of compressed transfers, added to the next call
bucketer          Bucketer: gradients reduced bucket by bucket
trace_file        Trace: the calls of the ranks over time, as a file for Perfetto

A method allocates the result, takes the arrays (`_arrays/operands`), describes the call, and has the
engine run it (`_engine/engine`).
"""
