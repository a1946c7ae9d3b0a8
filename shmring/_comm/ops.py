"""The reductions by name."""

import enum


class Op(enum.StrEnum):
    """Reduction operations. Every call also accepts the plain string.

    SUM, PROD, MIN and MAX. AVG: the sum divided by the number of ranks before the only rounding, of floats
    and complex numbers. BAND, BOR and BXOR: bitwise, of bools and integers. LAND, LOR and LXOR: logical, of
    every dtype; the result is 0 or 1. MIN and MAX of floats are NaN if a value is NaN; complex numbers have
    neither. SUM of bools is LOR.

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
