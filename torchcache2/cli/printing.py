"""How the commands print: tables and progress for a terminal, plain text for a pipe, JSON for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_LEAST_PREFIX = 8  # characters of a namespace
_NUMBERS = ("rows", "bytes", "a row", "ratio", "segments", "files", "age", "last use")
_UNITS = ("KB", "MB", "GB", "TB", "PB")


def say(text: str) -> None:
    """Print a line of the result, even if the terminal lacks some of its characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def tell(text: str) -> None:
    """Print a line that is not part of the result."""
    print(text, file=sys.stderr)


def print_json(value: Any) -> None:
    """Print a result for programs."""
    say(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a header; if the output is not a terminal, separated by tabs."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            say("\t".join(row))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        is_number = name in _NUMBERS
        table.add_column(
            name, justify="right" if is_number else "left", no_wrap=is_number or i == 0, overflow="fold"
        )
    for row in rows:
        table.add_row(*map(Text, row))  # text from files is not markup
    Console().print(table)


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print names and values."""
    if not sys.stdout.isatty():
        for name, value in pairs.items():
            say(f"{name}\t{value}")
        return
    console, width = Console(), max(map(len, pairs))
    for name, value in pairs.items():
        console.print(Text.assemble((name.ljust(width), "bold"), "  ", value), soft_wrap=True)


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of bytes, in a terminal; yields a function to call with the number of new bytes."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def prefixes(names: Sequence[str]) -> list[str]:
    """The shortest distinct prefixes of names."""
    length = _LEAST_PREFIX
    while len({name[:length] for name in names}) < len(set(names)):
        length += 1
    return [name[:length] for name in names]


def counted(count: int, what: str) -> str:
    """A number of things."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: float) -> str:
    """Bytes for people: as `sizes.parse_size` reads them, powers of 1000."""
    unit = "B"
    for larger in _UNITS:
        if count < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"


def ratio(value: float | None) -> str:
    """A ratio for people."""
    return "-" if value is None else f"{value:.2f}"


def ago(seconds: float | None) -> str:
    """How long ago a time (in seconds since the epoch) is."""
    if seconds is None:
        return "-"
    passed = max(0.0, time.time() - seconds)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if passed >= length:
            return f"{passed / length:.0f} {unit}"
    return f"{passed:.0f} s"
