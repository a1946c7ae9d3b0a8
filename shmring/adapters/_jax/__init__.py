"""The parts of the JAX adapter; `shmring.adapters.jax` is its public interface.

adapters/jax: pytrees, arguments --> call: a collective, its shapes, its gradient
     |                                 |
     +--> xla: custom calls in the compiled program, ordered by tokens; `jit`
     |     |        program --XLA--> _compiled: the handler, in C --> Call.run --> comm
     |     +--> errors: exceptions of the handler on their way to the caller
     |
     +--> callback: the same through host callbacks of Python, where XLA's interface is missing
"""
