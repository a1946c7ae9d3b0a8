"""The reductions by name."""

import enum


class Op(enum.StrEnum):
    """Reduction operations. Every call also accepts the plain string."""

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
