"""The lock that torch's process group takes for each call."""

import concurrent.futures
import signal
import threading
import time

import pytest

from shmring.adapters._compiled import CallLock


def waiting(lock, *, timeout=-1.0):
    """Start a thread that waits for the lock, and return it with the list that gets the outcome."""
    outcome = []
    thread = threading.Thread(target=lambda: outcome.append(lock.acquire(timeout)))
    thread.start()
    time.sleep(0.05)  # until it waits; a test passes, too, if it does not yet
    return thread, outcome


def test_one_thread_at_a_time():
    lock, inside, most, counts = CallLock(), [], [], [0] * 4

    def work(number):
        for turn in range(300):
            with lock:
                inside.append(number)
                most.append(len(inside))
                if turn % 3 == 0:
                    time.sleep(1e-5)  # gives up the GIL
                inside.remove(number)
                counts[number] += 1
            if turn % 7 == 0 and lock.acquire(1e-4):
                lock.release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert counts == [300] * 4
    assert lock.acquire(0)


def test_threads_that_wait_have_it_before_the_one_that_releases():
    lock, order = CallLock(), []
    for _ in range(20):  # on a busy machine the other thread may begin to wait too late
        order.clear()
        lock.acquire()
        thread = threading.Thread(target=lambda: (lock.acquire(), order.append("other"), lock.release()))
        thread.start()
        time.sleep(0.1)
        lock.release()
        with lock:
            order.append("own")
        thread.join()
        if order == ["other", "own"]:
            return
    raise AssertionError(order)


def test_a_wait_ends_after_its_timeout():
    lock = CallLock()
    assert lock.acquire(0)
    assert not lock.acquire(0)
    begin = time.monotonic()
    assert not lock.acquire(timeout=0.05)
    assert time.monotonic() - begin >= 0.05
    lock.release()
    assert lock.acquire(0)


def test_a_wait_that_ended_leaves_the_lock_to_the_next():
    lock = CallLock()
    lock.acquire()
    thread, outcome = waiting(lock, timeout=0.01)
    thread.join()
    assert outcome == [False]
    lock.release()
    assert lock.acquire(0)
    thread, outcome = waiting(lock)
    lock.release()
    thread.join()
    assert outcome == [True]
    lock.release()
    assert lock.acquire(0)


def test_timeouts_beside_releases():
    """A release that comes as a wait ends is lost to nobody."""
    lock, ended = CallLock(), threading.Event()

    def impatient():
        while not ended.is_set():
            if lock.acquire(2e-6):
                lock.release()

    threads = [threading.Thread(target=impatient) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3000):
        assert lock.acquire(20)
        time.sleep(0)
        lock.release()
    ended.set()
    for thread in threads:
        thread.join()
    assert lock.acquire(0)


def test_a_signal_handler_that_raises_ends_a_wait():
    lock = CallLock()

    def interrupt(number, frame):
        raise InterruptedError("by the handler")

    def acquire():
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        lock.acquire()

    before = signal.signal(signal.SIGALRM, interrupt)
    holder = threading.Thread(target=lock.acquire)
    holder.start()
    holder.join()
    try:
        with pytest.raises(InterruptedError, match="handler"):
            acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
    lock.release()
    assert lock.acquire(0)


def test_a_signal_handler_does_not_queue_behind_its_own_thread():
    lock, found = CallLock(), []
    is_held, is_handled = threading.Event(), threading.Event()

    def handle(*_):
        if lock.is_mine() and not is_handled.is_set():  # else this thread does not wait yet
            with pytest.raises(RuntimeError, match="signal handler"):
                lock.acquire()
            is_handled.set()

    def hold():
        with lock:
            is_held.set()
            found.append(is_handled.wait(20))

    before = signal.signal(signal.SIGALRM, handle)
    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with lock:
            holder.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert found == [True]
    assert not lock.is_mine()


def test_a_thread_does_not_wait_for_itself():
    lock = CallLock()
    with lock, pytest.raises(RuntimeError, match="signal handler"):
        lock.acquire()
    lock.acquire()
    thread, outcome = waiting(lock)
    lock.release()
    thread.join()
    assert outcome == [True]
    assert not lock.acquire(0.01)  # it is the other thread's


def test_a_lock_is_released_only_by_the_thread_that_has_it():
    lock = CallLock()
    lock.release_if_mine()
    with lock:
        threads = [threading.Thread(target=call) for call in (lock.release_if_mine, lock.check_not_mine)]
        for thread in threads:
            thread.start()
            thread.join()
        assert lock.is_mine()
        with pytest.raises(RuntimeError, match="signal handler"):
            lock.check_not_mine()
        lock.release_if_mine()
        lock.check_not_mine()
        assert lock.acquire(0)
    assert not lock.is_mine()


def test_a_lock_that_nobody_holds_is_not_released():
    with pytest.raises(RuntimeError, match="no thread holds"):
        CallLock().release()


def test_the_steps_of_a_call_take_the_lock_of_their_thread():
    lock = CallLock()
    with pytest.raises(RuntimeError, match="without the lock"):
        lock.begin_steps()
    with lock, concurrent.futures.ThreadPoolExecutor(1) as other:
        found = other.submit(lock.begin_steps).exception()
    assert "without the lock" in str(found)
    with lock:
        lock.begin_steps()
        thread, outcome = waiting(lock, timeout=0.1)
        for _ in range(3):
            with lock:
                with pytest.raises(RuntimeError, match="signal handler"):
                    lock.acquire()
                with pytest.raises(RuntimeError, match="within another call"):
                    lock.begin_steps()
        thread.join()
        assert outcome == [False]
        thread, outcome = waiting(lock)
    thread.join()
    assert outcome == [True]
    lock.release()
    with lock, pytest.raises(RuntimeError, match="signal handler"):  # the steps are over
        lock.acquire()
