"""Ranks that are threads of this process, with a channel between them: for many steps in little time."""

import threading

import numpy as np
import torch

from torchcache2.core.keys import Keys
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.cache import Cache
from torchcache2.engine.collective.exchange import Exchange, is_apart

NAMESPACE = b"squares, 2026-11"


class Board:
    """Where the threads leave what they say."""

    def __init__(self, size):
        self.size = size
        self.said = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)


class ThreadChannel:
    """Does what `Channel` does, for one of the threads."""

    def __init__(self, board, rank):
        self.board, self.rank, self.size, self.seconds = board, rank, board.size, 0.0
        self.kinds = []

    def _all(self, data):
        self.board.said[self.rank] = data
        self.board.barrier.wait()
        said = list(self.board.said)
        self.board.barrier.wait()
        return said

    def gather(self, kind, data, meanwhile=lambda: None):
        meanwhile()
        said = self._all((kind, bytes(data)))
        assert {theirs for theirs, _ in said} == {kind}, said
        self.kinds.append(kind)
        return [data for _, data in said]

    def swap(self, data, sent, received):
        self.kinds.append("swap")
        said = self._all((data, list(sent)))
        parts = []
        for source, (theirs, sizes) in enumerate(said):
            begin = sum(sizes[: self.rank])
            assert sizes[self.rank] == received[source], (sizes, received, source)
            parts.append(theirs[begin : begin + sizes[self.rank]])
        self.board.barrier.wait()
        return torch.cat(parts)

    def sends_from(self, device):
        return False

    def close(self):
        self.board.barrier.abort()


def in_threads(size, function):
    """What ``function(rank, channel)`` returns or raises in each of some threads, which have one channel."""
    board, results = Board(size), [None] * size

    def run(rank):
        try:
            results[rank] = function(rank, ThreadChannel(board, rank))
        except BaseException as error:
            results[rank] = error
            if isinstance(error, threading.BrokenBarrierError):
                return

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def keys_of(numbers, namespace=NAMESPACE):
    data = np.zeros((len(numbers), 16), np.uint8)
    data[:, :8] = np.asarray(numbers, "<u8").reshape(-1, 1).view(np.uint8).reshape(len(numbers), 8)
    return Keys(namespace, data, b"all of one shape")


def value(number, shape=(3,)):
    return torch.full(shape, float(number) ** 2, dtype=torch.float64)


class Rank:
    """A cache in one thread, and what it has computed."""

    def __init__(self, channel, namespace=NAMESPACE, **options):
        options = {"distributed": "collective", "max_memory_cache_size": "1MB"} | options
        self.cache = Cache(namespace, CacheSettings(**options))
        self.exchange = Exchange(channel)
        self.cache.collective.exchange = lambda: None if is_apart() else self.exchange
        self.channel = channel
        self.namespace = namespace
        self.computed = []

    def fetch(self, numbers, compute=None, shape=(3,)):
        def rows(positions):
            self.computed += [numbers[i] for i in positions.tolist()]
            made = [value(numbers[i], shape) for i in positions.tolist()]
            return torch.stack(made) if made else torch.empty(0, *shape, dtype=torch.float64)

        output = self.cache.fetch(keys_of(numbers, self.namespace), compute or rows)
        expected = [value(number, shape) for number in numbers]
        if expected and compute is None:
            assert torch.equal(output, torch.stack(expected))
        return output


def told(results):
    """The results of the ranks, none of which has raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def steps(size, function):
    """What ``function(mine, rank)`` returns in each rank, where `mine` is its `Rank`."""
    return told(in_threads(size, lambda rank, channel: function(Rank(channel), rank)))
