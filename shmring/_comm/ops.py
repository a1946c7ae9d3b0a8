"""The reductions by name."""

import enum


class Op(enum.StrEnum):
    """Reduction operations. Every call also accepts the plain string.

    Examples
    --------
    >>> comm.all_reduce(3, shmring.Op.MAX) == comm.all_reduce(3, "max")
    True
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    LAND = "land"
    LOR = "lor"
    LXOR = "lxor"
