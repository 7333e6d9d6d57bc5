"""The commands of `torchcache2`: their arguments, questions and output.

Results go to stdout, as a table or as JSON; questions, progress and errors go to stderr. Exit codes: 0 for
success, 1 if something is damaged or was not done, 2 if the command failed.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from torchcache2.core.errors import NewerFormatError, OptionError, TorchcacheError
from torchcache2.core.places import is_url
from torchcache2.identity.marks import __version__

if TYPE_CHECKING:
    from torchcache2.cli.report import Gone, Verdict
    from torchcache2.files.directory import CacheDirectory, Contents

# Commands import their modules when they run: these need PyTorch, which takes a second to import.


app = typer.Typer(
    help="Look into cache directories of torchcache2, check them, and make room in them.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_AT_ONCE = 100  # objects
_LEAST_PREFIX = 8  # characters of a namespace
_NUMBERS = ("rows", "bytes", "a row", "ratio", "segments", "files", "age", "last use")


class _Format(str, enum.Enum):
    """How a result is printed."""

    table = "table"
    json = "json"


_Dir = Annotated[
    str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.", show_default="here")
]
_AsFormat = Annotated[_Format, typer.Option("--format", help="How to print the result.")]


def _print_deleted(gone: Sequence[Gone], names: Mapping[str, str], form: _Format) -> None:
    """Print how much was deleted in each namespace, with its class."""
    if form is _Format.json:
        print_json([{"class": names[one.namespace], **one._asdict()} for one in gone])
        return
    if gone:
        rows = [(one.namespace, names[one.namespace], f"{one.files:,}", size(one.bytes)) for one in gone]
        print_table(("namespace", "class", "files", "bytes"), rows)
    files, nbytes = sum(one.files for one in gone), sum(one.bytes for one in gone)
    say(f"{counted(files, 'file')} deleted, {size(nbytes)}")


def run(arguments: Sequence[str]) -> None:
    """Run a command; ends with `SystemExit`."""
    try:
        app(args=list(arguments), prog_name="torchcache2")
    except (TorchcacheError, NewerFormatError) as error:
        tell(f"torchcache2: {error}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        tell(f"torchcache2: {where}{error.strerror or error}")
    raise SystemExit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"torchcache2 {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("ls")
def _ls(directory: _Dir = ".", form: _AsFormat = _Format.table) -> None:
    """List the namespaces: class, rows, bytes, last use."""
    from torchcache2.cli import report

    with report.opened(directory) as cache:
        found = [report.namespace(cache, one) for one in cache.scan()]
    found.sort(key=lambda one: one.last_used or 0.0, reverse=True)
    if form is _Format.json:
        print_json([one.to_json() for one in found])
        return
    columns = ("namespace", "class", "rows", "bytes", "a row", "ratio", "age", "last use", "in use")
    rows = []
    for name, one in zip(prefixes([one.id for one in found]), found, strict=True):
        each = size(one.stored_bytes // one.rows) if one.rows else "-"
        numbers = (f"{one.rows:,}", size(one.nbytes), each, ratio(one.ratio))
        ages = (ago(one.created), ago(one.last_used))
        rows.append((name, one.title, *numbers, *ages, {True: "yes", False: "no", None: "?"}[one.in_use]))
    print_table(columns, rows)
    unreadable = sum(one.unreadable for one in found)
    if unreadable:
        tell(f"{counted(unreadable, 'segment')} cannot be opened: `torchcache2 verify` says why")


@app.command("stats")
def _stats(directory: _Dir = ".", form: _AsFormat = _Format.table) -> None:
    """Count segments, rows and bytes of a cache directory."""
    from torchcache2.cli import report

    with report.opened(directory) as cache:
        totals = report.totals(cache, cache.scan())
    if form is _Format.json:
        print_json(totals)
        return
    unreadable = f", {totals['unreadable']:,} unreadable" if totals["unreadable"] else ""
    codecs = ", ".join(f"{name} {count:,}" for name, count in totals["codecs"].items())
    facts = {
        "directory": totals["directory"],
        "format": str(totals["format"]),
        "namespaces": f"{totals['namespaces']:,}, {totals['in_use']:,} in use",
        "segments": f"{totals['segments']:,}{unreadable}",
        "rows": f"{totals['rows']:,}",
        "bytes": size(totals["bytes"]),
        "ratio": ratio(totals["ratio"]),
        "codecs": codecs or "-",
        **{f"{kind} files": f"{totals[kind]:,}" for kind in ("corrupt", "temporary", "foreign")},
    }
    for name, value in facts.items():
        say(f"{name:15}  {value}" if sys.stdout.isatty() else f"{name}\t{value}")


@app.command("verify")
def _verify(directory: _Dir = ".", form: _AsFormat = _Format.table) -> None:
    """Read every row and compare its checksum. Exit code 1 if one is damaged, or cannot be read.

    Changes nothing.
    """
    from torchcache2.cli import report

    counts, rows, bad, limit = dict.fromkeys(report.STATES, 0), 0, [], report.row_limit()

    def note(name: str, found: Verdict) -> None:
        if found.state != "gone":
            bad.append({"file": name, "state": found.state, "reason": found.reason})

    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(report.opened(directory))
        contents = cache.scan()
        total = sum(info.size for one in contents for info in one.segments)
        advance = stack.enter_context(progress("checking", total))
        for one in contents:
            try:
                if not one.files:
                    cache.contents(one.namespace)  # raises what `scan` suppresses
            except OSError as error:
                found = report.trouble(error)
                counts[found.state] += 1
                note(one.namespace, found)
            for info in (*one.segments, *one.index_files):
                name, is_index_file = f"{one.namespace}/{info.name}", info in one.index_files
                path = os.path.join(cache.path, name)
                if is_index_file:
                    found = report.verdict_of_index_file(cache.fs, path)
                else:
                    found = report.verdict(cache.fs, path, one.namespace, limit)
                    advance(info.size)
                if found.state == "good":
                    rows += found.rows
                else:
                    note(name, found)
                counts[found.state] += not is_index_file or found.state not in ("good", "gone")
    aside = sum(len(one.corrupt) for one in contents)
    if form is _Format.json:
        print_json({**counts, "rows": rows, "set_aside": aside, "files": bad})
    else:
        for file in bad:
            say("{file}: {state}: {reason}".format_map(file))
        good = f"{counted(counts['good'], 'good segment')} with {counted(rows, 'row')}"
        rest = f"{counts['damaged']:,} damaged, {counts['unreadable']:,} unreadable"
        say(f"{good}; {rest}, {counts['unchecked']:,} not checked, {aside:,} set aside earlier")
    raise typer.Exit(1 if counts["damaged"] or counts["unreadable"] else 0)


@app.command("prune")
def _prune(
    max_size: Annotated[str, typer.Option(help="The size to keep, such as 5GB or 500MiB.")],
    directory: _Dir = ".",
    form: _AsFormat = _Format.table,
) -> None:
    """Delete segments that are not in use until a size is reached.

    Damaged files go first, then segments of the least recently used namespace. Of the local folder of a
    bucket, only what the bucket has is deleted. Exit code 1 if more than the size is left.
    """
    from torchcache2.cli import report
    from torchcache2.core.sizes import parse_size
    from torchcache2.files.directory import MIRROR
    from torchcache2.files.removal import make_room, remove_leftovers, used_bytes

    budget = parse_size("--max-size", max_size)
    cache = report.folder(directory, "prune")
    before = cache.scan()
    names = {one.namespace: report.name(cache, one.namespace) for one in before}
    remove_leftovers(cache)
    mirrored = any(one.heads for one in before) or cache.fs.exists(os.path.join(cache.path, MIRROR))
    enough = make_room(cache, 0, budget, lru=False, mirrored=mirrored)
    after = cache.scan()
    _print_deleted(report.gone(before, after), names, form)
    if not enough:
        why = "not in the bucket yet" if mirrored else "in use by running processes"
        tell(f"torchcache2: {size(used_bytes(after))} are left, {why}")
        raise typer.Exit(1)


@app.command("rm")
def _rm(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.")],
    namespaces: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAMESPACE", help="Their first characters, or a class or label."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all namespaces.")] = False,
    unused: Annotated[bool, typer.Option("--unused", help="Leave what a running process uses.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete even what a running process uses.")] = False,
    form: _AsFormat = _Format.table,
) -> None:
    """Delete namespaces. Files that are not the cache's stay."""
    if bool(namespaces) == everything:
        raise OptionError("expected namespaces after DIR, as `torchcache2 ls DIR` prints them, or --all")
    from torchcache2.cli import report
    from torchcache2.files.removal import remove_namespace

    with report.opened(directory) as cache:
        chosen = report.chosen(cache, namespaces)
        found = [report.namespace(cache, one) for one in chosen]
        is_far = is_url(directory)
        used = [one for one in found if one.in_use is not False and not is_far and not force]
        if unused:
            found = [one for one in found if one not in used]
            chosen, used = [one for one in chosen if one.namespace in {each.id for each in found}], []
        for one in used:
            why = "is used by a running process" if one.in_use else "may be in use: there are no locks here"
            tell(f"torchcache2: {one.id} ({one.name}) {why}; --force deletes it")
        if used:
            raise typer.Exit(1)
        if not yes:
            for one in found:
                tell(f"{one.id}  {one.title}  {one.rows:,} rows  {size(one.nbytes)}")
            if is_far:
                count, nbytes = counted(len(found), "namespace"), size(sum(one.nbytes for one in found))
                tell(f"{cache.path}: {count}, {nbytes}; other processes may be using them")
            typer.confirm("Delete?", abort=True, err=True)
        busy = []
        try:
            if is_far:
                _remove_objects(cache, chosen, everything=everything)
            else:
                busy = [
                    one.namespace for one in chosen if not remove_namespace(cache, one.namespace, force=force)
                ]
        finally:  # also after a fault of the bucket
            after = [cache.contents(one.namespace) for one in chosen]
            _print_deleted(report.gone(chosen, after), {one.id: one.name for one in found}, form)
    if busy:
        tell(f"torchcache2: {', '.join(busy)}: a process has begun to use it")
        raise typer.Exit(1)


def _remove_objects(cache: CacheDirectory, chosen: Sequence[Contents], *, everything: bool) -> None:
    """Delete a bucket's objects of the format in some namespaces, or of all and the tag; others stay."""
    from torchcache2.files.directory import TAG
    from torchcache2.tiers.bucket.files import BucketFiles

    assert isinstance(cache.fs, BucketFiles)
    # Delete a namespace's description last, so that an interrupted deletion leaves no undescribed files.
    files = [(one.namespace, info) for one in chosen for info in one.files if info not in one.others]
    files += [(one.namespace, info) for one in chosen for info in one.others]
    with progress("deleting", sum(info.size for _, info in files)) as advance:
        for first in range(0, len(files), _AT_ONCE):
            some = files[first : first + _AT_ONCE]
            cache.fs.remove_all([os.path.join(cache.path, name, info.name) for name, info in some])
            advance(sum(info.size for _, info in some))
    if everything and not any(one.files for one in cache.scan()):
        cache.fs.remove(os.path.join(cache.path, TAG))


# Tables and progress for a terminal, plain text for a pipe, JSON for programs.


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
        table.add_column(name, no_wrap=is_number or i == 0, overflow="fold")
        table.columns[-1].justify = "right" if is_number else "left"
    for row in rows:
        table.add_row(*map(Text, row))  # text from files is not markup
    Console().print(table)


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
    """Bytes for people."""
    from torchcache2.core.sizes import size_text

    return size_text(count)


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
