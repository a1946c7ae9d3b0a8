# Comm: construction, shared arrays, objects, groups, and closing. The collectives and messages of a communicator are in
# collectives, vector, fused and point_to_point.

import atexit
import math
import os
import weakref

from libc.stdint cimport uint64_t

from .._arrays.operands cimport Memory
from .._core.group cimport (
    ALLOCATE, ALL_GATHER, ALL_GATHER_V, BROADCAST, FORM_GROUP, GATHER_V, SCATTER_V, SHARE, SPLIT,
)
from .._core.kernels cimport SR_SUM
from .._core.timeouts cimport ns_of, timeout_s_of
from .._engine.engine cimport Engine
from .collectives cimport algorithm_number
from .objects cimport Slots, as_array, bytes_room, fits_in_slot, frame_in, nbytes_in, pack, unpack
from .point_to_point cimport Messages

from . import objects
from .._diagnostics import failures
from .._lifecycle import groups, shrink as shrinking
from .._system import segments
from .._arrays import shared_array as shared
from .._arrays.allocator import MOST_NBYTES, Arrays, filling, whole_pages
from .._arrays.allocator import check as check_array
from ..errors import Error, Timeout
from .error_feedback import Residuals

open_comms = weakref.WeakSet()   # of this process


cdef class Comm(Messages):
    """A communicator: one rank's membership in a group of ranks, and the collectives among them.

    `shmring.init` and `shmring.spawn` make it. It is a context manager that closes it. All ranks must call every
    collective, in the same order, with matching arguments. Values are folded in rank order, so the result has the same
    bits on every rank. A wrong argument raises TypeError or ValueError on the rank that passed it, and `Mismatch` on
    the others. Every other error is a `shmring.Error`: it is raised on every rank, and ends the communicator.
    """

    def __init__(self, Engine engine=None, local_sockets=None, segment=None, int fd=-1, settings=None, place=None,
                 internode=None, parent_ranks=None, Comm parent=None, epoch=0):
        if engine is None:
            raise TypeError("a Comm is made by shmring.init() or shmring.spawn(), and by split(), group(), dup() and "
                            "shrink() of another Comm")
        # Take ownership first: from here on `close` releases everything, whatever raises.
        self.engine = engine
        self.fd = fd
        self.local_sockets = local_sockets
        self.internode = internode
        self.place = place
        self.segment = segment
        self.settings = settings
        self.parent_ranks = parent_ranks
        self.own_rank, self.nranks = place.rank, place.size
        self.descend_from(parent)
        self.epoch = epoch
        self.default_algorithm = algorithm_number(settings.algorithm)
        self.residuals = Residuals()
        self.default_timeout_ns = ns_of(engine.timeout_s)
        self.arrays = Arrays(engine, local_sockets, settings.segment)
        engine.share(self.arrays)
        self.staging_ready = engine.size == 1
        open_comms.add(self)
        failures.rehearse(engine)

    # Set the origin of the ranks, for traces: the world, and the ranks' numbers in it.
    cdef int descend_from(self, Comm parent) except -1:
        ranks = self.parent_ranks
        if parent is None:
            self.origin = self.engine.flight.nonce, self.own_rank, self.nranks, self.place.host
        else:
            self.origin = parent.origin
            self.world_ranks = tuple(
                ranks if parent.world_ranks is None else map(parent.world_ranks.__getitem__, ranks))
        return 0

    @property
    def rank(self):
        """This rank's number, 0 to size - 1."""
        return self.place.rank

    @property
    def size(self):
        """Number of ranks."""
        return self.place.size

    @property
    def local_rank(self):
        """This rank's number among the ranks of its host."""
        return self.place.local_rank

    @property
    def local_size(self):
        """Number of ranks on this host, which share its memory."""
        return self.place.local_size

    @property
    def node(self):
        """This host's number, 0 to num_nodes - 1."""
        return self.place.host

    @property
    def num_nodes(self):
        """Number of hosts."""
        return self.place.num_hosts

    def run_steps(self, function, *arguments, bint begun=False, **keywords):
        """Run function(*arguments, **keywords), which makes several calls of this communicator, as one call.

        For code that wraps a communicator. An exception that the function raises after its first call, also a
        KeyboardInterrupt, ends the communicator. Every other rank then raises `Aborted`, instead of waiting for this
        rank or making calls that do not match this rank's. An exception before the first call has no such effect.
        Neither have shmring's own errors, refused arguments (`refuse`), and errors that all ranks raise, which
        `shmring.errors.agreed` marks. Calls by other threads raise RuntimeError while the function runs. begun: True
        if the function continues a sequence of calls, so that an exception before its first call ends the
        communicator, too.
        """
        return self.engine.run_steps(function, *arguments, begun=begun, **keywords)

    # -- groups --

    def split(self, color, key=0, *, timeout=None):
        """Collective: make a communicator for each color, and return the one of this rank's color.

        color: an integer; with None the rank joins no new communicator, and None is returned. key: an integer. The
        ranks of a color are ordered by key, then by rank. timeout: seconds. The communicators are independent: an
        abort, an error or the closing of one does not affect the others. The death of a rank ends all communicators
        of that rank. If a new communicator cannot start, for example with OutOfMemory, only its ranks raise the
        error. See MPI_Comm_split.
        """
        try:
            packed = groups.pack_color(color, key)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(SPLIT)
            raise
        return self.engine.run_own_steps(self._split, packed, timeout_s)

    def _split(self, packed, double timeout_s):
        self.engine.call_tiny(SPLIT, SR_SUM, 0, NULL, 0, timeout_s)
        return self.form(groups.by_color(self.all_gather(packed, timeout=timeout_s)), timeout_s)

    def group(self, ranks, *, timeout=None):
        """Collective: make a communicator of the listed ranks, and return it on them; return None on other ranks.

        ranks: a list of ranks, the same on all ranks; ranks[i] becomes rank i. All ranks must call it. Otherwise as
        `split`.
        """
        try:
            wanted = groups.listed(ranks, self.nranks)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(FORM_GROUP)
            raise
        return self.engine.run_own_steps(self._group, wanted, timeout_s)

    def _group(self, wanted, double timeout_s):
        self.engine.call_tiny(FORM_GROUP, SR_SUM, len(wanted), NULL, 0, timeout_s)
        groups.check_same(self.all_gather(wanted, timeout=timeout_s))
        return self.form([wanted.tolist()] if len(wanted) else [], timeout_s)

    def dup(self, *, timeout=None):
        """Collective: return another communicator of the same ranks, as `split(0)` does."""
        return self.split(0, timeout=timeout)

    cdef object form(self, list members, double timeout_s):
        if self.internode is None:
            formed = groups.form(self.engine, self.local_sockets, members, self.settings, timeout_s)
        else:
            formed = groups.form_across(self, self.engine, self.internode, members, self.settings, timeout_s)
        if formed is None:
            return None
        parts, ranks = formed
        comm = None
        try:
            comm = Comm(*parts, parent_ranks=ranks, parent=self)
            return self.traced_alike(comm)
        except BaseException:   # the other ranks have the group and must not wait for this rank
            leave_group(parts, comm)
            raise

    # -- arrays that all ranks map --

    def empty(self, shape, dtype="float64", *, timeout=None):
        """Collective: return an array in memory that every rank of the host maps. Collectives on it copy nothing.

        shape and dtype: the same on every rank. timeout: seconds. Each rank gets an array of its own, filled with
        zeros. The memory is freed when the last reference to it is gone, also after the communicator is closed.
        Raises OutOfMemory on every rank.
        """
        try:
            lengths, numpy_dtype = check_array(shape, dtype)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_own_steps(self.arrays.empty, lengths, numpy_dtype, timeout_s)

    def zeros(self, shape, dtype="float64", *, timeout=None):
        """Collective: return an array as `empty` does. It is guaranteed to hold zeros."""
        return self.empty(shape, dtype, timeout=timeout)

    def full(self, shape, fill_value, dtype=None, *, timeout=None):
        """Collective: return an array as `empty` does, filled with `fill_value`.

        dtype: that of `fill_value` if None.
        """
        import numpy as np

        try:
            shape, dtype = check_array(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
            values = filling(fill_value, shape, dtype)   # refuse invalid values before other ranks have an array
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_own_steps(self._holding, values, shape, dtype, timeout_s)

    def copy_of(self, a, *, timeout=None):
        """Collective: return a copy of `a` in an array as `empty` returns. Shape and dtype are those of `a`."""
        import numpy as np

        try:
            a = np.asarray(a)
            shape, dtype = check_array(a.shape, a.dtype)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_own_steps(self._holding, a, shape, dtype, timeout_s)

    def _holding(self, values, shape, dtype, double timeout_s):
        array = self.arrays.empty(shape, dtype, timeout_s)
        array[...] = values
        return array

    def adopt(self, x, *, timeout=None):
        """Collective: map an array of another library in every rank of the host, at its present address.

        x: a `Memory` with an owner, of the same number of bytes on every rank. It must be whole pages in a mapping of
        their own, as `tensor.share_memory_()` makes them. timeout: seconds. Returns an `Adoption`. While the adoption
        lives, collectives on the array or on parts of it copy nothing. The array keeps its values. No thread may write
        to the array during this call, and the array must not be unmapped before the adoption is released. Raises
        ValueError or OutOfMemory; the array is then unchanged.
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
        return self.engine.run_own_steps(self.arrays.adopt, x.address, nbytes, x.owner, timeout_s)

    def shared(self, shape, dtype="float64", *, locks=0, timeout=None):
        """Collective: return one array, filled with zeros, whose memory all ranks of the host share.

        shape, dtype and locks: the same on every rank. timeout: seconds. Returns a `SharedArray`. Its `fence()` is a
        barrier: after it all ranks see the values that were written before it. `with array.lock(i):`, with i below
        `locks`, excludes other ranks that take lock i. The memory is freed when no rank refers to it any more. A
        collective can read the array, but not write to it. Raises OutOfMemory on every rank.
        """
        try:
            lengths, numpy_dtype = check_array(shape, dtype)
            count = shared.check_locks(locks)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
            nbytes = math.prod(lengths) * numpy_dtype.itemsize
        except Exception:
            self.engine.refuse(SHARE)
            raise
        return self.engine.run_own_steps(self._shared, lengths, numpy_dtype, count, nbytes, timeout_s)

    def _shared(self, lengths, dtype, nlocks, nbytes, double timeout_s):
        self.engine.call_tiny(SHARE, SR_SUM, min(nbytes, MOST_NBYTES), NULL, 0, timeout_s)
        shared.check_same(self, (lengths, dtype, nlocks), timeout_s)
        room = self.arrays.one_for_all(shared.room_nbytes(nbytes, nlocks), timeout_s)
        return shared.over(room, lengths, dtype, nlocks, self, self.engine)

    # -- objects: the only calls that pickle --

    def broadcast_object(self, item=None, root=0, *, timeout=None):
        """Return the root's object on every rank: the object itself on the root, a copy on the other ranks.

        item: any object that can be pickled, on the root; ignored on other ranks. Arrays in it are transferred outside
        the pickle. timeout: seconds, for each of the calls that it makes.
        """
        frame = self.frame_of(BROADCAST, item, root, False)
        received = self.engine.run_own_steps(self._broadcast_frame, frame, root, timeout)
        return item if frame is not None else received

    def all_gather_object(self, item, *, timeout=None):
        """Return a list, by rank, of copies of every rank's object, also of this rank's own.

        item and timeout: as in `broadcast_object`.
        """
        frame = self.frame_of(ALL_GATHER, item, 0, True)
        return self.engine.run_own_steps(self._all_gather_frames, frame, timeout, may_be_step=True)

    def gather_object(self, item, root=0, *, timeout=None):
        """Return a list, by rank, of copies of every rank's object on the root; return None on the other ranks.

        item and timeout: as in `broadcast_object`.
        """
        frame = self.frame_of(GATHER_V, item, root, True)
        return self.engine.run_own_steps(self._gather_frames, as_array(frame), root, timeout, may_be_step=True)

    def scatter_object(self, items=None, root=0, *, timeout=None):
        """Return a copy of the root's items[rank].

        items: on the root, one object for each rank; ignored on other ranks. timeout: as in `broadcast_object`.
        """
        try:
            frames = None
            if self.root_number(root) == self.own_rank:
                frames = list(map(objects.as_array, map(objects.pack, items)))
                if len(frames) != self.nranks:
                    raise ValueError(f"there are {len(frames)} items for {self.nranks} ranks; give one for each")
        except Exception:
            self.engine.refuse(SCATTER_V)
            raise
        return self.engine.run_own_steps(self._scatter_frames, frames, root, timeout, may_be_step=True)

    # Return the frame of this rank's object, or None if it sends none. Refuse a wrong root or an unpicklable object.
    cdef object frame_of(self, int kind, object item, object root, bint all_give):
        try:
            is_root = self.root_number(root) == self.own_rank
            return pack(item) if is_root or all_give else None
        except Exception:
            self.engine.refuse(kind)
            raise

    # The functions below run as steps of one call. They unpack within it: an exception then ends the communicator.

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
            frames = self.run_vector(ALL_GATHER_V, as_array(frame), None, None, None, False, timeout)
        return list(map(objects.unpack, frames))

    def _gather_frames(self, frame, root, timeout):
        """Return the objects in all ranks' frames, by rank, on the root; None on the others."""
        frames = self.run_vector(GATHER_V, frame, root, None, None, False, timeout)
        return None if frames is None else list(map(objects.unpack, frames))

    def _scatter_frames(self, frames, root, timeout):
        """Return the object in the root's frame for this rank. The other ranks pass None."""
        return unpack(self.run_vector(SCATTER_V, frames, root, None, bytes_room(0), False, timeout))

    cdef Slots slots_of_objects(self):
        if self.slots is None:
            self.slots = Slots(self.nranks)
        return self.slots

    # -- the rest --

    def stats(self):
        """Return counters of this rank since it joined, and properties of the machine, as a dict.

        `calls`: number of calls. `bytes_sent`: payload bytes that this rank stored for other ranks to read.
        `bytes_over_wire`: payload bytes of collectives that this rank sent to other hosts, after compression. `steps`:
        steps of ring and tree calls. `paths`: number of calls by path. `path`: path of the last call. `distance`
        ("near" or "far") and `round_trip_ns` (nanoseconds) between the cores, as rank 0 measured them. `isa`: the
        instruction set of the kernels.
        """
        return self.engine.stats()

    def trace(self, path):
        """Record this rank's calls from now on, with their waits and their work, as one track for Perfetto.

        Local; usually all ranks call it with the same path. Returns a `Trace`, a context manager. Its `stop()`, or the
        end of the communicator, adds this rank's track to the file at `path`. The file is JSON in Chrome's trace event
        format; open it at ui.perfetto.dev. A file that another world wrote at `path` is replaced. Ranks of another
        host write to a file of that host, such as t.node1.json. The last 65,536 slices of a rank are kept. Groups that
        are made during the trace are traced, too. A small call takes about 0.15 µs longer. Raises OSError if the file
        cannot be written, and RuntimeError during another trace or while another thread is inside a call.
        """
        if self.tracer is not None and self.tracer.is_automatic:   # an explicit trace replaces it
            self.tracer.stop_quietly()
        return self.begin_trace(path, False)

    def _trace_automatically(self, path):
        """Begin the trace that SHMRING_TRACE requests. A call of `trace` replaces it."""
        self.begin_trace(path, True)

    cdef object begin_trace(self, object path, bint is_automatic):
        from . import trace_file   # imported on demand: it takes some ms

        self.tracer = trace_file.Trace(self.engine, path, trace_file.Origin(*self.origin), ranks=self.world_ranks,
                                       is_automatic=is_automatic)
        return self.tracer

    # Trace a new group of these ranks if this communicator is traced, until its trace stops. Return the group.
    cdef object traced_alike(self, Comm group):
        if self.tracer is not None and self.tracer.is_running:
            try:
                group._trace_automatically(self.tracer.asked_path)
                self.tracer.groups.add(group.tracer)
            except (MemoryError, OSError) as error:   # the group itself is usable
                self.tracer.report_untraced(error)
        return group

    def abort(self, str reason):
        """End the communicator: the current or next call of every rank raises `Aborted` with this reason."""
        self.engine.abort(reason)

    def shrink(self, *, timeout=None):
        """Collective over the surviving ranks: return a new communicator of them, in the order of their ranks.

        Call it after any `shmring.Error` but `Closed`. If no rank has ended the communicator, this rank does. The
        survivors agree on the membership, even if more ranks die meanwhile. Excluded are ranks that have ended, have
        left or cannot be reached, and ranks that do not call shrink within timeout seconds (by default the
        communicator's timeout). A rank that a Timeout has named has only one second, counted from the time when every
        other rank has called shrink; if it calls shrink before, it is included. An excluded rank that calls shrink
        later raises RankFailed for itself. The new communicator's `parent_ranks` are the ranks' numbers in this
        communicator. This communicator is closed, and its shared arrays become private. The survivors may differ by
        one call, which some have completed and others have not, so they have to agree from which step to continue.
        See MPI_Comm_shrink in the ULFM proposal for MPI.
        """
        timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        self.engine.check_idle()
        if self.is_messaging:
            raise RuntimeError("shrink() while another thread is inside a call of this communicator")
        self.engine.enter_call()
        try:
            failed = shrinking.FailedComm(self.engine, self.place, self.internode, self.settings, self.lost())
            parts, parent_ranks = shrinking.shrink(failed, timeout_s)
            left = None
            try:
                left = Comm(*parts, parent_ranks=parent_ranks, parent=self, epoch=self.epoch + 1)
                left.wire = self.wire
                self.traced_alike(left)
                if self.internode is not None:
                    self.internode.deliver_view()
            except BaseException:   # the other ranks have it and must not wait for this rank
                leave_group(parts, left)
                raise
        finally:
            self.engine.leave_call()
        self.close()
        return left

    # Abort if no rank has. Return a set with the rank that a Timeout names, else an empty set.
    cdef object lost(self):
        cdef object named = None
        if self.engine.abort_report() is None:
            self.engine.abort(f"rank {self.rank} goes on with fewer ranks")
        try:
            self.engine.raise_over()
        except Timeout as error:
            named = error.rank
        except Error:
            pass
        return frozenset() if named is None else frozenset((named,))

    def close(self):
        """Leave the communicator. Local; ranks that still call it get RankFailed. A second close does nothing.

        Waits for calls that run in the background, up to their timeouts. Sent messages can still be received. close
        waits until messages to ranks of other hosts have arrived there, at most for the communicator's timeout; a rank
        that is not in a call takes in about 64 KiB. A message is lost if it has not arrived by then, or if the
        communicator ends while the message is in transit; its receiver gets RankFailed. A `Transfer` that is not
        complete is lost, too.
        """
        if self.engine is None or self.engine.closed_because is not None:   # None: __init__ has raised
            return
        self.engine.finish_issued()
        if self.engine.closed_because is not None:   # by another thread
            return
        if self.is_messaging:
            raise RuntimeError("close() while another thread is inside a call of this communicator")
        try:
            self.engine.close()   # returns at once: nothing is pending
        finally:   # also if a signal interrupted close
            if self.engine.closed_because is not None:
                self.close_messages()
                self.forget()

    cdef int forget(self) except -1:
        self.engine.share(None)
        self.close_descriptor()   # first: a signal may interrupt what follows
        if self.arrays is not None:
            self.arrays.close()
        self.local_sockets.close()
        self.staging_ready = True
        try:
            if self.tracer is not None:
                self.tracer.stop_quietly()
        finally:
            self.leave_others()
        return 0

    cdef int leave_others(self) except -1:
        if self.internode is not None:   # last: it may wait, and a signal may interrupt it
            self.internode.close(self.engine.timeout_s if self.engine.abort_report() is None else 0.0)
        return 0

    cdef int close_descriptor(self) except -1:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        return 0

    def _disown(self):
        """Close the descriptors in a forked child, without touching shared memory."""
        if self.engine.closed_because is None:
            self.engine.disown()
            self.local_sockets.close()
            self.close_descriptor()
        if self.internode is not None:   # even if a thread of the parent waits in close
            self.internode.disown()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        leaves_in_order = error is None or (kind is SystemExit and not error.code)
        try:
            if not leaves_in_order and self.engine.closed_because is None and self.engine.abort_report() is None:
                # The other ranks must not wait for a rank that left during a call.
                self.engine.end_by(error, True, True)
        finally:
            self.close()

    def __del__(self):
        try:
            self.close()
        except Exception:   # another thread is in a call, or the interpreter shuts down
            pass

    def __reduce__(self):
        raise TypeError("a communicator belongs to its process; send its World instead, and join it there")

    def __repr__(self):
        state = "" if self.engine.closed_because is None else ", closed"
        return f"<shmring.Comm rank {self.rank} of {self.size}{state}>"

    # -- memory --

    cdef int allocate_staging(self) except -1:
        """Allocate the pages of this rank's staging buffer before it is first touched."""
        if self.engine.closed_because is not None:
            return 0   # drive raises Closed
        offset, nbytes = self.engine.own_ring()
        try:
            segments.allocate(self.fd, offset, nbytes, purpose="a staging buffer")
            self.segment.populate(offset, nbytes)
        except BaseException as error:
            self.engine.end_by(error, True, False, b"allocating its staging buffer")
            raise
        self.staging_ready = True
        return 0

    cdef int allocate_message_ring(self, size_t offset, size_t nbytes) except -1:
        """Allocate the pages of a message ring from this rank to another before it is first touched."""
        segments.allocate(self.fd, offset, nbytes, purpose="a message ring")
        self.segment.populate(offset, nbytes)
        return 0


@atexit.register
def _close_all():
    for comm in list(open_comms):
        try:
            comm.close()
        except RuntimeError:   # a daemon thread is inside a call; close the other communicators anyway
            pass


def _disown_all():
    for comm in list(open_comms):
        comm._disown()


os.register_at_fork(after_in_child=_disown_all)


# Release a group that this rank cannot use. comm: the communicator made of `parts`, or None if making it raised.
cdef int leave_group(parts, Comm comm) except -1:
    if comm is None:
        parts.abandon()
    else:
        comm.close()
    return 0
