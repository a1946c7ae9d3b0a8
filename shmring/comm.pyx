# Comm: how a communicator comes to be, its shared arrays, objects, and its end; what it can call is in collectives.
# May know: _engine, _group, arrays, collectives, memory, messages, objects.

import os

from ._engine cimport Engine
from ._group cimport ALL_GATHER, ALLOCATE, BROADCAST
from .collectives cimport algorithm_number, timeout_ns_of, timeout_s_of
from .messages cimport Messages

from . import memory, objects
from .arrays import Arrays
from .arrays import check as check_array


cdef class Comm(Messages):
    """One rank's place in a group of ranks, and the collectives between them.

    Made by `shmring.init` or `shmring.spawn`; a context manager. Every collective is called by all ranks, in the
    same order, with matching arguments. Results are the same bits on every rank: values are folded in rank order.
    Errors: TypeError or ValueError for an argument that is wrong here (the others get `Mismatch`), else one of
    `shmring.Error`, the same on every rank and final for this communicator.
    """

    def __init__(self, Engine engine, links, segment, int fd, settings):
        self.engine = engine
        self.links = links
        self.segment = segment
        self.fd = fd
        self.default_algorithm = algorithm_number(settings.algorithm)
        self.default_timeout_ns = timeout_ns_of(engine.timeout_s)
        self.arrays = Arrays(engine, links, settings.segment)
        self.staging_ready = engine.size == 1

    @property
    def rank(self):
        """This rank's number, 0 to size - 1."""
        return self.links.rank

    @property
    def size(self):
        """How many ranks there are."""
        return self.links.size

    @property
    def local_rank(self):
        """This rank's number among the ranks of its host."""
        return self.links.local_rank

    @property
    def local_size(self):
        """How many ranks share this host's memory."""
        return self.links.local_size

    @property
    def node(self):
        """This host's number, 0 to num_nodes - 1."""
        return self.links.node

    @property
    def num_nodes(self):
        """How many hosts there are."""
        return self.links.num_nodes

    # -- arrays that all ranks map --

    def empty(self, shape, dtype="float64", *, timeout=None):
        """Collective: an array in memory that every rank of the host maps; collectives on it copy nothing.

        shape and dtype are the same on every rank, and each has an array of its own. It reads as zeros. Freed when
        the last reference goes, also after the communicator is closed. Raises OutOfMemory, on every rank alike.
        """
        try:
            lengths, numpy_dtype = check_array(shape, dtype)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.arrays.empty(lengths, numpy_dtype, timeout_s)

    def zeros(self, shape, dtype="float64", *, timeout=None):
        """Collective: `empty`, with the promise that it holds zeros."""
        return self.empty(shape, dtype, timeout=timeout)

    def full(self, shape, fill_value, dtype=None, *, timeout=None):
        """Collective: `empty`, filled with `fill_value`; its dtype unless one is given."""
        import numpy as np

        if dtype is None:
            try:
                dtype = np.asarray(fill_value).dtype
            except Exception:
                self.engine.refuse(ALLOCATE)
                raise
        array = self.empty(shape, dtype, timeout=timeout)
        array[...] = fill_value
        return array

    def copy_of(self, a, *, timeout=None):
        """Collective: an `empty` of a's shape and dtype that holds a copy of it."""
        import numpy as np

        try:
            a = np.asarray(a)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        array = self.empty(a.shape, a.dtype, timeout=timeout)
        array[...] = a
        return array

    # -- objects: the only calls that pickle --

    def broadcast_object(self, item=None, root=0, *, timeout=None):
        """root's object, for every rank: a copy of it on the others, whose `item` is ignored.

        Anything that pickles; arrays inside travel beside the pickle. timeout: seconds, of each of its calls.
        """
        frame = self.frame_of(BROADCAST, item, root, False)
        received = objects.broadcast(self, frame, root, timeout)
        return objects.unpack(received) if frame is None else item

    def all_gather_object(self, item, *, timeout=None):
        """Every rank's object on every rank: a list by rank of copies, the own one included."""
        frame = self.frame_of(ALL_GATHER, item, 0, True)
        frames = objects.all_gather(self, frame, self.engine.g.rank, self.engine.g.size, timeout)
        return [objects.unpack(frame) for frame in frames]

    def gather_object(self, item, root=0, *, timeout=None):
        """Every rank's object on the root, which returns a list of copies by rank; the others return None."""
        frame = self.frame_of(ALL_GATHER, item, root, True)
        frames = objects.gather(self, frame, root, timeout)
        return None if frames is None else [objects.unpack(frame) for frame in frames]

    def scatter_object(self, items=None, root=0, *, timeout=None):
        """One of the root's objects for each rank: a copy of items[rank]; `items` is ignored elsewhere."""
        try:
            frames = None
            if self.root_number(root) == self.engine.g.rank:
                frames = [objects.pack(item) for item in items]
                if len(frames) != self.engine.g.size:
                    raise ValueError(f"there are {len(frames)} items for {self.engine.g.size} ranks; give one for each")
        except Exception:
            self.engine.refuse(BROADCAST)
            raise
        return objects.unpack(objects.scatter(self, frames, root, timeout))

    # The frame of what this rank gives, None if it gives nothing; a wrong root, or what does not pickle, is refused.
    cdef object frame_of(self, int kind, object item, object root, bint all_give):
        try:
            is_root = self.root_number(root) == self.engine.g.rank
            return objects.pack(item) if is_root or all_give else None
        except Exception:
            self.engine.refuse(kind)
            raise

    # -- the rest --

    def stats(self):
        """Counters of this rank since it joined, and what the engine knows of the machine.

        `calls`; `bytes_sent`, payload that this rank put where others read it; `steps` of ring and tree calls;
        `paths`, calls by the path they took; `path`, that of the last one; `distance` ("near" or "far") and
        `round_trip_ns` between the cores, as rank 0 measured it; `isa` of the reduction loops.
        """
        return self.engine.stats()

    def abort(self, str reason):
        """Give up: every rank's present or next call raises `Aborted` with this reason."""
        self.engine.abort(reason)

    def close(self):
        """Leave. Local; ranks that still call the communicator get RankFailed. Closing twice is harmless."""
        if self.engine.closed_because is not None:
            return
        self.close_mail()
        self.engine.close()
        self.forget()

    cdef int forget(self) except -1:
        self.arrays.close()
        self.links.close()
        self.close_descriptor()
        self.staging_ready = True
        return 0

    cdef int close_descriptor(self) except -1:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return 0

    def _disown(self):
        """In a forked child: descriptors go, shared memory stays untouched."""
        if self.engine.closed_because is None:
            self.engine.disown()
            self.links.close()
            self.close_descriptor()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        leaves_in_order = error is None or (kind is SystemExit and not error.code)
        try:
            if not leaves_in_order and self.engine.closed_because is None and self.engine.abort_report() is None:
                # The others must not wait for a rank that has left in the middle.
                self.engine.abort(f"{kind.__name__} in rank {self.rank}: {text_of(error)}"[:150])
        finally:
            self.close()

    def __del__(self):
        try:
            self.close()
        except Exception:   # in the middle of a call of another thread, or of the interpreter's end
            pass

    def __reduce__(self):
        raise TypeError("a communicator belongs to its process; send its World instead, and join it there")

    def __repr__(self):
        state = "" if self.engine.closed_because is None else ", closed"
        return f"<shmring.Comm rank {self.rank} of {self.size}{state}>"

    # -- memory --

    cdef int allocate_staging(self) except -1:
        """This rank's staging ring gets its pages before it is first touched."""
        if self.engine.closed_because is not None:
            return 0   # drive says so
        offset, nbytes = self.engine.own_ring()
        try:
            memory.allocate(self.fd, offset, nbytes, purpose="a staging ring")
            self.segment.populate(offset, nbytes)
        except BaseException as error:
            self.engine.abort(f"rank {self.rank} has no memory for its staging ring: {error}")
            raise
        self.staging_ready = True
        return 0

    cdef int allocate_message_ring(self, size_t offset, size_t nbytes) except -1:
        """The ring from this rank to another gets its pages before it is first touched."""
        memory.allocate(self.fd, offset, nbytes, purpose="a message ring")
        self.segment.populate(offset, nbytes)
        return 0


cdef str text_of(object error):
    try:
        return str(error)
    except Exception:
        return "(its text cannot be had)"
