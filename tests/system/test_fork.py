"""A child that is forked while other threads use the cache has locks of its own, and right rows."""

import os
import threading

import torch

from torchcache2 import torchcache
from torchcache2.core.process import ProcessLock


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
