"""The public class Comm, one facet a file, and what its methods return.

Comm  ->  Messages        ->  Endpoint  ->  FusedCollectives  ->  VectorCollectives  ->  Collectives
comm      point_to_point      endpoint      fused                 vector                 collectives

-> stands for: inherits from.

init              a world -> a Comm
work, awaitable   Work: a collective in the background; waiting for it in a coroutine
objects           pickled objects for the `*_object` methods
ops               the reductions by name
error_feedback    what rounding on the wire lost, kept for the next call
bucketer          Bucketer: gradients reduced bucket by bucket
trace_file        Trace: what the ranks did, as a file for Perfetto

A method makes room for the result, takes the arrays (`_arrays/operands`), describes the call, and has the
engine run it (`_engine/engine`).
"""
