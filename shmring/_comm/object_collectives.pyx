# Collectives of Python objects as frames (_arrays/objects). In broadcast_object and all_gather_object small frames go
# through a slot of 256 bytes for each rank, in one call; the others are vector calls.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from .._arrays.objects cimport PROTOCOL_OPCODE, as_array, bytes_room, pack, unpack
from .._core cimport numpy_api as cnp
from .._core.group cimport ALL_GATHER, ALL_GATHER_V, BROADCAST, GATHER_V, SCATTER_V
from .._engine.engine cimport IN_ANY, IN_STEPS
from .fused cimport FusedCollectives
from .vector cimport run_vector

import numpy as np

from .._arguments import is_no_list
from .._arrays import objects

cnp.import_array()

cdef enum:
    HEAD_OF_SLOT_NBYTES = 8  # a slot begins with the length of its frame
    # bench/peers: a broadcast of 256 bytes takes 0.16 us longer than one of 48 bytes; most small objects fit.
    SLOT_NBYTES = 256


# ---- slots -----------------------------------------------------------------------------------------------------

# The first call of a collective of objects moves a slot of fixed size from each rank: the length of the frame, and the
# frame itself if it fits. Only for a longer frame there is a second call. All ranks see the same lengths.

cdef bint fits_in_slot(uint64_t nbytes) noexcept:
    return nbytes <= SLOT_NBYTES - HEAD_OF_SLOT_NBYTES


cdef uint64_t nbytes_in(cnp.ndarray slot) noexcept:
    return (<uint64_t *> cnp.PyArray_DATA(slot))[0]


# Return a copy of the frame in a slot.
cdef object frame_at(const char *slot):
    cdef uint64_t nbytes = (<const uint64_t *> slot)[0]
    cdef const char *data = slot + HEAD_OF_SLOT_NBYTES
    if <unsigned char> data[0] == PROTOCOL_OPCODE:
        return PyBytes_FromStringAndSize(data, nbytes)
    frame = np.empty(nbytes, np.uint8)
    memcpy(cnp.PyArray_DATA(<cnp.ndarray> frame), data, nbytes)
    return frame


cdef object frame_in(cnp.ndarray slot):
    return frame_at(<const char *> cnp.PyArray_DATA(slot))


cdef class Slots:
    """The slots of one communicator: this rank's own, and all ranks' that an all_gather collects."""

    def __cinit__(self, int size):
        self.size = size
        self.own = np.zeros(SLOT_NBYTES, np.uint8)
        self.every = np.zeros((size, SLOT_NBYTES), np.uint8)

    # Put the length of a frame into the own slot, and the frame if it fits.
    cdef void put(self, object frame) noexcept:
        cdef char *slot = <char *> cnp.PyArray_DATA(self.own)
        cdef bint is_pickle = PyBytes_CheckExact(frame)
        cdef uint64_t nbytes = PyBytes_GET_SIZE(frame) if is_pickle else cnp.PyArray_SIZE(<cnp.ndarray> frame)
        (<uint64_t *> slot)[0] = nbytes
        if fits_in_slot(nbytes):
            memcpy(slot + HEAD_OF_SLOT_NBYTES,
                   PyBytes_AS_STRING(frame) if is_pickle else <char *> cnp.PyArray_DATA(<cnp.ndarray> frame), nbytes)

    # Return the length of the longest frame of all ranks.
    cdef uint64_t largest(self) noexcept:
        cdef const char *slot = <const char *> cnp.PyArray_DATA(self.every)
        cdef uint64_t most = 0
        cdef int rank
        for rank in range(self.size):
            most = max(most, (<const uint64_t *> (slot + rank * SLOT_NBYTES))[0])
        return most

    # Return copies of all ranks' frames: an object that is unpacked may make a collective, which overwrites the slots.
    cdef list frames(self):
        cdef const char *slot = <const char *> cnp.PyArray_DATA(self.every)
        cdef list frames = []
        cdef int rank
        for rank in range(self.size):
            frames.append(frame_at(slot + rank * SLOT_NBYTES))
        return frames


# ---- the collectives -------------------------------------------------------------------------------------------

cdef class ObjectCollectives(FusedCollectives):
    """The collectives of Python objects, which are pickled."""

    def broadcast_object(self, item=None, root=0, *, timeout=None):
        """Return the root's object on every rank: the object itself on the root, a copy on the other ranks.

        Parameters
        ----------
        item : object
            On the root, an object that can be pickled; ignored on other ranks. Arrays in it are transferred outside the
            pickle.
        root : int
            The rank that sends.
        timeout : float, optional
            Seconds, for each of the calls that it makes; see `Comm`.

        Returns
        -------
        object
            The object or its copy.

        Raises
        ------
        TypeError, ValueError
            For a wrong root; or what pickling the object raises.
        Error
            As every collective.

        Examples
        --------
        >>> comm.broadcast_object({"seed": 7} if comm.rank == 0 else None)
        {'seed': 7}
        """
        frame = self.frame_of(BROADCAST, item, root, False)
        received = self.engine.run_steps(IN_STEPS, self._broadcast_frame, frame, root, timeout)
        return item if frame is not None else received

    def all_gather_object(self, item, *, timeout=None):
        """Return a list, by rank, of copies of every rank's object, also of this rank's own.

        Parameters
        ----------
        item, timeout
            As in `broadcast_object`.

        Returns
        -------
        list
            One object for each rank.

        Raises
        ------
        Error
            As every collective; or what pickling the object raises.

        Examples
        --------
        >>> comm.all_gather_object(f"rank {comm.rank}")
        ['rank 0', 'rank 1']
        """
        frame = self.frame_of(ALL_GATHER, item, 0, True)
        return self.engine.run_steps(IN_ANY, self._all_gather_frames, frame, timeout)

    def gather_object(self, item, root=0, *, timeout=None):
        """Return a list, by rank, of copies of every rank's object on the root; return None on the other ranks.

        Parameters
        ----------
        item, root, timeout
            As in `broadcast_object`.

        Returns
        -------
        list or None
            On the root, one object for each rank.

        Raises
        ------
        TypeError, ValueError, Error
            As `broadcast_object`.

        Examples
        --------
        >>> comm.gather_object(f"rank {comm.rank}")  # None on rank 1
        ['rank 0', 'rank 1']
        """
        frame = self.frame_of(GATHER_V, item, root, True)
        return self.engine.run_steps(IN_ANY, self._gather_frames, as_array(frame), root, timeout)

    def scatter_object(self, items=None, root=0, *, timeout=None):
        """Return a copy of the root's items[rank].

        Parameters
        ----------
        items : list
            On the root, one object for each rank; ignored on other ranks.
        root, timeout
            As in `broadcast_object`.

        Returns
        -------
        object
            The copy.

        Raises
        ------
        TypeError, ValueError, Error
            As `broadcast_object`.

        Examples
        --------
        >>> comm.scatter_object(["first", "second"] if comm.rank == 0 else None)
        'first'
        """
        try:
            frames = None
            if self.root_number(root) == self.own_rank:
                if items is None or is_no_list(items):  # a dict would give its keys
                    kind = "None" if items is None else f"a {type(items).__name__}"
                    raise TypeError(f"items is {kind}; give a list with one object for each rank")
                frames = list(map(objects.as_array, map(objects.pack, items)))
                if len(frames) != self.nranks:
                    raise ValueError(f"there are {len(frames)} items for {self.nranks} ranks; give one for each")
        except Exception:
            self.engine.refuse(SCATTER_V)
            raise
        return self.engine.run_steps(IN_ANY, self._scatter_frames, frames, root, timeout)

    # Return the frame of this rank's object, or None if it sends none. Refuse a wrong root or an unpicklable object.
    cdef object frame_of(self, int kind, object item, object root, bint all_give):
        try:
            is_root = self.root_number(root) == self.own_rank
            return pack(item) if is_root or all_give else None
        except Exception:
            self.engine.refuse(kind)
            raise

    # The functions below run as compound calls. They unpack within them: an exception then ends the communicator.

    def _broadcast_frame(self, frame, root, timeout):
        """Return the object in the root's frame on the other ranks, which pass None; None on the root."""
        cdef Slots slots = self.slots_of_objects()
        cdef uint64_t nbytes
        if frame is not None:
            slots.put(frame)
        self.run(BROADCAST, slots.own, None, root, None, None, None, False, timeout)
        nbytes = nbytes_in(slots.own)
        if fits_in_slot(nbytes):
            return None if frame is not None else unpack(frame_in(slots.own))
        whole = bytes_room(nbytes) if frame is None else as_array(frame)
        self.run(BROADCAST, whole, None, root, None, None, None, False, timeout)
        return None if frame is not None else unpack(whole)

    def _all_gather_frames(self, frame, timeout):
        """Return the objects in all ranks' frames, by rank."""
        cdef Slots slots = self.slots_of_objects()
        slots.put(frame)
        self.run(ALL_GATHER, slots.own, None, None, slots.every, None, None, False, timeout)
        if fits_in_slot(slots.largest()):
            frames = slots.frames()
        else:
            frames = run_vector(self, ALL_GATHER_V, as_array(frame), 0, None, None, False, timeout)
        return list(map(objects.unpack, frames))

    def _gather_frames(self, frame, root, timeout):
        """Return the objects in all ranks' frames, by rank, on the root; None on the others."""
        frames = run_vector(self, GATHER_V, frame, root, None, None, False, timeout)
        return None if frames is None else list(map(objects.unpack, frames))

    def _scatter_frames(self, frames, root, timeout):
        """Return the object in the root's frame for this rank. The other ranks pass None."""
        return unpack(run_vector(self, SCATTER_V, frames, root, None, bytes_room(0), False, timeout))

    cdef Slots slots_of_objects(self):
        if self.slots is None:
            self.slots = Slots(self.nranks)
        return self.slots
