# The arguments of the collectives: which ones a kind takes, what a call has of them, and their checks.

from cpython.complex cimport PyComplex_Check
from cpython.float cimport PyFloat_Check
from cpython.long cimport PyLong_Check
from cpython.number cimport PyNumber_Index
from libc.stdint cimport uint16_t, uint32_t, uint64_t

from .._arrays.operands cimport (
    Operand, can_read_while_writing, dtype_name, fill_items_of, has_items_of, item_count,
)
from .._core cimport numpy_api as cnp
from .._core.group cimport (
    ALL_REDUCE, BROADCAST, EXSCAN, GATHER, MOST_PRIORITY, REDUCE, SCAN, SCATTER, Call, is_joined, mixed,
)


cdef inline bint is_rooted(int kind) noexcept:
    return kind == BROADCAST or kind == REDUCE or kind == SCATTER or kind == GATHER


# True if the result is written to x unless an out is given.
cdef inline bint overwrites_x(int kind) noexcept:
    return kind == ALL_REDUCE or kind == REDUCE or kind == BROADCAST or kind == SCAN or kind == EXSCAN


cdef inline bint is_number(object x) noexcept:
    return PyFloat_Check(x) or PyLong_Check(x) or PyComplex_Check(x) or cnp.PyArray_CheckScalar(x)


# True if partial results may be compressed between hosts.
cdef inline bint takes_wire(Call *c) noexcept:
    return c.kind == ALL_REDUCE or c.kind == REDUCE


# True if the call takes an array x on `rank`. Its address may be NULL if it has no elements.
cdef inline bint has_x(Call *c, int rank) noexcept:
    return c.kind != SCATTER or rank == c.root


# True if the call writes a result to `out` on `rank`.
cdef inline bint takes_result(Call *c, int rank) noexcept:
    if c.kind == GATHER or c.kind == REDUCE:
        return rank == c.root
    return True


# The return value of the method.
cdef inline object return_value_of(Call *c, int rank, object out):
    return None if overwrites_x(c.kind) or not takes_result(c, rank) else out


# ---- arrays ----------------------------------------------------------------------------------------------------

# Return a 32-bit signature of shape[1:] and of the number of dimensions; with the count it tells shapes apart. The
# fingerprint has room for its lowest 19 bits.
cdef inline uint32_t signature_of(object given) noexcept:
    cdef cnp.ndarray array = <cnp.ndarray> given
    cdef uint64_t word = mixed(1 + cnp.PyArray_NDIM(array))
    cdef int axis
    for axis in range(1, cnp.PyArray_NDIM(array)):
        word = mixed(word ^ <uint64_t> cnp.PyArray_DIM(array, axis))
    return <uint32_t> (word >> 32)


# As signature_of, for any x that a call takes. 0 for a vector: an object without a shape is one.
cdef inline uint32_t signature_of_given(object x) except? 0:
    cdef uint64_t word
    if cnp.PyArray_CheckExact(x):
        return 0 if cnp.PyArray_NDIM(<cnp.ndarray> x) == 1 else signature_of(x)
    lengths = tuple(getattr(x, "shape", (0,)))
    if len(lengths) == 1:
        return 0
    word = mixed(1 + <uint64_t> len(lengths))
    for length in lengths[1:]:
        word = mixed(word ^ <uint64_t> <Py_ssize_t> length)
    return <uint32_t> (word >> 32)


cdef inline str shown(Operand *operand):
    return f"{dtype_name(operand)}[{item_count(operand, operand.count)}]"


cdef inline int fill_out(Call *c, Operand *x, Operand *out, int rank, size_t nranks) except -1:
    cdef size_t npieces = nranks if is_joined(c) else 1
    c.out = out.data
    if not has_x(c, rank):
        c.count = out.count
        fill_items_of(c, out)
        x = out
    if not has_items_of(c, out) or out.count != c.count * npieces:
        raise ValueError(
            f"out is {shown(out)}, x is {shown(x)}: out has to have the same dtype and a count of "
            f"{item_count(x, c.count * npieces)}")
    if out.fortran != c.order:
        raise ValueError("out and x differ in memory order (C and Fortran); give both the same")
    return 0


cdef inline int check_overlap(Call *c, int rank) except -1:
    if not can_read_while_writing(c.x, c.x_nbytes, c.out, c.out_nbytes, rank):
        raise ValueError("out and x overlap in part; out must be x itself (or this rank's part of it, "
                         "or have x as this rank's part) or disjoint from it")
    return 0


# ---- names and numbers -----------------------------------------------------------------------------------------

# Return the number of a name. what: the argument, for the ValueError of another name.
cdef inline int number_named(dict numbers, object name, str what) except -1:
    number = numbers.get(name) if isinstance(name, str) else None
    if number is None:
        raise ValueError(f"{what} is {name!r}; allowed: {', '.join(numbers)}")
    return number


# Return the options of a call for `run`; None if there are none.
cdef inline tuple options_of(object wire, object group_size, object priority):
    return None if wire is None and group_size is None and priority is None else (wire, group_size, priority)


# The priority as it is stored in a call: 0 for none, else 1 to 2 * MOST_PRIORITY + 1.
cdef inline uint16_t priority_code(object priority) except? 0:
    if priority is None:
        return 0
    try:
        number = PyNumber_Index(priority)
    except TypeError:
        raise TypeError(f"priority is {priority!r}; it must be an integer, or None") from None
    if not -MOST_PRIORITY <= number <= MOST_PRIORITY:
        raise ValueError(f"priority is {number}; it must be {-MOST_PRIORITY} to {MOST_PRIORITY}")
    return number + MOST_PRIORITY + 1
