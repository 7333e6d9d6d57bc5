"""A child that is forked while other threads use the cache has locks of its own, and right rows."""

import os
import threading

import torch

from tests.helpers import warm
from torchcache2 import torchcache
from torchcache2.core.process import ProcessLock

SCRIPT = """
import multiprocessing, sys, threading
import torch
from torch import nn
from torchcache2 import torchcache

torch.set_num_threads(1)
plain = nn.Linear(8, 4).eval().requires_grad_(False)
cached = torchcache(nn.Linear(8, 4).eval().requires_grad_(False))
cached.load_state_dict(plain.state_dict())
X = torch.rand(3, 8)
torch.equal(cached(X + 1), plain(X))  # torch prepares itself at first calls, which a fork must not cut short


def work():
    for i in range(-2, 20):
        assert torch.equal(cached(X + i), plain(X + i))
    stats = cached.cache_instance.stats()
    assert stats.memory_rows >= 3 * 20


def loop():
    i = 0
    while not stop.is_set():
        cached(X + i)
        i += 1


stop = threading.Event()
threads = [threading.Thread(target=loop) for _ in range(2)]
for thread in threads:
    thread.start()
fork = multiprocessing.get_context("fork")
codes = []
for _ in range(12):
    child = fork.Process(target=work)
    child.start()
    child.join(20)
    codes.append(child.exitcode)
    child.kill()
    if child.exitcode is None:
        break
stop.set()
for thread in threads:
    thread.join()
print(codes)
"""


def test_children_of_a_busy_process_neither_hang_nor_err():
    process = warm.start(SCRIPT).done(timeout=300)
    assert process.out.strip() == str([0] * 12), process.err


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
