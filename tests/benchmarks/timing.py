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
    """Seconds of one call."""

    median: float
    p90: float

    @classmethod
    def of(cls, seconds):
        return cls(statistics.median(seconds), statistics.quantiles(seconds, n=10, method="inclusive")[-1])


def interleave(functions, *, rounds, warmup=3, before=None):
    """Time functions in turn, A B C C B A …, so that a slow moment of the machine hits all of them.

    `functions` is a dict by name; `before`, if given, runs untimed before each call. What a function
    returns is freed when its clock has stopped.
    """
    seconds = {name: [] for name in functions}
    names = list(functions)
    for turn in range(-warmup, rounds):
        for name in names:
            if before is not None:
                before()
            start = time.perf_counter()
            result = functions[name]()
            elapsed = time.perf_counter() - start
            del result
            if turn >= 0:
                seconds[name].append(elapsed)
        names.reverse()
    return {name: Times.of(values) for name, values in seconds.items()}


@dataclass(frozen=True)
class Target:
    """A measured number beside the one that it has to reach."""

    what: str
    value: float
    bound: float
    unit: str
    is_at_least: bool = False

    def row(self):
        met = self.value >= self.bound if self.is_at_least else self.value <= self.bound
        sign = "≥" if self.is_at_least else "≤"
        digits = 0 if isinstance(self.value, int) else 1 if self.value >= 20 else 2
        number = f"{self.value:.{digits}f}"
        return (
            self.what,
            f"{number}{self.unit}",
            f"{sign} {self.bound:g}{self.unit}",
            "met" if met else "NOT met",
        )


def at_least(what, value, bound, unit="×"):
    return Target(what, value, bound, unit, is_at_least=True)


def at_most(what, value, bound, unit="×"):
    return Target(what, value, bound, unit)


def time_rows(label, times, items=256):
    """Rows of a table, one for each function of `interleave`."""
    return [
        (label, name, _duration(t.median), _duration(t.p90), f"{t.median / items * 1e6:,.2f}")
        for name, t in times.items()
    ]


def print_times(title, rows):
    _print_table(title, ("", "what", "median", "P90", "µs per item"), rows)


def print_targets(targets):
    _print_table("Targets", ("", "measured", "target", ""), [target.row() for target in targets])


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
