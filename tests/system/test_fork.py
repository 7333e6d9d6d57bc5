"""A child that is forked while other threads use the cache has locks of its own, and right rows."""

import os
import signal
import threading
from pathlib import Path

import torch

import torchcache2
from torchcache2 import torchcache
from torchcache2.core.process import ProcessLock, computed_once


def test_a_lock_knows_if_it_was_held_at_the_fork():
    for held in (False, True):
        for make in (threading.Lock, threading.RLock):
            lock = ProcessLock(make)
            assert lock() is lock() and not lock.was_torn()
            # As in a child: the only lock there is has another process as its owner.
            (theirs,) = lock._locks.values()
            lock._locks = {-1: theirs}
            holder = threading.Thread(target=theirs.acquire)
            if held:
                holder.start()
                holder.join()
            with lock():
                assert lock() is not theirs
                assert lock.was_torn() == held
                assert not lock.was_torn()


def test_a_process_with_many_caches_may_have_children():
    # Each reserves address space: together far more than there is memory.
    functions = [torchcache(probe=False)(lambda x: x * 2) for _ in range(60)]
    for function in functions:
        function(torch.rand(4, 3))
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


class Slow:
    def __init__(self):
        self.begun, self.goes_on, self.count = threading.Event(), threading.Event(), 0

    @computed_once
    def value(self):
        """The value."""
        self.begun.set()
        self.goes_on.wait()
        self.count += 1
        return self.count


def test_a_property_is_computed_once_and_in_a_child_that_is_forked_meanwhile():
    slow, other = Slow(), Slow()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    slow.begun.wait()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        other.goes_on.set()
        os._exit(7 if (other.value, other.value) == (1, 1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    slow.goes_on.set()
    thread.join()
    assert (slow.value, slow.count, Slow.value.__doc__) == (1, 1, "The value.")


def test_no_property_has_a_lock_that_a_child_may_inherit():
    files = Path(torchcache2.__file__).parent.rglob("*.py")
    assert [file for file in files if "@functools.cached_property" in file.read_text()] == []


def test_siblings_do_not_share_rows_of_what_cannot_be_read():
    stream, hashes = (number for number in range(9)), []
    cached = torchcache(lambda x: x * len(vars(stream.gi_frame)))
    cached.cache_instance.module_hash  # noqa: B018
    for _ in range(2):
        receiving, sending = os.pipe()
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            cached.cache_instance.refresh()
            os.write(sending, cached.cache_instance.module_hash.encode())
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        hashes.append(os.read(receiving, 32))
    assert len({*hashes}) == 2
