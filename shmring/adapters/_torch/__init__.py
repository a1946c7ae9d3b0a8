r"""The parts of the torch backend; `shmring.adapters.torch` is its public interface.

torch  --entry point-->  entry  -->  adapters/torch  -->  meeting: ranks find each other in torch's store
                           |           |
        "gloo" -->  replacing          |
                      |  `-- unfit     |
                    replacement        |
                           \           |
             compressed -> buckets -> group: ProcessGroup
                                        |-- _compiled   collectives of one dense tensor, in C
                                        |-- fields      where _compiled reads the fields of torch's options
                                        |-- overloads   all forms of a call -> that with options
                                        |-- tensors     a tensor -> memory for a collective
                                        |-- derived     groups of the ranks of other groups
                                        |-- parent      ends the meeting if a member dies
                                        |-- reconfiguring  other members, from torch 2.14 on
                                        |-- work        what an asynchronous call returns
                                        |-- sparse      sums of sparse tensors
                                        |-- monitored   monitored_barrier

`entry` loads neither NumPy nor the engine, because `import torch` runs it.
"""
