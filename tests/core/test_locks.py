"""Locks; `tests/system/test_fork.py` has those of forked processes."""

import contextlib

import pytest

from torchcache2.core.process import ProcessLock


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_what_is_done_if_a_lock_is_free_leaves_it_free(error):
    lock, called = ProcessLock(), []

    def function():
        called.append(1)
        if error is not None:
            raise error

    for _ in range(2):
        with contextlib.suppress(KeyError, KeyboardInterrupt):
            lock.if_free(function)
    assert called == [1, 1]


def test_nothing_is_done_and_waited_for_if_the_lock_is_held():
    lock, called = ProcessLock(), []
    with lock():
        lock.if_free(lambda: called.append(1))
    assert called == []
