"""Fault injection: the n-th step of a call raises, and then the m-th step of its handling.

An injection runs a call and raises in it; its `places` are the places of the raised exceptions. The kinds of
steps:

- "point": a place in Python code, of shmring or of its callees, at which the interpreter runs signal
  handlers; raises KeyboardInterrupt, and then SystemExit;
- "signal": the handler of a real signal raises, even if no Python code runs;
- "memory": an allocation of Python fails;
- "system": a system call that Python code makes fails.
"""

import collections
import ctypes
import dis
import errno
import functools
import gc
import operator
import os
import signal
import socket
import sys
import threading
from pathlib import Path

try:
    import _testcapi
except ImportError:  # some distributions leave it out
    _testcapi = None

HERE = str(Path(__file__).resolve().parents[1])
TICK_S = 0.0005
KINDS = ("point", "signal", "memory", "system")


class Interrupt(KeyboardInterrupt):
    """Raised first, as for Ctrl-C."""


class Terminate(SystemExit):
    """Raised second, as by a handler of SIGTERM that calls sys.exit."""


class Broken(OSError):
    """Raised by a system call."""


INJECTED = (Interrupt, Terminate, MemoryError, Broken)


class Injection:
    """Run a call and raise nothing; the base of the classes that raise."""

    def __init__(self, n, m=None):
        self.n, self.m = n, m
        self.count = 0
        self.places = []

    def run(self, call):
        """Return what the call returns. C code calls it: no bytecode runs, nothing is allocated after it."""
        self.results = collections.deque(maxlen=1)
        self.results.extend(map(operator.call, (call,)))
        return self.results[-1]


def injection_of(kind, n, m=None):
    """A injection at the n-th step; n = 0 counts the steps and raises nothing."""
    points = MonitoredPoints if hasattr(sys, "monitoring") else TracedPoints
    return {"point": points, "signal": Signals, "memory": Memory, "system": System}[kind](n, m)


def places_when_dropped(items, n):
    """Drop the items of a list, interrupted at the n-th point of their destructors. Return the places."""
    injection = injection_of("point", n)
    gc.disable()  # hypothesis has a callback for collections
    try:
        injection.run(items.clear)
    finally:
        gc.enable()
    return injection.places


def place_of(frame):
    name = frame.f_code.co_filename
    short = name[name.rindex("shmring/") :] if "shmring/" in name else "/".join(name.split("/")[-2:])
    return f"{short}:{frame.f_lineno} {frame.f_code.co_qualname}"


class ReturningInterrupted:
    """A communicator whose run_steps raises Interrupt as it returns, as a signal handler may."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def run_steps(self, *arguments, **keywords):
        self._comm.run_steps(*arguments, **keywords)
        raise Interrupt


# ---- where the interpreter checks for signals --------------------------------------------------------------


class Points(Injection):
    """Raise where the interpreter checks for signals: after a call, at a function's entry, at a jump back.

    All Python code that the call runs counts, except the tests'.
    """

    _CHECKING = frozenset(
        dis.opmap[name]
        for name in ("RESUME", "CALL", "PRECALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")
        if name in dis.opmap
    )
    _PRECALL, _CALL, _RESUME = dis.opmap.get("PRECALL"), dis.opmap.get("CALL"), dis.opmap["RESUME"]

    def run(self, call):
        self._errors = iter((Interrupt, Terminate))
        self.start()
        try:
            return super().run(call)
        finally:
            self.stop()

    def is_outside(self, frame):
        return frame.f_code.co_filename.startswith((HERE, "<frozen importlib"))

    def is_due(self, state, frame):
        """Return whether to raise before the next instruction of the frame."""
        code, last, now = frame.f_code.co_code, state.last, frame.f_lasti
        calls_python, state.last, state.calls_python = state.calls_python, now, False
        if last < 0 or code[last] not in self._CHECKING:
            return False
        if calls_python and code[last] == self._CALL:  # a function in Python: no check when it returns
            return False
        if code[last] == self._PRECALL and code[now] == self._CALL:
            return False
        if code[last] == self._RESUME and code[last + 1] & 3 > 1:  # in a yield from or an await: no check
            return False
        if (
            frame.f_lineno is None
        ):  # outside of the exception table: CPython would keep the exception for ever
            return False
        self.count += 1
        return self.count == self.n

    def error(self, frame):
        self.places.append(place_of(frame))
        self.n, self.m, self.count = self.m, None, 0
        return next(self._errors)(self.places[-1])


class _State:
    """The last instruction of one frame, and whether it called a function in Python. f_trace holds it."""

    def __init__(self, last=-1):
        self.last = last
        self.calls_python = False

    @staticmethod
    def note_call(frame):
        """Note the call of the frame in the state of its caller."""
        caller = frame.f_back.f_trace
        if isinstance(caller, _State) and not frame.f_code.co_name.startswith("__"):
            caller.calls_python = True


class TracedPoints(Points):
    """Points before Python 3.12.

    CPython ends tracing when a trace function raises. It releases the frame's trace object after that, so the
    destructor of that object starts the tracing again.
    """

    is_to_go_on = False

    def start(self):
        sys.settrace(self.enter)

    def stop(self):
        sys.settrace(None)
        self.is_to_go_on = False

    def enter(self, frame, event, arg):
        if self.is_outside(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        _State.note_call(frame)
        return _Local(self, frame.f_lasti)

    def error(self, frame):
        self.is_to_go_on = self.m is not None
        return super().error(frame)

    def go_on(self, frame):
        """Trace the frames that the exception passes through, and the functions that they call."""
        self.is_to_go_on = False
        self.start()
        while frame is not None and not frame.f_code.co_filename.startswith(HERE):
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            frame.f_trace = _Local(self)
            frame = frame.f_back


class _Local(_State):
    """The trace object of one frame. Only the frame may refer to it, or its destructor would run too late."""

    def __init__(self, injection, last=-1):
        super().__init__(last)
        self.injection = injection

    def __call__(self, frame, event, arg):
        injection = self.injection
        if event == "opcode" and injection.is_due(self, frame):
            error = injection.error(frame)
            del self, frame, injection
            raise error
        return self

    def __del__(self):
        if self.injection.is_to_go_on:
            self.injection.go_on(sys._getframe(1))


class MonitoredPoints(Points):
    """Points from Python 3.12 on.

    Tracing would miss points there: those of a function that sets f_trace_opcodes for the first time, and
    those of a frame that an exception passes through. Monitoring goes on after an exception, and it calls
    back in all threads.
    """

    _TOOL = 3  # no tool of the standard library has this number

    def start(self):
        self._thread = threading.get_ident()
        events = sys.monitoring.events
        self._callbacks = {
            events.PY_START: self._enter,
            events.PY_RESUME: self._enter,
            events.INSTRUCTION: self._step,
        }
        sys.monitoring.use_tool_id(self._TOOL, __name__)
        for event, function in self._callbacks.items():
            sys.monitoring.register_callback(self._TOOL, event, function)
        sys.monitoring.set_events(self._TOOL, functools.reduce(operator.or_, self._callbacks))

    def stop(self):
        sys.monitoring.set_events(self._TOOL, 0)
        for event in self._callbacks:
            sys.monitoring.register_callback(self._TOOL, event, None)
        sys.monitoring.free_tool_id(self._TOOL)
        self._callbacks = None

    def _enter(self, code, offset):
        frame = sys._getframe(1)
        if threading.get_ident() == self._thread and not self.is_outside(frame):
            _State.note_call(frame)
            frame.f_trace = _State(offset)

    def _step(self, code, offset):
        if threading.get_ident() != self._thread:
            return
        frame = sys._getframe(1)
        state = frame.f_trace
        if isinstance(state, _State) and self.is_due(state, frame):
            error = self.error(frame)
            while frame is not None and isinstance(frame.f_trace, _State):
                frame.f_trace = _State()  # no call returns to the frames that the exception passes through
                frame = frame.f_back
            del self, frame, state
            raise error


# ---- signals -----------------------------------------------------------------------------------------------


class Signals(Injection):
    """Raise in the handler of a real signal: one is pending at the start, then one comes every 0.5 ms."""

    def run(self, call):
        self._errors = iter((Interrupt, Terminate))
        self.results = []
        before = signal.signal(signal.SIGALRM, self._handle)
        try:
            signal.setitimer(signal.ITIMER_REAL, TICK_S, TICK_S)
            try:
                self.results.extend(map(operator.call, (_raise_alarm, call)))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        finally:
            self.n = -1
            # One that came last may still be on its way to another thread: the default would end the process.
            signal.signal(signal.SIGALRM, signal.SIG_IGN if before is signal.SIG_DFL else before)
        return self.results[-1]

    def _handle(self, number, frame):
        if frame.f_code.co_filename == __file__ and frame.f_code.co_name != "run":
            return  # in the handler
        self.count += 1
        if self.count >= self.n > 0 and len(self.results) == 1:  # neither before the call nor after it
            self.places.append(place_of(frame))
            self.n, self.m, self.count = self.m or -1, None, 0
            raise next(self._errors)(self.places[-1])


_raise_alarm = functools.partial(ctypes.CDLL(None)["raise"], int(signal.SIGALRM))


# ---- memory ------------------------------------------------------------------------------------------------


class Memory(Injection):
    """Let the n-th request to Python's allocators fail."""

    def run(self, call):
        if _testcapi is None:
            raise RuntimeError("this Python has no _testcapi, whose set_nomemory makes allocations fail")
        if self.n == 0:
            return super().run(call)
        try:
            _testcapi.set_nomemory(self.n, self.n + 1)
            try:
                return super().run(call)
            finally:
                _testcapi.remove_mem_hooks()
        except MemoryError as error:
            last = error.__traceback__
            while last.tb_next is not None:
                last = last.tb_next
            self.places.append(f"{place_of(last.tb_frame)} at {last.tb_lineno}")
            raise


# ---- the system --------------------------------------------------------------------------------------------

_OS_CALLS = (
    "open", "close", "read", "write", "fstat", "ftruncate", "memfd_create", "posix_fallocate", "fstatvfs",
    "eventfd", "eventfd_write", "unlink", "sched_getaffinity", "pipe", "pipe2", "dup", "stat", "listdir",
    "scandir", "urandom",
)  # fmt: skip
# Receiving fails if the other side has ended, which other tests cover.
_SOCKET_CALLS = (
    "bind", "connect", "listen", "_accept", "send", "sendall", "sendmsg", "setsockopt",
)  # fmt: skip
_OPENING = ("memfd_create", "open", "eventfd", "_accept", "socketpair", "pipe", "pipe2", "dup")


class System(Injection):
    """Let the n-th system call fail, through os, socket, threading, or ctypes in shmring._system.segments."""

    def run(self, call):
        with _Patches(self) as patches:
            patches.patch_all()
            return super().run(call)

    def pass_or_raise(self, name):
        if threading.current_thread() is not threading.main_thread():
            return
        self.count += 1
        if self.count != self.n:
            return
        frame = sys._getframe(2)
        self.places.append(f"{place_of(frame)} in {name}")
        if name == "start_new_thread":
            raise RuntimeError("can't start new thread")
        number = errno.EMFILE if name in _OPENING else errno.EIO
        raise Broken(number, os.strerror(number))


class _Patches:
    def __init__(self, injection):
        self._injection = injection
        self._before = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for owner, name, had, value in reversed(self._before):
            if had:
                setattr(owner, name, value)
            else:
                delattr(owner, name)

    def patch_all(self):
        for name in _OS_CALLS:
            if hasattr(os, name):
                self._put(os, name, self._around(name, getattr(os, name)))
        for name in _SOCKET_CALLS:
            self._put(socket.socket, name, self._around(name, getattr(socket.socket, name)))
        self._put(socket, "socketpair", self._around("socketpair", socket.socketpair))
        # Python 3.13 has renamed it.
        name = "_start_new_thread" if hasattr(threading, "_start_new_thread") else "_start_joinable_thread"
        self._put(threading, name, self._around("start_new_thread", getattr(threading, name)))
        memory = sys.modules.get("shmring._system.segments")
        if memory is not None:
            self._put(memory, "_mmap", self._failing("mmap", memory._mmap, memory._FAILED))
            self._put(memory, "_libc", _Libc(self, memory._libc, memory._FAILED))

    def _put(self, owner, name, value):
        self._before.append((owner, name, name in vars(owner), vars(owner).get(name)))
        setattr(owner, name, value)

    def _around(self, name, function):
        injection = self._injection

        def call(*arguments, **keywords):
            if name == "close":  # Linux closes the descriptor even if close() fails
                result = function(*arguments, **keywords)
                injection.pass_or_raise(name)
                return result
            injection.pass_or_raise(name)
            return function(*arguments, **keywords)

        return call

    def _failing(self, name, function, failed):
        injection = self._injection

        def call(*arguments):
            try:
                injection.pass_or_raise(name)
            except Broken:
                ctypes.set_errno(errno.ENOMEM)
                return failed
            return function(*arguments)

        return call


class _Libc:
    """The libc of shmring._system.segments, with calls that fail."""

    def __init__(self, patches, libc, failed):
        self._libc = libc
        self.mremap = patches._failing("mremap", libc.mremap, failed)
        self.madvise = patches._failing("madvise", libc.madvise, -1)

    def __getattr__(self, name):
        return getattr(self._libc, name)
