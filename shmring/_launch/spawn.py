"""`spawn`: start ranks from Python, pass each a communicator, collect results or failures.

`_run_rank` runs in the rank, `_Launch` in the launcher. No rank outlives the launcher, or `spawn`; processes
that a rank has started may.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import multiprocessing
import os
import pickle
import select
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, _children  # type: ignore[attr-defined]
from typing import Any, Literal, TypeVar, overload

from .._arguments import is_no_list, seconds
from .._bootstrap.join import World, check_nprocs, world
from .._bootstrap.world import named
from .._config.optional_deps import cloudpickle_if_installed
from .._outcome import Failure, first_of, pickle_value
from .._system.deadline import Deadline
from .._system.limits import cpus_for_each, explain
from .._system.processes import describe_exit, die_with, parent_death_tie
from ..errors import Error, RankFailed, Timeout

_GRACE_S = 1.0  # after a failure, time for the others to raise RankFailed and report
_INTERRUPT_S = 0.3  # after Ctrl-C, time for ranks that the terminal has interrupted, too
_EXIT_S = 5.0  # time for a rank to exit after it has reported
_TERMINATE_S = 2.0  # time from SIGTERM to SIGKILL
_POLL_S = 0.1  # a dead rank's children can hold its sentinel open, so exit codes are also polled

# A message is a mark (1 byte), the length of its body (8 bytes), its kind (1 byte), and the body. A rank
# sends the mark first, as soon as it runs.
_MARK = b"r"
_HEAD_NBYTES = 10
_CALL, _RETURNED, _RAISED, _ANOTHER_FAILED = 0, 1, 2, 3

_log = logging.getLogger("shmring")

_Result = TypeVar("_Result")
_Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@overload
def spawn(
    fn: Callable[..., _Result],
    nprocs: int,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    method: str | None = None,
    return_exceptions: Literal[False] = False,
) -> list[_Result]: ...
@overload
def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    method: str | None = None,
    return_exceptions: bool,
) -> list[Any]: ...
def spawn(
    fn: Callable[..., Any],
    nprocs: int,
    args: Iterable[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    method: str | None = None,
    return_exceptions: bool = False,
) -> list[Any]:
    """Run `fn(comm, *args, **kwargs)` in `nprocs` new processes; return their results by rank.

    Each rank's OMP_NUM_THREADS is its share of the CPUs, unless it is set; libraries that a forked rank has
    already loaded keep their threads.

    When all ranks have returned or raised, each has 5 s to exit, for its last output and threads that are not
    daemons. Then it is stopped, with a warning.

    Parameters
    ----------
    fn : callable
        Closures, lambdas and notebook functions need cloudpickle, or "fork".
    nprocs : int
        Number of ranks.
    args : iterable
        Positional arguments after `comm`. A text, bytes, a mapping, a set or an array is a TypeError.
    kwargs : mapping, optional
        Keyword arguments.
    timeout : float, optional
        Seconds until all ranks have returned or raised.
    method : str, optional
        "fork", "spawn" or "forkserver"; by default multiprocessing's own.
    return_exceptions : bool
        True: a rank that fails does not end the others (see `Comm.shrink`), and the list has its exception in
        place of its result.

    Returns
    -------
    list
        By rank. Results and exceptions are pickled.

    Raises
    ------
    BaseException
        The first failing rank's exception, in its own type, with `.rank` and a note that holds its traceback.
        The other ranks are then stopped.
    RankFailed
        If a rank is killed or exits; its `.cause` says how.
    Timeout
        After `timeout` seconds.

    Examples
    --------
    >>> def total(comm, factor):
    ...     return comm.all_reduce(factor * comm.rank)
    >>> shmring.spawn(total, 3, args=[10], method="fork")
    [30, 30, 30]
    """
    nprocs = check_nprocs(nprocs)
    if not callable(fn):
        raise TypeError(f"fn is {fn!r}; it must be callable as fn(comm, *args, **kwargs)")
    timeout = None if timeout is None else seconds("timeout", timeout)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"the timeout is {timeout!r}; it must be more than 0 seconds, or None")
    # An array is one argument, not one for each of its rows.
    if not isinstance(args, Iterable) or is_no_list(args) or hasattr(args, "__array__"):
        whole = repr(args)
        listed = whole if len(whole) <= 60 else "..."
        raise TypeError(f"args is {whole:.60}; give a list of the arguments after comm: args=[{listed}]")
    call: _Call = (fn, tuple(args), dict(kwargs or {}))
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "spawn in a daemonic process, such as a worker of multiprocessing.Pool, which may have no "
            "children: use concurrent.futures.ProcessPoolExecutor, or Process(daemon=False)"
        )
    method = _checked_method(method) or _default_method(fn)
    payload = b"" if method == "fork" else _pickle_call(call)
    _flush_streams()
    launch = _Launch(timeout, keeps_going=return_exceptions)
    try:
        try:
            with _starting, _threads_shared(nprocs):
                launch.start(world(nprocs), method, call, payload)
        except OSError as error:
            raise explain(error, f"starting rank {launch.nstarted} of {nprocs}") from error
        except EOFError as error:
            doing = f"starting rank {launch.nstarted} of {nprocs}"
            raise Error(f"{doing} failed: multiprocessing's fork server has ended") from error
        launch.collect()
        launch.stop(_EXIT_S)
    except KeyboardInterrupt:
        launch.stop(_INTERRUPT_S, are_interrupted=True)
        raise
    finally:
        launch.stop(0.0)
    failure = launch.first_failure()
    if failure is not None:
        raise failure
    return launch.results()


def _flush_streams() -> None:
    """Flush stdout and stderr.

    multiprocessing does so before a fork, where a BrokenPipeError would pass for an error of starting a rank.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # there is none, or it is closed
            stream.flush()


# One thread at a time starts ranks: they inherit OMP_NUM_THREADS from the environment of the whole process.
_starting = threading.RLock()


def _renew_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _starting
    _starting = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


@contextlib.contextmanager
def _threads_shared(nprocs: int) -> Iterator[None]:
    """Within the block, new processes are told to use as many threads as their share of the CPUs."""
    if nprocs == 1 or os.environ.get("OMP_NUM_THREADS"):
        yield
        return
    try:
        os.environ["OMP_NUM_THREADS"] = str(cpus_for_each(nprocs))
        yield
    finally:
        os.environ.pop("OMP_NUM_THREADS", None)  # it was not set, or empty, which means the same


# --- the call and the start method ---


def _checked_method(method: str | None) -> str | None:
    methods = multiprocessing.get_all_start_methods()
    if method is not None and method not in methods:
        raise ValueError(f"method is {method!r}; allowed: {', '.join(methods)}")
    return method


def _default_method(fn: Callable[..., Any]) -> str:
    # allow_none: do not fix the start method for the rest of the process, as get_start_method() would.
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork" and not _can_import_main() and _lives_in_main(fn):
        # A main module from standard input has a __file__ that does not exist, which multiprocessing would
        # open.
        main = sys.modules["__main__"]
        pretends_a_file = getattr(main, "__spec__", None) is None and hasattr(main, "__file__")
        if pretends_a_file or cloudpickle_if_installed() is None:
            return "fork"
    return method


def _can_import_main() -> bool:
    """Return whether a new process imports the main module, as multiprocessing does for a script."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # not for the __main__.py of a package, a folder or a zip file
        return str(spec.name).rpartition(".")[2] != "__main__"
    path = getattr(main, "__file__", None)  # none in a notebook or at a prompt
    return path is not None and os.path.exists(path)


def _lives_in_main(fn: Callable[..., Any]) -> bool:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__module__", None) == "__main__"


def _pickle_call(call: _Call) -> bytes:
    problem: Exception | None = None
    # pickle would store only the names of objects in a main module that the rank cannot import.
    in_session = not _can_import_main() and (
        cloudpickle_if_installed() is not None or _lives_in_main(call[0])
    )
    if not in_session:
        try:
            return pickle.dumps(call, protocol=5)
        except MemoryError:
            raise
        except Exception as error:  # whatever __reduce__ raises
            problem = error
    cloudpickle = cloudpickle_if_installed()
    # A lock or a queue of multiprocessing: those can only be inherited.
    if cloudpickle is None and not isinstance(problem, RuntimeError):
        raise TypeError(
            f"{call[0]!r} and its arguments cannot be sent to the ranks by pickle "
            f"({problem or 'they are defined in this session'}): pip install cloudpickle, use a function "
            'of a module, or method="fork"'
        ) from problem
    try:
        return bytes((cloudpickle or pickle).dumps(call, protocol=5))
    except MemoryError:
        raise
    except Exception as error:
        raise TypeError(
            f'{call[0]!r} and its arguments cannot be sent to the ranks ({error}): use method="fork"'
        ) from error


# --- the rank's side ---


@dataclass
class _Ticket:
    """The arguments of a rank's process. A forked rank has the call in its memory; others receive it."""

    world: World
    rank: int
    launcher_pid: int
    threads: str | None  # OMP_NUM_THREADS: a forkserver's ranks do not inherit it from the launcher
    call: _Call | None
    ends: list[Connection]  # of the launcher, which a forked rank has inherited and closes


class _Reporter:
    """Send the one message from a rank to its launcher."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._fd = connection.fileno()
        self._rank = rank
        self._pid = os.getpid()
        self._done = False

    def is_of_this_process(self) -> bool:
        """Return whether this is the rank's process, and not a child that the rank has forked."""
        return os.getpid() == self._pid

    def returned(self, result: Any) -> None:
        try:
            body = pickle_value(result)
        except Exception as error:
            raise RuntimeError(
                f"rank {self._rank} returned a {type(result).__name__} that cannot be pickled: {error}"
            ) from error
        self._send(_RETURNED, body)

    def raised(self, error: BaseException) -> None:
        if not self._done:
            self._send(_RAISED, pickle.dumps(Failure.of(error, self._rank)))

    def _send(self, kind: int, body: bytes) -> None:
        self._done = True
        if not self.is_of_this_process():
            return  # the outcome of a forked child is not the rank's
        for part in (_head(kind, body)[len(_MARK) :], body):
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(self._fd, rest) :]


def _run_rank(ticket: _Ticket, connection: Connection) -> None:
    """Run a rank: the target of its process."""
    _tie_to_launcher(ticket.launcher_pid)
    for end in ticket.ends:
        end.close()
    if ticket.threads:
        os.environ["OMP_NUM_THREADS"] = ticket.threads
    reporter = _Reporter(connection, ticket.rank)
    with contextlib.suppress(BrokenPipeError, ConnectionError):  # the launcher has closed the connection
        os.write(connection.fileno(), _MARK)
        try:
            body = _receive_call(connection.fileno())  # an error if the launcher has given up
            fn, args, kwargs = ticket.call or pickle.loads(body)
            from .. import init

            with init(ticket.world, rank=ticket.rank, check=_launchers_check(connection.fileno())) as comm:
                # Report before the communicator closes, so that this failure precedes those that other ranks
                # report. Also a result may be a view of the communicator's memory.
                try:
                    reporter.returned(fn(comm, *args, **kwargs))
                except BaseException as error:
                    reporter.raised(error)
                    raise
        except BaseException as error:  # multiprocessing must not print it: spawn raises it
            if not reporter.is_of_this_process():
                raise
            reporter.raised(error)
    connection.close()


def _tie_to_launcher(launcher_pid: int) -> None:
    parent = multiprocessing.parent_process()
    if os.getppid() == launcher_pid or parent is None:
        parent_death_tie(launcher_pid)()
    else:  # the parent is the fork server
        die_with(launcher_pid, parent.sentinel)


def _head(kind: int, body: bytes) -> bytes:
    return _MARK + len(body).to_bytes(8, "little") + bytes([kind])


def _receive_call(fd: int) -> bytearray:
    inbox = _Inbox()
    while inbox.kind is None:
        if not inbox.read(fd):
            raise EOFError("the launcher closed its connection")
    return inbox.body


def _launchers_check(fd: int) -> Callable[[], None]:
    """Return a function that raises RankFailed once the launcher has sent that another rank has failed."""
    inbox, poller = _Inbox(), select.poll()
    poller.register(fd, select.POLLIN)

    def check() -> None:
        while inbox.kind is None and poller.poll(0) and inbox.read(fd):
            pass
        if inbox.kind is not None:
            rank, words = pickle.loads(inbox.body)
            raise RankFailed(f"rank {rank} failed before all ranks had met: {words}", rank=rank, cause=words)

    return check


class _Inbox:
    """A message that is being received; `kind` is None until it is complete."""

    def __init__(self) -> None:
        self.kind: int | None = None
        self.body = bytearray()
        self._head = b""
        self._filled = 0

    @property
    def begun(self) -> bool:
        """Return whether the other side has sent its mark."""
        return bool(self._head)

    def read(self, fd: int) -> bool:
        """Read once; return False at end of file. Raises BlockingIOError if no data are available."""
        if len(self._head) < _HEAD_NBYTES:
            part = os.read(fd, _HEAD_NBYTES - len(self._head))
            self._head += part
            got = len(part)
            if len(self._head) == _HEAD_NBYTES:
                self.body = bytearray(int.from_bytes(self._head[len(_MARK) : -1], "little"))
        else:
            got = os.readv(fd, [memoryview(self.body)[self._filled :]])
            self._filled += got
        if len(self._head) == _HEAD_NBYTES and self._filled == len(self.body):
            self.kind = self._head[-1]
        return got > 0


# --- the launcher's side ---


@dataclass
class _Rank:
    """A started rank as the launcher sees it."""

    rank: int
    process: BaseProcess
    connection: Connection
    unsent: list[memoryview]
    is_child: bool = True  # of this process, not of the fork server
    inbox: _Inbox = field(default_factory=_Inbox)
    settled: bool = False  # the rank returned or failed

    @property
    def is_started(self) -> bool:
        return self.process.pid is not None

    @property
    def has_ended(self) -> bool:
        """Return whether the process has ended. Its exit code may be unknown then."""
        try:
            pid = self.process.pid
            if pid is None or self.process.exitcode is not None:
                return True
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # SIGCHLD is ignored, or other code has waited for all children
            return self.is_child
        except ValueError:  # released
            return True
        return False

    def release(self) -> None:
        """Wait for the end of the process, and give back what it used here.

        After an exception, call it again.
        """
        self.connection.close()
        with contextlib.suppress(ValueError):  # closed before, or its exit code is unknown
            if self.is_started:
                self.process.join()
            self.process.close()
        _children.discard(self.process)  # multiprocessing keeps those whose exit code it does not know


def _start_forkserver() -> None:
    """Start multiprocessing's server of forks with SIGCHLD not blocked: it would inherit the mask.

    Without the signal it never reports that a process has ended, and every wait for one lasts for ever.
    """
    from multiprocessing import forkserver

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:  # a handler of a signal that has waited may raise at once
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Launch:
    """The ranks of one `spawn`, from their start until all have ended."""

    def __init__(self, timeout_s: float | None, *, keeps_going: bool = False) -> None:
        self.failures: dict[int, Failure] = {}
        self._keeps_going = keeps_going
        self._timeout_s = timeout_s
        self._deadline = Deadline(float("inf") if timeout_s is None else timeout_s)
        self._ranks: list[_Rank] = []
        self._blobs: dict[int, bytearray] = {}
        try:
            self._selector = selectors.DefaultSelector()
        except OSError as error:
            raise explain(error, "starting ranks") from error

    def start(self, world: World, method: str, call: _Call, payload: bytes) -> None:
        context: Any = multiprocessing.get_context(method)
        if method == "fork":
            from .. import init  # noqa: F401  once here, and not in every rank
        elif method == "forkserver":
            _start_forkserver()
        message = memoryview(_head(_CALL, payload) + payload)
        ends: list[Connection] = []
        for rank in range(world.nprocs):
            ours, theirs = context.Pipe(duplex=True)
            if method == "fork":
                ends.append(ours)
            threads = os.environ.get("OMP_NUM_THREADS")
            ticket = _Ticket(world, rank, os.getpid(), threads, None if payload else call, ends)
            process = context.Process(
                target=_run_rank, args=(ticket, theirs), name=f"shmring-rank-{rank}", daemon=False
            )
            # Before it starts, so that `stop` ends it if an exception comes just after.
            self._ranks.append(_Rank(rank, process, ours, [message], method != "forkserver"))
            try:
                process.start()
            finally:
                theirs.close()
            os.set_blocking(ours.fileno(), False)
            self._register(self._ranks[-1])

    @property
    def nstarted(self) -> int:
        """Return the number of ranks started so far."""
        return sum(rank.is_started for rank in self._ranks)

    def collect(self) -> None:
        """Block until all ranks have returned or failed, or the grace after a failure or the timeout ends."""
        grace: Deadline | None = None
        while any(not rank.settled for rank in self._ranks):
            if grace is not None and grace.is_over():
                return
            if self._deadline.is_over() and (self._keeps_going or not self.failures):
                self._out_of_time()
                return
            ready = self._selector.select(_POLL_S)
            for key, events in ready:
                if key.fd != key.data.process.sentinel:
                    self._exchange(key.data, events)
            for rank in [key.data for key, _ in ready] or self._ranks:
                if not rank.settled and rank.has_ended:
                    self._settle_exited(rank)
            if self.failures and not self._keeps_going and grace is None:
                grace = Deadline(_GRACE_S)

    def stop(self, patience_s: float, *, are_interrupted: bool = False) -> None:
        """End all ranks: wait, then send SIGTERM, then SIGKILL. After an exception, send SIGKILL at once.

        Ranks that have neither reported nor been interrupted will not exit by themselves: no wait for them.
        """
        exiting = [rank for rank in self._ranks if rank.settled or are_interrupted]
        others = [rank for rank in self._ranks if not (rank.settled or are_interrupted)]
        try:
            self._terminate(others)
            self._wait_for_exits(exiting, patience_s)  # their last output is still in their buffers
            late = [rank.rank for rank in exiting if not rank.has_ended]
            if late and patience_s > 0 and not are_interrupted:
                what = (
                    "%s returned or raised, but did not exit within %g s and will be stopped: unflushed "
                    "output, and the work of threads that are not daemons, may be lost"
                )
                _log.warning(what, named(late), patience_s)
            self._terminate(exiting)
            self._wait_for_exits(self._ranks, _TERMINATE_S)
        finally:
            for rank in self._ranks:
                if not rank.has_ended:
                    rank.process.kill()
            while self._ranks:
                self._ranks[-1].release()
                self._ranks.pop()
            self._selector.close()

    def first_failure(self) -> BaseException | None:
        """Return the exception of the first cause; None if no rank failed, or if exceptions are results."""
        if not self.failures or self._keeps_going:
            return None
        rank = first_of(self.failures)
        return self.failures[rank].exception(rank)

    def results(self) -> list[Any]:
        """Return the results by rank; exceptions are results if the other ranks go on."""
        exceptions = {rank: failure.exception(rank) for rank, failure in self.failures.items()}
        results = {rank: self._result_of(rank, blob) for rank, blob in self._blobs.items()}
        return [result for _, result in sorted((results | exceptions).items())]

    def _result_of(self, rank: int, blob: bytearray) -> Any:
        try:
            return pickle.loads(blob)
        except (Exception, SystemExit) as error:  # not Ctrl-C
            words = f"{type(error).__name__}: {error}"
            problem = RuntimeError(f"the result of rank {rank} cannot be unpickled here: {words}")
            problem.rank = rank  # type: ignore[attr-defined]
            if not self._keeps_going:
                raise problem from error
            problem.__cause__ = error
            return problem

    def _register(self, rank: _Rank) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if rank.unsent else 0)
        self._selector.register(rank.connection.fileno(), events, rank)
        self._selector.register(rank.process.sentinel, selectors.EVENT_READ, rank)

    def _exchange(self, rank: _Rank, events: int) -> None:
        fd = rank.connection.fileno()
        if events & selectors.EVENT_WRITE and rank.unsent:
            try:
                rank.unsent[0] = rank.unsent[0][os.write(fd, rank.unsent[0]) :]
                if not rank.unsent[0]:
                    del rank.unsent[0]
            except BlockingIOError:
                pass
            except OSError:  # the rank has closed its end; what it sent before is still to be read
                rank.unsent.clear()
            if not rank.unsent:
                self._selector.modify(fd, selectors.EVENT_READ, rank)
        try:
            open_still = not events & selectors.EVENT_READ or rank.inbox.read(fd)
        except BlockingIOError:
            return
        except OSError:  # the rank has ended; its exit code says how
            open_still = False
        if rank.inbox.kind is not None:
            self._settle(rank)
        elif not open_still:
            self._ignore(fd)

    def _settle(self, rank: _Rank) -> None:
        rank.settled = True
        if rank.inbox.kind == _RETURNED:
            self._blobs[rank.rank] = rank.inbox.body
        else:
            self._add_failure(rank.rank, pickle.loads(rank.inbox.body))
        self._ignore(rank.connection.fileno())
        self._ignore(rank.process.sentinel)

    def _add_failure(self, failed: int, failure: Failure) -> None:
        """Note a rank's failure, and end the wait for it in init(), if it has not joined.

        Rank 0 notifies the others in init(). If they found out by themselves, rank 0 could blame them.
        """
        self.failures[failed] = failure
        first = next(iter(self.failures))  # rank 0's failure may be a consequence of the first
        body = pickle.dumps((first, self.failures[first].words))
        for rank in self._ranks if failed == 0 else self._ranks[:1]:
            with contextlib.suppress(KeyError):  # it has closed its connection
                if not rank.settled:
                    fd = rank.connection.fileno()
                    self._selector.modify(fd, selectors.EVENT_READ | selectors.EVENT_WRITE, rank)
                    rank.unsent.append(memoryview(_head(_ANOTHER_FAILED, body) + body))

    def _ignore(self, fd: int) -> None:
        """Stop watching fd. It may have been removed already, if the connection's other end has closed."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(fd)

    def _settle_exited(self, rank: _Rank) -> None:
        """Settle a rank that has exited: by the message that it had sent, else its exit is a failure."""
        with contextlib.suppress(OSError):
            while rank.inbox.kind is None and rank.inbox.read(rank.connection.fileno()):
                pass
        if rank.inbox.kind is not None:
            self._settle(rank)
            return
        rank.settled = True
        exit_code = rank.process.exitcode
        words = "unknown exit status, as SIGCHLD is ignored or other code waits for all children"
        if exit_code is not None:
            words = describe_exit(exit_code)
        if exit_code == 0:
            words += " before it returned a result"
        if exit_code == 1 and not rank.inbox.begun:
            words += ' before it could begin (a script needs `if __name__ == "__main__":` around spawn)'
        self._add_failure(rank.rank, Failure(words, ended=True))
        self._ignore(rank.connection.fileno())
        self._ignore(rank.process.sentinel)

    def _out_of_time(self) -> None:
        late = [rank.rank for rank in self._ranks if not rank.settled]
        error = Timeout(
            f"{named(late)} of {len(self._ranks)} did not finish within {self._timeout_s:g} s and "
            f"{'were' if len(late) > 1 else 'was'} stopped",
            rank=late[0],
        )
        for rank in late:
            self.failures[rank] = Failure(str(error), copy.copy(error))

    def _terminate(self, ranks: list[_Rank]) -> None:
        for rank in ranks:
            if not rank.has_ended:
                rank.process.terminate()

    def _wait_for_exits(self, ranks: list[_Rank], patience_s: float) -> None:
        deadline = Deadline(patience_s)
        while True:
            running = [rank.process for rank in ranks if not rank.has_ended]
            left_s = deadline.left_s()
            if not running or left_s <= 0:
                return
            # join() is not used: it waits for the sentinel, which a rank's children may hold open.
            wait([process.sentinel for process in running], min(left_s, _POLL_S))
