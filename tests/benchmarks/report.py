"""Tables in markdown, printed as they are made and kept for a file."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from tests.benchmarks.timing import progress

PACKAGES = ("torch", "torchcache2", "torchcache", "joblib", "numpy", "brotli", "blosc2", "lmdb", "redis")


class Report:
    """What a run has printed so far."""

    def __init__(self):
        self._parts = []

    def text(self, text):
        """A paragraph."""
        progress("")
        self._parts.append(text)
        print(f"\n{text}", flush=True)

    def table(self, title, header, rows):
        """A title and a table below it."""
        rows = [tuple(map(str, row)) for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
        lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        self.text("\n".join([f"{title}\n", *lines]))

    def times(self, title, rows):
        """A table of `time_rows`."""
        self.table(title, ("", "what", "median", "P90", "cold median", "µs per item"), rows)

    def targets(self, targets):
        """A table of numbers beside those that they have to reach."""
        rows = [target.row() for target in targets]
        self.table("Targets", ("", "measured", "cold", "target", ""), rows)

    def write(self, path):
        """Everything so far, as one markdown file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n\n".join(self._parts) + "\n", encoding="utf-8")


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


def at_least(what, value, bound, unit="×", cold=None):
    return Target(what, value, bound, unit, cold, is_at_least=True)


def at_most(what, value, bound, unit="×", cold=None):
    return Target(what, value, bound, unit, cold)


def time_rows(label, times, items=256):
    """Rows of a table, one for each function of `interleave`."""
    return [
        (label, name, *map(duration, (t.median, t.p90, t.cold)), per_item(t.median, items))
        for name, t in times.items()
    ]


def duration(seconds):
    """Seconds as a text."""
    return f"{seconds * 1e3:,.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def per_item(seconds, items):
    """µs of one item as a text."""
    value = seconds / items * 1e6
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def machine():
    """What the numbers were measured on, in one line."""
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    threads = torch.get_num_threads()
    return (
        f"{hardware()}, {platform.system()}, Python {platform.python_version()}, {packages}, "
        f"{threads} torch threads, load average at the start {os.getloadavg()[0]:.1f}"
    )


def hardware():
    """The processor and its cores."""
    return f"{_processor()}, {os.cpu_count()} cores"


def command(section):
    """The command line that runs a section as this one."""
    rows = os.environ.get("INDEX_ROWS")
    setting = f"INDEX_ROWS={rows} " if section == "index" and rows else ""
    return f"{setting}python -m tests.benchmarks {section}"


def _processor():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
