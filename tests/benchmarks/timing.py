"""Interleaved timing, and tables of it in markdown."""

import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version

import torch


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


def interleave(functions, *, rounds, warmup=3, before=None):
    """Time functions in turn, A B C C B A …, so that a slow moment of the machine hits all of them.

    At its turn a function is called three times: the first is cold, the last is warm. `functions` is a
    dict by name; `before`, if given, runs untimed before each call. What a function returns is freed when
    its clock has stopped.
    """
    cold, warm = ({name: [] for name in functions} for _ in range(2))
    names = list(functions)
    for turn in range(-warmup, rounds):
        for name in names:
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


@dataclass(frozen=True)
class Target:
    """A measured number beside the one that it has to reach; `cold` where it was measured so too."""

    what: str
    value: float
    bound: float
    unit: str
    cold: float | None = None
    is_at_least: bool = False

    def row(self):
        met = self.value >= self.bound if self.is_at_least else self.value <= self.bound
        bound = f"{'≥' if self.is_at_least else '≤'} {self.bound:g}{self.unit}"
        cold = "" if self.cold is None else self._number(self.cold)
        return self.what, self._number(self.value), cold, bound, "met" if met else "NOT met"

    def _number(self, value):
        digits = 0 if isinstance(value, int) else 1 if value >= 20 else 2
        return f"{value:.{digits}f}{self.unit}"


def ratio(over, under):
    """Times one as long as the other: warm, and cold."""
    return over.median / under.median, over.cold / under.cold


def at_least(what, value, bound, unit="×", cold=None):
    return Target(what, value, bound, unit, cold, is_at_least=True)


def at_most(what, value, bound, unit="×", cold=None):
    return Target(what, value, bound, unit, cold)


def time_rows(label, times, items=256):
    """Rows of a table, one for each function of `interleave`."""
    return [
        (label, name, *map(_duration, (t.median, t.p90, t.cold)), f"{t.median / items * 1e6:,.2f}")
        for name, t in times.items()
    ]


def print_times(title, rows):
    _print_table(title, ("", "what", "median", "P90", "cold median", "µs per item"), rows)


def print_targets(targets):
    _print_table("Targets", ("", "measured", "cold", "target", ""), [target.row() for target in targets])


def _print_table(title, header, rows):
    rows = [tuple(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    progress("")
    print(f"\n{title}\n", *lines, sep="\n", flush=True)


def progress(text):
    """Say on stderr what is being measured; the next call overwrites it."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def machine():
    """What the numbers were measured on, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchcache2", "torchcache"))
    threads = torch.get_num_threads()
    return (
        f"{_processor()}, {os.cpu_count()} cores, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}, {threads} torch threads, "
        f"load average at the start {os.getloadavg()[0]:.1f}"
    )


def _processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _duration(seconds):
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"
