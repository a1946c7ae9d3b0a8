# Comm: construction, shared arrays, objects, groups, and closing. The calls of a communicator are in collectives,
# vector, fused and point_to_point.

import atexit
import math
import os
import weakref

from .._arrays.operands cimport Memory
from .._core.group cimport ALL_GATHER_V, ALLOCATE, BROADCAST, FORM_GROUP, GATHER_V, SCATTER_V, SHARE, SPLIT, SR_SUM
from .._core.timeouts cimport ns_of, timeout_s_of
from .._engine.engine cimport Engine
from .collectives cimport algorithm_number
from .point_to_point cimport Messages

from .._diagnostics import failures
from .._lifecycle import groups, shrink as shrinking
from .._system import segments
from . import objects
from .._arrays import shared_array as shared
from .._arrays.allocator import MOST_NBYTES, Arrays, filling, whole_pages
from .._arrays.allocator import check as check_array
from ..errors import Error, Timeout
from .error_feedback import Residuals

open_comms = weakref.WeakSet()   # of this process


cdef class Comm(Messages):
    """One rank's place in a group of ranks, and the collectives between them.

    Made by `shmring.init` or `shmring.spawn`; a context manager. Every collective is called by all ranks, in the
    same order, with matching arguments. Results are the same bits on every rank: values are folded in rank order.
    Errors: TypeError or ValueError for an argument that is wrong here (the others get `Mismatch`), else one of
    `shmring.Error`, the same on every rank and final for this communicator.
    """

    def __init__(self, Engine engine, links, segment, int fd, settings, place, internode=None, parent_ranks=None,
                 Comm parent=None, epoch=0):
        # Take ownership first: from here on `close` releases everything, whatever raises.
        self.engine = engine
        self.fd = fd
        self.links = links
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
        self.arrays = Arrays(engine, links, settings.segment)
        engine.share(self.arrays)
        self.staging_ready = engine.size == 1
        open_comms.add(self)
        failures.rehearse(engine)

    # Origin of the ranks, for traces: the world and the rank numbers in it.
    cdef int descend_from(self, Comm parent) except -1:
        ranks = self.parent_ranks
        if parent is None:
            self.origin = self.engine.flight.nonce, self.own_rank, self.nranks, self.place.node
        else:
            self.origin = parent.origin
            self.world_ranks = tuple(ranks if parent.world_ranks is None else [parent.world_ranks[r] for r in ranks])
        return 0

    @property
    def rank(self):
        """This rank's number, 0 to size - 1."""
        return self.place.rank

    @property
    def size(self):
        """How many ranks there are."""
        return self.place.size

    @property
    def local_rank(self):
        """This rank's number among the ranks of its host."""
        return self.place.local_rank

    @property
    def local_size(self):
        """How many ranks share this host's memory."""
        return self.place.local_size

    @property
    def node(self):
        """This host's number, 0 to num_nodes - 1."""
        return self.place.node

    @property
    def num_nodes(self):
        """How many hosts there are."""
        return self.place.num_nodes

    def run_steps(self, function, *arguments, bint begun=False, **keywords):
        """Run function(...), which makes several calls of this communicator that are one to its caller.

        For who wraps a communicator. An exception that leaves the function after its first call, a KeyboardInterrupt
        too, ends the communicator: every other rank raises `Aborted` in place of waiting in the next one, or of going
        on with other calls than this rank. Before the first call nothing has happened. Excepted are shmring's own
        errors, arguments that are refused (`refuse`), and errors that all ranks raise alike, marked as such by
        `shmring.errors.agreed`. Meanwhile other threads' calls raise RuntimeError. begun: the function continues what
        made calls before.
        """
        return self.engine.run_steps(function, *arguments, begun=begun, **keywords)

    # -- groups --

    def split(self, color, key=0, *, timeout=None):
        """Collective: a communicator for each color, of the ranks that give it, ordered by key and then by rank.

        color and key: integers. Returns this rank's one; None for color None. Each goes on by itself: an abort, an
        error or the end of one leaves the others as they are, but a rank's death shows in all that it is in.
        timeout: seconds. A group that cannot begin raises on its ranks alone, as OutOfMemory does. See MPI_Comm_split.
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
        """Collective: a communicator of the ranks in the list, which is the same on all; ranks[i] is its rank i.

        Returns it; None on the other ranks, which call it, too. Otherwise as `split`.
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
        """Collective: another communicator of the same ranks, as `split(0)`."""
        return self.split(0, timeout=timeout)

    cdef object form(self, list members, double timeout_s):
        if self.internode is None:
            formed = groups.form(self.engine, self.links, members, self.settings, timeout_s)
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
        return self.engine.run_own_steps(self.arrays.empty, lengths, numpy_dtype, timeout_s)

    def zeros(self, shape, dtype="float64", *, timeout=None):
        """Collective: `empty`, with the promise that it holds zeros."""
        return self.empty(shape, dtype, timeout=timeout)

    def full(self, shape, fill_value, dtype=None, *, timeout=None):
        """Collective: `empty`, filled with `fill_value`; its dtype unless one is given."""
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
        """Collective: an `empty` of a's shape and dtype that holds a copy of it."""
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
        """Collective: an array of another library becomes one that every rank of the host maps, where it lies.

        x: a `Memory` with an owner, of as many bytes on every rank, whole pages in a mapping of their own, as
        `tensor.share_memory_()` makes them. Returns an `Adoption`; as long as that lives, collectives on parts of the
        array copy nothing. What the array holds stays. Nobody may write to it meanwhile, nor unmap it before the
        adoption is released. timeout: seconds. Raises ValueError, or OutOfMemory; then nothing has changed.
        """
        try:
            if not isinstance(x, Memory) or x.owner is None or x.readonly:
                raise TypeError(f"x is {x!r:.60}; give a shmring.Memory with an owner, not a readonly one")
            nbytes = whole_pages(x.nbytes)
            try:
                segments.check_own_mapping(x.address, nbytes)
            except Error:
                pass   # of this host, not of x: `Arrays.adopt` looks again, and what it raises all ranks raise
            self.arrays.check_not_adopted(x.address, nbytes)
            timeout_s = timeout_s_of(self.engine.timeout_s, timeout)
        except Exception:
            self.engine.refuse(ALLOCATE)
            raise
        return self.engine.run_own_steps(self.arrays.adopt, x.address, nbytes, x.owner, timeout_s)

    def shared(self, shape, dtype="float64", *, locks=0, timeout=None):
        """Collective: one array, zeros at first, that all ranks of the host see: what one writes is there for all.

        shape, dtype and locks are the same on every rank. Returns a `SharedArray`: its `fence()` is a barrier after
        which all see what was written before it; `with array.lock(i):`, i below locks, keeps other ranks from what
        they agree that lock i guards. Freed when no rank refers to it any more. In a collective it can be given, not
        written to. timeout: seconds. Raises OutOfMemory, on every rank alike.
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
        """root's object, for every rank: a copy of it on the others, whose `item` is ignored.

        Anything that pickles; arrays inside travel beside the pickle. timeout: seconds, of each of its calls.
        """
        frame = self.frame_of(BROADCAST, item, root, False)
        received = self.engine.run_own_steps(objects.broadcast, self, frame, root, timeout)
        return item if frame is not None else received

    def all_gather_object(self, item, *, timeout=None):
        """Every rank's object on every rank: a list by rank of copies, the own one included."""
        frame = self.frame_of(ALL_GATHER_V, item, 0, True)
        return self.engine.run_own_steps(objects.all_gather, self, frame, timeout, may_be_step=True)

    def gather_object(self, item, root=0, *, timeout=None):
        """Every rank's object on the root, which returns a list of copies by rank; the others return None."""
        frame = self.frame_of(GATHER_V, item, root, True)
        return self.engine.run_own_steps(objects.gather, self, frame, root, timeout, may_be_step=True)

    def scatter_object(self, items=None, root=0, *, timeout=None):
        """One of the root's objects for each rank: a copy of items[rank]; `items` is ignored elsewhere."""
        try:
            frames = None
            if self.root_number(root) == self.own_rank:
                frames = [objects.pack(item) for item in items]
                if len(frames) != self.nranks:
                    raise ValueError(f"there are {len(frames)} items for {self.nranks} ranks; give one for each")
        except Exception:
            self.engine.refuse(SCATTER_V)
            raise
        return self.engine.run_own_steps(objects.scatter, self, frames, root, timeout, may_be_step=True)

    # Return the frame of this rank's object, None if it sends none. Refuse a wrong root or an unpicklable object.
    cdef object frame_of(self, int kind, object item, object root, bint all_give):
        try:
            is_root = self.root_number(root) == self.own_rank
            return objects.pack(item) if is_root or all_give else None
        except Exception:
            self.engine.refuse(kind)
            raise

    # -- the rest --

    def stats(self):
        """Counters of this rank since it joined, and what the engine knows of the machine.

        `calls`; `bytes_sent`, payload that this rank put where others read it; `bytes_over_wire`, payload of
        collectives that it sent to other hosts, as it was written there; `steps` of ring and tree calls; `paths`,
        calls by the path they took; `path`, that of the last one; `distance` ("near" or "far") and `round_trip_ns`
        between the cores, as rank 0 measured it; `isa` of the reduction loops.
        """
        return self.engine.stats()

    def trace(self, path):
        """Note what this rank does from now on: one track a rank, of calls and in them waits and work, for Perfetto.

        Local; usually all ranks call it, with the same path. Returns a `Trace`, a context manager; its `stop()`, or the
        end of the communicator, adds this rank's part to the file there, which is JSON in Chrome's trace event format:
        open it at ui.perfetto.dev. What another world has written there goes. Ranks of other hosts write to files of
        their own, as in t.node1.json. At most the last 65,536 slices are kept. Groups that are made meanwhile are
        traced as well. A small call takes some 0.15 µs longer. Raises OSError where the file cannot be written,
        RuntimeError while there is a trace, or another thread is inside a call.
        """
        if self.tracer is not None and self.tracer.is_automatic:   # an explicit trace replaces it
            self.tracer.stop_quietly()
        return self.begin_trace(path, False)

    def _trace_automatically(self, path):
        """For SHMRING_TRACE: as `trace`, until somebody asks for another one."""
        self.begin_trace(path, True)

    cdef object begin_trace(self, object path, bint is_automatic):
        from . import trace_file   # imported on demand: it takes some ms

        self.tracer = trace_file.Trace(self.engine, path, trace_file.Origin(*self.origin), ranks=self.world_ranks,
                                       is_automatic=is_automatic)
        return self.tracer

    # Trace a group of these ranks as long as this communicator is traced.
    cdef object traced_alike(self, Comm group):
        if self.tracer is not None and self.tracer.is_running:
            try:
                group._trace_automatically(self.tracer.asked_path)
                self.tracer.groups.add(group.tracer)
            except (MemoryError, OSError) as error:   # the group itself is usable
                self.tracer.report_untraced(error)
        return group

    def abort(self, str reason):
        """Give up: every rank's present or next call raises `Aborted` with this reason."""
        self.engine.abort(reason)

    def shrink(self, *, timeout=None):
        """Collective over the ranks that are left when the communicator is over: a new one of them, in their order.

        Called after any of `shmring.Error` but `Closed`; if nobody has given up yet this rank does. The ranks that are
        left agree who they are, also when more of them die meanwhile: those that have ended, left, or cannot be reached
        are out, and so is one that does not come within timeout seconds (the communicator's unless given), or that a
        Timeout has named already; it raises RankFailed for itself if it comes later. Returns the new communicator,
        whose `parent_ranks` are the ranks' old numbers; this one is closed, its shared arrays have become private ones.
        Ranks may differ by one call that some have completed and others have not: agree on where to go on from.
        See MPI_Comm_shrink of MPI 4's ULFM.
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

    # Abort if no rank has. Return the set of the rank that a Timeout names, else an empty set.
    cdef object lost(self):
        if self.engine.abort_report() is None:
            self.engine.abort(f"rank {self.rank} goes on with fewer ranks")
        try:
            self.engine.raise_over()
        except Error as error:
            return frozenset([error.rank] if isinstance(error, Timeout) and error.rank is not None else [])

    def close(self):
        """Leave. Local; ranks that still call the communicator get RankFailed. Closing twice is harmless.

        Waits for calls that were issued in the background, as long as they may take. Messages that were sent are still
        received. Those to ranks of other hosts may be on their way: this waits until they are there, where a rank that
        is in no call takes in some 64 KiB, and no longer than the communicator's timeout. What is late then, or under
        way when the communicator is over, is lost, and its receiver gets RankFailed; so is a `Transfer` that is not
        complete.
        """
        if self.engine.closed_because is not None:
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
        self.links.close()
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
        """In a forked child: descriptors go, shared memory stays untouched."""
        if self.engine.closed_because is None:
            self.engine.disown()
            self.links.close()
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
        """This rank's staging buffer gets its pages before it is first touched."""
        if self.engine.closed_because is not None:
            return 0   # drive says so
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
        """The ring from this rank to another gets its pages before it is first touched."""
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


# comm: the communicator made of `parts`; None if making it raised.
cdef int leave_group(parts, Comm comm) except -1:
    if comm is None:
        parts.abandon()
    else:
        comm.close()
    return 0
