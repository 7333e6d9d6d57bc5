"""Interleaved timing."""

import statistics
import sys
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Seconds of one call.

    `median` and `p90` are of calls that follow a call of the same function, `cold` is the median of those
    that follow another function and find its data in the processor's caches.
    """

    median: float
    p90: float
    cold: float

    @classmethod
    def of(cls, warm, cold):
        p90 = statistics.quantiles(warm, n=10, method="inclusive")[-1]
        return cls(statistics.median(warm), p90, statistics.median(cold))


def interleave(functions, *, rounds, warmup=3, before=None, every=None):
    """Time functions in turn, A B C C B A …, so that a slow moment of the machine hits all of them.

    At its turn a function is called three times: the first is cold, the last is warm. `functions` is a
    dict by name; `before`, if given, runs untimed before each call. `every` has, by name, functions that
    are too slow for all rounds: with 4, a function takes part in one round of four. What a function
    returns is freed when its clock has stopped.
    """
    cold, warm = ({name: [] for name in functions} for _ in range(2))
    names = list(functions)
    every = every or {}
    for turn in range(-warmup, rounds):
        for name in names:
            if turn % every.get(name, 1):
                continue
            seconds = [_time(functions[name], before) for _ in range(3)]
            if turn >= 0:
                cold[name].append(seconds[0])
                warm[name].append(seconds[-1])
        names.reverse()
    return {name: Times.of(warm[name], cold[name]) for name in functions}


def _time(function, before):
    if before is not None:
        before()
    start = time.perf_counter()
    result = function()
    elapsed = time.perf_counter() - start
    del result
    return elapsed


def ratio(over, under):
    """Times one as long as the other: warm, and cold."""
    return over.median / under.median, over.cold / under.cold


def progress(text):
    """Say on stderr what is being measured; the next call overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
