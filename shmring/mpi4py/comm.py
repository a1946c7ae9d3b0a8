"""Communicators: how they are made, compared and freed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NoReturn

import numpy as np

from ..errors import Error
from . import errors, handles
from .calls import Context
from .constants import INTEGERS, LIBRARY_CONTEXT
from .errhandlers import Handling, Policy, run
from .groups import Group, Members
from .info import INFO_NULL, Hinted, Hints, Info
from .messages import handle, integer_of
from .object_calls import Objects
from .objects import pickle
from .point_to_point import BufferedSends, completed
from .refused import refuse_methods
from .requests import Request

_UNDEFINED = INTEGERS["UNDEFINED"]
SENDS_S = 5.0  # how long the end of a communicator waits for messages whose sends are not complete
_FIRST_GROUP_TAG = 2**30  # of messages in the private context; those among neighbours have lower tags
_MOST_SHARED_NBYTES = 4096
FOREVER_S = 1e9  # the timeout of calls, as MPI has none; warnings about long waits stay


class Communicator(Context):
    """A communicator: that of shmring, its processes, and what the program attached to it."""

    every: ClassVar[weakref.WeakSet[Communicator]] = weakref.WeakSet()

    def __init__(
        self,
        rank: int,
        processes: tuple[int, ...],
        secret: bytes,
        comm: Any = None,
        open_comm: Any = None,
    ) -> None:
        super().__init__(rank, len(processes), comm, open_comm)
        self.every.add(self)
        self.processes, self.secret = processes, secret
        self.children: dict[Any, int] = {}
        self.name = ""
        self.hints = Hints()
        self.errhandler = Policy.handler
        self.attributes: dict[int, Any] | None = None
        self.topology: Any = None
        self.buffered = BufferedSends()
        self.locks: dict[Any, threading.Lock] = {}
        self.constant: Any = None  # the predefined handle, if there is one

    def complete_sends(self, most_s: float) -> None:
        """Wait until the messages that this rank sends have left it, at most `most_s` seconds."""
        deadline_s = time.monotonic() + most_s
        for transfer in self.transfers(is_send=True):
            with contextlib.suppress(Error, TimeoutError):  # a receiver may have ended, or not receive
                transfer.wait(max(0, deadline_s - time.monotonic()))

    def lock_of(self, key: Any) -> threading.Lock:
        return self.locks.setdefault(key, threading.Lock())

    def failure(self, code: int | None, reason: Any) -> BaseException:
        """Return the exception for an error, after the error handler ran."""
        if code is None:
            code = errors.code_of(reason)
        run(self, self.own_handle(), code)
        return errors.Exception(code, str(reason))

    def own_handle(self) -> Any:
        """Return the handle that an error handler gets."""
        return self.constant or handle(Intra.cls, self)

    def end_job(self, code: int) -> NoReturn:
        """End the processes of this communicator."""
        reason = f"Abort({code}) on rank {self.rank}"
        try:
            print(reason, file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            self.comm.abort(reason)
        finally:
            os._exit(code & 0xFF or 1)  # the kernel keeps eight bits: 256 would be a success

    def next_child(self, *what: Any) -> tuple[bytes, int]:
        """Return the secret of the next child of this kind, the same on all its processes, and its number."""
        number = self.children.setdefault(what, 0) + 1
        return hashlib.sha256(self.secret + repr((what, number)).encode()).digest(), number

    def child(self, make: Callable[[Any], Any], *what: Any) -> Communicator | None:
        """Return the communicator of a child that make(self.comm) makes; None if this process is not in it.

        This is one call: a rank that raises before it counts the child ends the communicator. Otherwise its
        later children would have other secrets than those of the other ranks.
        """
        return self.comm.run_steps(self._child, make, what)

    def _child(self, make: Callable[[Any], Any], what: tuple[Any, ...]) -> Communicator | None:
        comm = make(self.comm)
        secret, self.children[what] = self.next_child(*what)
        if comm is None:
            return None
        ranks = comm.parent_ranks or range(self.size)
        return Communicator(comm.rank, tuple(self.processes[rank] for rank in ranks), secret, comm)

    @property
    def process(self) -> int:
        """The number of this process in COMM_WORLD."""
        return self.processes[self.rank]

    def group_child(self, members: tuple[int, ...], tag: Any) -> Communicator:
        """Return the communicator of some processes, which all call this; no other process does."""
        unknown = [process for process in members if process not in self.processes]
        if unknown:
            raise self.failure(errors.ERR_GROUP, f"processes {unknown} are not in the communicator")
        what = ("group", members, tag)
        secret, number = self.next_child(*what)
        ranks = tuple(self.processes.index(process) for process in members)
        tag_of_share = _FIRST_GROUP_TAG + int.from_bytes(secret[:4], "big") % (2**31 - _FIRST_GROUP_TAG)

        def share(value: Any) -> Any:
            return self._share(value, ranks, tag_of_share)

        made = Communicator(members.index(self.process), members, secret)
        with errors.Translating(self):
            self.open_group(made, ranks, secret, share, self.children, what, number)
        return made

    def _share(self, value: Any, ranks: tuple[int, ...], tag: int) -> Any:
        """Return the first rank's value on all of these ranks."""
        comm, turns = self.comm, self.turns
        if self.rank == ranks[0]:
            data = np.frombuffer(pickle.dumps(value), np.uint8)
            sends = [
                turns.take(partial(comm.isend, data, rank, tag, context=LIBRARY_CONTEXT))
                for rank in ranks[1:]
            ]
            for sent in sends:
                turns.wait_for(sent)
            return value
        room = np.empty(_MOST_SHARED_NBYTES, np.uint8)
        received = turns.wait_for(
            turns.take(partial(comm.irecv, room, ranks[0], tag, context=LIBRARY_CONTEXT))
        )
        return pickle.loads(room[: received.nbytes])


class Intra:
    """The class Intracomm and its handle COMM_WORLD, which modules above this one set."""

    cls: Any = None
    world: Any = None


class Comm(handles.Named, handles.Attributed, Handling, Hinted, Objects):
    """A communicator."""

    _null_error = errors.ERR_COMM

    def _comm(self) -> Communicator:
        return self._handled()

    size = property(Objects.Get_size)
    rank = property(Objects.Get_rank)

    def _null(self) -> Any:
        """Return a null handle for a new communicator: of this class, or an Intracomm if this has a topology.

        It is made first: without memory for it, no rank enters the collective.
        """
        return handle(type(self) if not issubclass(type(self), Topological) else Intra.cls, None)

    def _new(self, make: Any, *what: Any) -> Any:
        """Return a handle of this handle's class to a child, as `_made` returns it."""
        new = self._null()
        new._ref = self._made(make, *what)
        return new

    def _made(self, make: Any, *what: Any) -> Communicator | None:
        context = self._comm()
        with errors.Translating(context):
            return context.child(make, *what)

    def Get_group(self) -> Group:
        """Return the group of the processes."""
        context = self._comm()
        return handle(Group, Members(context.processes, context.processes[context.rank]))

    group = property(Get_group)

    def Compare(self, comm: Any) -> int:
        """Return IDENT, CONGRUENT (the same processes), SIMILAR (in another order) or UNEQUAL."""
        a, b = self._comm(), comm._comm()
        if a is b:
            return INTEGERS["IDENT"]
        if a.processes == b.processes:
            return INTEGERS["CONGRUENT"]
        return INTEGERS["SIMILAR" if sorted(a.processes) == sorted(b.processes) else "UNEQUAL"]

    def Dup(self, info: Info | None = None) -> Any:
        """Return a communicator of the same processes, with the same attributes and topology."""
        dup = handle(type(self), None)
        dup._ref = child = self._made(lambda comm: comm.dup(), "dup")
        assert child is not None
        try:
            child.topology, child.errhandler = self._ref.topology, self._ref.errhandler
            child.hints.update(self._ref.hints if info is None else info.items())
            handles.copy_attributes(self, dup)
        except BaseException as error:  # the other ranks may use their child
            child.comm.abort(f"{type(error).__name__} in Dup on rank {child.rank}")
            raise
        return dup

    Clone = Dup

    def Dup_with_info(self, info: Info) -> Any:
        """Return a communicator of the same processes, with other hints."""
        return self.Dup(info)

    def Idup(self, info: Info | None = None) -> tuple[Any, Request]:
        """Return a communicator of the same processes, and a request, which is complete."""
        dup = self.Dup(info)
        return dup, completed(dup._ref)

    Idup_with_info = Idup

    def Create(self, group: Group) -> Any:
        """Return the communicator of a group; a null one to processes outside. All processes call this."""
        context = self._comm()
        members = self._refusing("barrier", self._members_of, group)
        me = context.processes[context.rank]
        color = context.processes.index(members[0]) if me in members else None
        key = members.index(me) if me in members else 0
        return self._new(lambda comm: comm.split(color, key), "create")

    def _members_of(self, group: Group) -> tuple[int, ...]:
        if not isinstance(group, Group):
            raise TypeError(f"a Group is needed, not {type(group).__name__}")
        members = group._members().processes
        unknown = [process for process in members if process not in self._ref.processes]
        if unknown:
            raise self._ref.failure(errors.ERR_GROUP, f"processes {unknown} are not in the communicator")
        return members

    def Split(self, color: int = 0, key: int = 0) -> Any:
        """Return the communicator of the processes of one color, in the order of their keys."""
        color, key = self._refusing("barrier", lambda: (integer_of(color), integer_of(key)))
        number = None if color == _UNDEFINED else color
        return self._new(lambda comm: comm.split(number, key), "split")

    def Split_type(self, split_type: int, key: int = 0, info: Info = INFO_NULL) -> Any:
        """Return the communicator of the processes that share something: memory, for COMM_TYPE_SHARED."""
        key = self._refusing("barrier", integer_of, key)
        names = ("SHARED", "HW_GUIDED", "HW_UNGUIDED", "RESOURCE_GUIDED")
        shared, guided, unguided, resource = (INTEGERS[f"COMM_TYPE_{name}"] for name in names)
        if split_type not in (_UNDEFINED, shared, guided, unguided, resource):
            context = self._comm()
            context.comm.refuse("barrier")
            raise context.failure(errors.ERR_ARG, f"{split_type} is not a type of split")
        is_shared = split_type == shared or (
            split_type in (guided, resource) and info.get("mpi_hw_resource_type") == "mpi_shared_memory"
        )
        return self._new(lambda comm: comm.split(comm.node if is_shared else None, key), "split_type")

    def Free(self) -> None:
        """Free the communicator. Receives that were begun on it go on, until their requests are complete."""
        context = self._comm()
        if context.constant is not None:
            raise context.failure(errors.ERR_COMM, "a predefined communicator is not freed")
        handles.delete_attributes(self)
        context.buffered.flush()
        context.complete_sends(SENDS_S)
        if not context.transfers(is_send=False):
            context.comm.close()
        self._ref = None

    Disconnect = Free

    def Is_inter(self) -> bool:
        """Return whether this is an intercommunicator; shmring's MPI has none."""
        self._comm()
        return False

    def Is_intra(self) -> bool:
        """Return whether this is no intercommunicator."""
        return not self.Is_inter()

    is_inter = property(Is_inter)
    is_intra = property(Is_intra)

    def Get_topology(self) -> int:
        """Return CART, GRAPH, DIST_GRAPH or UNDEFINED."""
        topology = self._comm().topology
        return _UNDEFINED if topology is None else int(topology.kind)

    topology = property(Get_topology)

    @property
    def is_topo(self) -> bool:
        """True if the processes have a topology."""
        return self._ref is not None and self._ref.topology is not None

    @classmethod
    def Get_parent(cls) -> Any:
        """Return the null intercommunicator: no process was spawned."""
        return Intercomm()

    def Abort(self, errorcode: int = 0) -> NoReturn:
        """End all processes of the communicator, with this exit code."""
        self._comm().end_job(errorcode)

    def _predefined_attributes(self) -> dict[int, Any]:
        context = self._comm()
        return {
            INTEGERS["TAG_UB"]: 2**31 - 1,
            INTEGERS["WTIME_IS_GLOBAL"]: context.size == 1 or context.comm.num_nodes == 1,
            INTEGERS["IO"]: INTEGERS["ANY_SOURCE"],
            INTEGERS["UNIVERSE_SIZE"]: None,
            INTEGERS["APPNUM"]: None,
            INTEGERS["LASTUSEDCODE"]: errors.last_used_code(),
        }


class Topological:
    """Mark of the classes whose processes have a topology: what is split off them has none."""

    __slots__ = ()


class Intercomm(Comm):
    """A communicator of two groups. shmring's MPI has only null ones."""

    @classmethod
    def _check_ref(cls, ref: Any) -> None:
        if ref is not None:
            raise TypeError("the communicator has one group")

    def Merge(self, high: bool = False) -> Any:
        """Refused: there are no intercommunicators."""
        self._comm()

    def Get_remote_size(self) -> Any:
        """Refused: there are no intercommunicators."""
        self._comm()

    Get_remote_group = Get_remote_size

    remote_group = property(Get_remote_group)
    remote_size = property(Get_remote_size)


refuse_methods(
    Comm,
    "Revoke Is_revoked Get_failed Ack_failed Agree Iagree Shrink Ishrink",
    "recovery from failures",
    "catch shmring's RankFailed and use shmring.Comm.shrink",
)
refuse_methods(
    Comm, "Psend_init Precv_init", "partitioned messages", "send each part as a message of its own"
)
refuse_methods(Comm, "Join", "connections between jobs", "start all processes as one job")
refuse_methods(Intercomm, "Create_from_groups", "intercommunicators", "use one communicator of both groups")

COMM_NULL = Comm()
handles.predefine({"COMM_NULL": COMM_NULL})
