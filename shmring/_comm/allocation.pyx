# Arrays that all ranks of a host map: allocated, adopted from another library, or shared by all ranks. The allocator
# (_arrays/allocator) does the work; here are the calls with their checks.

import functools
import math
import weakref

import numpy as np

from .._arrays.operands cimport Memory
from .._core.group cimport ALLOCATE, SHARE
from .._core.kernels cimport SR_SUM
from .._core.timeouts cimport timeout_s_of
from .._engine.engine cimport IN_STEPS
from .point_to_point cimport Messages

from .._arrays import buffers
from .._arrays import shared_array as shared
from .._arrays.allocator import MOST_NBYTES, Arrays, as_fill_value, check_nbytes, check_shape_and_dtype, whole_pages
from .._arrays.operands import Arena
from .._system import segments
from ..errors import Error


cdef class Allocation(Messages):
    """The arrays of a communicator, in memory that every rank of the host maps."""

    cdef int begin_arrays(self, object local_sockets, str segment) except -1:
        self.arrays = Arrays(self.engine, local_sockets, segment,
                             functools.partial(_is_in_transfer, weakref.ref(self)))
        self.engine.set_shared_arrays(self.arrays)
        return 0

    def empty(self, shape, dtype="float64", *, timeout=None):
        """Collective: return an array in memory that every rank of the host maps, so collectives need not copy it.

        Each rank gets an array of its own. The memory is freed when the last reference to it is gone, also after the
        communicator is closed.

        Parameters
        ----------
        shape : int or tuple of int
            The same on every rank.
        dtype : numpy.dtype
            The same on every rank.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        numpy.ndarray
            Filled with zeros, in C order.

        Raises
        ------
        TypeError, ValueError
            For a wrong shape, or a dtype with references.
        OutOfMemory
            On every rank. The communicator stays usable.
        Error
            As every collective.

        Examples
        --------
        >>> gradient = comm.empty((2, 3), "float32")
        >>> comm.all_reduce(gradient)
        >>> gradient.shape
        (2, 3)
        """
        try:
            lengths, numpy_dtype = check_shape_and_dtype(shape, dtype)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_steps(IN_STEPS, self.arrays.empty, lengths, numpy_dtype, timeout_s)

    def zeros(self, shape, dtype="float64", *, timeout=None):
        """Collective: return an array as `empty` does. It is guaranteed to hold zeros.

        Parameters
        ----------
        shape, dtype, timeout
            As in `empty`.

        Returns
        -------
        numpy.ndarray
            As `empty`.

        Raises
        ------
        TypeError, ValueError, Error
            As `empty`.

        Examples
        --------
        >>> comm.zeros(2)
        array([0., 0.])
        """
        return self.empty(shape, dtype, timeout=timeout)

    def full(self, shape, fill_value, dtype=None, *, timeout=None):
        """Collective: return an array as `empty` does, filled with `fill_value`.

        Parameters
        ----------
        shape : int or tuple of int
            The same on every rank.
        fill_value : number or array
            It is broadcast to the shape. It may differ between ranks.
        dtype : numpy.dtype, optional
            That of `fill_value` if None.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        numpy.ndarray
            As `empty`.

        Raises
        ------
        TypeError, ValueError
            As `empty`, or for a masked array or a value that does not fit.
        Error
            As `empty`.

        Examples
        --------
        >>> comm.full(2, comm.rank + 0.5)
        array([0.5, 0.5])
        """
        try:
            shape, dtype = check_shape_and_dtype(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
            values = as_fill_value(fill_value, shape, dtype)   # refuse invalid values before other ranks have an array
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_steps(IN_STEPS, self._new_array_of, values, shape, dtype, timeout_s)

    def copy_of(self, a, *, timeout=None):
        """Collective: return a copy of `a` in an array as `empty` returns.

        Parameters
        ----------
        a : array
            Its shape and dtype are the same on every rank.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        numpy.ndarray
            It has the shape and dtype of `a`, and is in C order.

        Raises
        ------
        TypeError, ValueError, Error
            As `empty`; TypeError also for a masked array.

        Examples
        --------
        >>> comm.copy_of([1, 2])
        array([1, 2])
        """
        try:
            if isinstance(a, np.ma.MaskedArray):
                raise buffers.masked("a")
            a = np.asarray(a)
            shape, dtype = check_shape_and_dtype(a.shape, a.dtype)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_steps(IN_STEPS, self._new_array_of, a, shape, dtype, timeout_s)

    def _new_array_of(self, values, shape, dtype, double timeout_s):
        array = self.arrays.empty(shape, dtype, timeout_s)
        array[...] = values
        return array

    def adopt(self, x, *, timeout=None):
        """Collective: map an array of another library in every rank of the host, at its present address.

        While the adoption lives, collectives on the array or on parts of it copy nothing. The array keeps its values.
        No thread may write to the array during this call, and the array must not be unmapped before the adoption is
        released.

        Parameters
        ----------
        x : Memory
            With an owner, of the same number of bytes on every rank. It must be whole pages in a mapping of their own,
            as `tensor.share_memory_()` makes them.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Adoption
            Its `release` ends it.

        Raises
        ------
        TypeError, ValueError, OutOfMemory
            For memory that cannot be mapped. The array is then unchanged.
        Error
            As every collective.

        Examples
        --------
        >>> import mmap
        >>> memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        >>> x = np.frombuffer(memory, "float32")
        >>> adoption = comm.adopt(shmring.Memory(x.ctypes.data, x.size, "float32", owner=x))
        >>> comm.all_reduce(x)  # no copy
        >>> adoption.release()
        """
        try:
            if not isinstance(x, Memory) or x.owner is None or x.readonly:
                raise TypeError(f"x is {x!r:.60}; give a shmring.Memory with an owner, not a readonly one")
            nbytes = whole_pages(x.nbytes)
            try:
                segments.check_own_mapping(x.address, nbytes)
            except Error:
                pass   # an error of the host, not of x: `Arrays.adopt` checks again and raises it on all ranks
            self.arrays.check_not_adopted(x.address, nbytes)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_steps(IN_STEPS, self.arrays.adopt, x.address, nbytes, x.owner, timeout_s)

    def arena(self, nbytes=64 << 20, *, smallest_nbytes=64 << 10, timeout=None):
        """Collective: return shared memory for the arrays that NumPy makes in a `with` statement.

        In it, `np.empty`, `np.zeros`, the results of expressions, and all else for which NumPy allocates are arrays
        that collectives of this communicator do not copy. Other libraries' own allocators are not reached, nor are
        other threads. If the memory does not suffice, NumPy uses ordinary memory as before.

        Parameters
        ----------
        nbytes : int
            Bytes for each rank, the same on every rank. They are allocated at once.
        smallest_nbytes : int
            Smaller arrays get ordinary memory: they gain nothing.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        Arena
            A context manager, which can be entered again. It ends with the last of its arrays.

        Raises
        ------
        TypeError, ValueError
            For a wrong number.
        OutOfMemory
            On every rank. The communicator stays usable.
        Error
            As every collective.

        Examples
        --------
        >>> a, b = np.full(100_000, 2.0), np.full(100_000, 3.0)
        >>> with comm.arena():
        ...     product = a * b
        >>> comm.all_reduce(product)  # no copy
        >>> product[0]
        np.float64(12.0)
        """
        try:
            wanted = check_nbytes("nbytes", nbytes)
            smallest = check_nbytes("smallest_nbytes", smallest_nbytes)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_steps(IN_STEPS, self._arena, whole_pages(wanted), smallest, timeout_s)

    def _arena(self, nbytes, smallest_nbytes, double timeout_s):
        return Arena(self.arrays.empty(*check_shape_and_dtype(nbytes, "uint8"), timeout_s), smallest_nbytes)

    def shared(self, shape, dtype="float64", *, locks=0, timeout=None):
        """Collective: return one array, filled with zeros, whose memory all ranks of the host share.

        The memory is freed when no rank refers to it any more. A collective can read the array, but not write to it.

        Parameters
        ----------
        shape, dtype
            As in `empty`.
        locks : int
            Number of locks, the same on every rank. `with array.lock(i):`, with i below `locks`, excludes other ranks
            that take lock i.
        timeout : float, optional
            Seconds; see `Comm`.

        Returns
        -------
        SharedArray
            Its `fence` is a barrier: after it all ranks see the values that were written before it.

        Raises
        ------
        TypeError, ValueError
            As `empty`, or for a wrong number of locks.
        OutOfMemory
            On every rank. The communicator stays usable.
        Error
            As every collective.

        Examples
        --------
        >>> table = comm.shared(2, "int64")
        >>> table[comm.rank] = comm.rank + 1
        >>> table.fence()
        >>> table.tolist()
        [1, 2]
        """
        try:
            lengths, numpy_dtype = check_shape_and_dtype(shape, dtype)
            count = shared.check_locks(locks)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
            nbytes = math.prod(lengths) * numpy_dtype.itemsize
        except Exception:
            self.engine.refuse(SHARE)
            raise
        return self.engine.run_steps(IN_STEPS, self._shared, lengths, numpy_dtype, count, nbytes, timeout_s)

    def _shared(self, lengths, dtype, nlocks, nbytes, double timeout_s):
        self.engine.call_tiny(SHARE, SR_SUM, min(nbytes, MOST_NBYTES), NULL, 0, timeout_s)
        shared.check_same(self, (lengths, dtype, nlocks), timeout_s)
        room = self.arrays.one_for_all(shared.room_nbytes(nbytes, nlocks), timeout_s)
        return shared.over(room, lengths, dtype, nlocks, self, self.engine)


def _is_in_transfer(comm, address, nbytes):
    """Return whether a pending transfer of a communicator, given by a weak reference, sends or receives these bytes."""
    cdef Allocation found = comm()
    return found is not None and found.endpoint.is_in_transfer(address, nbytes)
