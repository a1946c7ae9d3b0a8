# Descriptions of messages: the kind of the items, 56 bits that both ends compare; the Status that a receiver gets; the
# texts of errors.

import operator

cimport cython
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint32_t, uint64_t

from .._arrays.operands cimport Operand
from .._core.group cimport OPAQUE, SR_DTYPES
from .._core.kernels cimport dtype_nbytes
from .matching cimport ANY, Message

from .._engine import state
from ..errors import Mismatch, Truncated

cdef enum:
    MOST_ITEM_NBYTES = (1 << 23) - 1
    FORTRAN = 1 << 8         # bits of a kind above the dtype's number: memory order, then for opaque items
    ITEM_SHIFT = 9           # ... their size
    SIGNATURE_SHIFT = 32     # ... and 24 bits of their signature

cdef int64_t MOST_TAG = (<int64_t> 1 << 31) - 1


cdef uint64_t kind_of(Operand *operand) except? 0:
    cdef uint64_t nbytes, signature
    cdef uint64_t kind = operand.dtype | (FORTRAN if operand.fortran else 0)
    if operand.dtype != OPAQUE:
        return kind
    nbytes, signature = operand.items.nbytes, operand.items.signature & 0xffffff
    if nbytes > MOST_ITEM_NBYTES:
        raise ValueError(f"one item of x has {nbytes} bytes; items of a message may have {MOST_ITEM_NBYTES}")
    return kind | nbytes << ITEM_SHIFT | signature << SIGNATURE_SHIFT


cdef size_t item_nbytes(uint64_t kind) noexcept:
    cdef uint32_t dtype = <uint32_t> kind & 0xff
    if dtype == OPAQUE:
        return max(kind >> ITEM_SHIFT & MOST_ITEM_NBYTES, <uint64_t> 1)
    return dtype_nbytes(dtype) if dtype < SR_DTYPES else 1


cdef object dtype_name(uint64_t kind):
    cdef uint32_t dtype = <uint32_t> kind & 0xff
    return state.DTYPES[dtype] if dtype < SR_DTYPES else None


cdef str described(uint64_t kind, size_t nbytes):
    cdef uint32_t dtype = <uint32_t> kind & 0xff
    if dtype == OBJECT:
        return "an object"
    name = dtype_name(kind) or f"{item_nbytes(kind)}-byte items"
    return f"{name}[{nbytes // item_nbytes(kind)}]" + (" in Fortran order" if kind & FORTRAN else "")


@cython.final
@cython.freelist(16)
cdef class Status:
    """A received or waiting message: `source`, `tag`, `count` (elements), `nbytes`, `dtype` (its name, None for an
    opaque dtype)."""

    @property
    def dtype(self):
        return dtype_name(self.kind)

    def __repr__(self):
        return (f"Status(source={self.source}, tag={self.tag}, count={self.count}, nbytes={self.nbytes}, "
                f"dtype={self.dtype!r})")


cdef Status status_of(Message *message):
    cdef Status status = Status.__new__(Status)
    status.source = message.source
    status.tag = message.came_tag
    status.nbytes = message.came_nbytes
    status.count = message.came_nbytes // item_nbytes(message.came_kind)
    status.kind = message.came_kind
    return status


cdef int64_t tag_number(object tag, bint may_be_any) except -2:
    cdef int64_t number
    try:
        number = tag if PyLong_CheckExact(tag) else operator.index(tag)
    except TypeError:
        raise TypeError(f"tag is {tag!r}; it must be an integer") from None
    except OverflowError:
        number = -3
    if number < 0 and not (may_be_any and number == ANY) or number > MOST_TAG:
        raise ValueError(f"tag is {tag!r}; tags are 0 to {MOST_TAG}" + (", or ANY_TAG" if may_be_any else ""))
    return number


# Return the name of the call that posted the message.
cdef str op_of(Message *message):
    return "send" if message.is_send else "probe" if message.is_probe else "recv"


cdef str pattern_text(Message *message):
    tag = "any tag" if message.tag == ANY else f"tag {message.tag}"
    if message.is_send:
        return f"{op_of(message)} to rank {message.peer} with {tag}"
    source = "any rank" if message.peer == ANY else f"rank {message.peer}"
    return f"{op_of(message)} from {source} with {tag}"


cdef object mismatch(Message *message, int rank, str what_now):
    came = described(message.came_kind, message.came_nbytes)
    wanted = "an object" if message.kind == OBJECT else described(message.kind, message.nbytes)
    if came == wanted:
        came += " of another dtype"
    text = (f"rank {message.source} sent {came} with tag {message.came_tag}, rank {rank} receives {wanted}: "
            f"{what_now}; both ends need the same dtype")
    return Mismatch(text, rank=message.source, op="recv", calls=(f"send({came})", f"recv({wanted})"))


cdef object truncated(Message *message, int rank):
    return Truncated(
        f"the message from rank {message.source} with tag {message.came_tag} is "
        f"{described(message.came_kind, message.came_nbytes)}, rank {rank} has room for "
        f"{described(message.kind, message.nbytes)}: this message is lost; probe() returns the size beforehand",
        rank=message.source, op="recv")
