"""The commands of `torchcache2`: their arguments, questions and output.

Results go to stdout, as a table or as JSON; questions, progress and errors go to stderr. Exit codes: 0 for
success, 1 if something is damaged or was not done, 2 if the command failed.
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import torchcache2.cli.printing as out
from torchcache2.core.errors import OptionError, TorchcacheError
from torchcache2.core.places import is_url
from torchcache2.core.version import __version__
from torchcache2.files.errors import NewerFormatError

if TYPE_CHECKING:
    from torchcache2.cli.report import Gone

# Commands import their modules when they run: these need PyTorch, which takes a second to import.


app = typer.Typer(
    help="Look into cache directories of torchcache2, check them, and make room in them.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


_AT_ONCE = 100  # objects


class _Format(str, enum.Enum):
    """How a result is printed."""

    table = "table"
    json = "json"


_Dir = Annotated[
    str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.", show_default="here")
]
_AsFormat = Annotated[_Format, typer.Option("--format", help="How to print the result.")]


def _print_bad(files: Sequence[dict[str, str]]) -> None:
    """Print a line for each file that is not good."""
    for one in files:
        out.say("{file}: {state}: {reason}".format_map(one))


def _print_deleted(gone: Sequence[Gone], names: Mapping[str, str], form: _Format) -> None:
    """Print how much was deleted in each namespace, with its class."""
    if form is _Format.json:
        out.print_json([{"class": names[one.namespace], **one._asdict()} for one in gone])
        return
    if gone:
        rows = [(one.namespace, names[one.namespace], f"{one.files:,}", out.size(one.bytes)) for one in gone]
        out.print_table(("namespace", "class", "files", "bytes"), rows)
    files, nbytes = sum(one.files for one in gone), sum(one.bytes for one in gone)
    out.say(f"{out.counted(files, 'file')} deleted, {out.size(nbytes)}")


def run(arguments: Sequence[str]) -> None:
    """Run a command; ends with `SystemExit`."""
    try:
        app(args=list(arguments), prog_name="torchcache2")
    except (TorchcacheError, NewerFormatError) as error:
        out.tell(f"torchcache2: {error}")
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        out.tell(f"torchcache2: {where}{error.strerror or error}")
    raise SystemExit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        out.say(f"torchcache2 {__version__}")
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
    from torchcache2.cli.report import opened

    with opened(directory) as cache:
        found = [report.namespace(cache, one) for one in cache.scan()]
    found.sort(key=lambda one: one.last_used or 0.0, reverse=True)
    if form is _Format.json:
        out.print_json([one.to_json() for one in found])
        return
    columns = ("namespace", "class", "rows", "bytes", "a row", "ratio", "age", "last use", "in use")
    rows = []
    for name, one in zip(out.prefixes([one.id for one in found]), found, strict=True):
        each = out.size(one.stored_bytes // one.rows) if one.rows else "-"
        numbers = (f"{one.rows:,}", out.size(one.nbytes), each, out.ratio(one.ratio))
        ages = (out.ago(one.created), out.ago(one.last_used))
        rows.append((name, one.title, *numbers, *ages, {True: "yes", False: "no", None: "?"}[one.in_use]))
    out.print_table(columns, rows)
    unreadable = sum(one.unreadable for one in found)
    if unreadable:
        out.tell(f"{out.counted(unreadable, 'segment')} cannot be opened: `torchcache2 verify` says why")


@app.command("stats")
def _stats(directory: _Dir = ".", form: _AsFormat = _Format.table) -> None:
    """Count segments, rows and bytes of a cache directory."""
    from torchcache2.cli import report
    from torchcache2.cli.report import opened

    with opened(directory) as cache:
        totals = report.totals(cache, cache.scan())
    if form is _Format.json:
        out.print_json(totals)
        return
    unreadable = f", {totals['unreadable']:,} unreadable" if totals["unreadable"] else ""
    codecs = ", ".join(f"{name} {count:,}" for name, count in totals["codecs"].items())
    out.print_pairs(
        {
            "directory": totals["directory"],
            "format": str(totals["format"]),
            "namespaces": f"{totals['namespaces']:,}, {totals['in_use']:,} in use",
            "segments": f"{totals['segments']:,}{unreadable}",
            "rows": f"{totals['rows']:,}",
            "bytes": out.size(totals["bytes"]),
            "ratio": out.ratio(totals["ratio"]),
            "codecs": codecs or "-",
            "corrupt files": f"{totals['corrupt']:,}",
            "temporary files": f"{totals['temporary']:,}",
            "foreign files": f"{totals['foreign']:,}",
        }
    )


@app.command("verify")
def _verify(directory: _Dir = ".", form: _AsFormat = _Format.table) -> None:
    """Read every row and compare its checksum. Exit code 1 if one is damaged, or cannot be read.

    Changes nothing.
    """
    from torchcache2.cli.report import STATES, opened, row_limit, trouble, verdict, verdict_of_run

    counts, rows, bad, limit = dict.fromkeys(STATES, 0), 0, [], row_limit()
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(opened(directory))
        contents = cache.scan()
        size = sum(info.size for one in contents for info in one.segments)
        advance = stack.enter_context(out.progress("checking", size))
        for one in contents:
            try:
                if not one.files:
                    cache.contents(one.namespace)  # raises what `scan` suppresses
            except OSError as error:
                found = trouble(error)
                counts[found.state] += 1
                bad.append({"file": one.namespace, "state": found.state, "reason": found.reason})
            for info in one.segments:
                name = f"{one.namespace}/{info.name}"
                found = verdict(cache.fs, os.path.join(cache.path, name), one.namespace, limit)
                counts[found.state] += 1
                if found.state == "good":
                    rows += found.rows
                elif found.state != "gone":
                    bad.append({"file": name, "state": found.state, "reason": found.reason})
                advance(info.size)
            for info in one.runs:
                name = f"{one.namespace}/{info.name}"
                found = verdict_of_run(cache.fs, os.path.join(cache.path, name))
                if found.state not in ("good", "gone"):
                    counts[found.state] += 1
                    bad.append({"file": name, "state": found.state, "reason": found.reason})
    aside = sum(len(one.corrupt) for one in contents)
    if form is _Format.json:
        out.print_json({**counts, "rows": rows, "set_aside": aside, "files": bad})
    else:
        _print_bad(bad)
        good = f"{out.counted(counts['good'], 'good segment')} with {out.counted(rows, 'row')}"
        rest = f"{counts['damaged']:,} damaged, {counts['unreadable']:,} unreadable"
        out.say(f"{good}; {rest}, {counts['unchecked']:,} not checked, {aside:,} set aside earlier")
    raise typer.Exit(1 if counts["damaged"] or counts["unreadable"] else 0)


@app.command("prune")
def _prune(
    max_size: Annotated[str, typer.Option(help="The size to keep, such as 5GB or 500MiB.")],
    directory: _Dir = ".",
    form: _AsFormat = _Format.table,
) -> None:
    """Delete segments that are not in use until a size is reached.

    Damaged files go first, then segments of the least recently used namespace. Exit code 1 if more than the
    size is in use.
    """
    from torchcache2.cli import report
    from torchcache2.cli.report import folder
    from torchcache2.core.sizes import parse_size
    from torchcache2.files.removal import make_room, remove_leftovers, used_bytes

    budget = parse_size("--max-size", max_size)
    cache = folder(directory, "prune")
    before = cache.scan()
    names = {one.namespace: report.name(cache, one.namespace) for one in before}
    remove_leftovers(cache)
    enough = make_room(cache, 0, budget, lru=False)
    after = cache.scan()
    _print_deleted(report.gone(before, after), names, form)
    if not enough:
        out.tell(f"torchcache2: {out.size(used_bytes(after))} are left, in use by running processes")
        raise typer.Exit(1)


@app.command("rm")
def _rm(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.")],
    namespaces: Annotated[
        list[str] | None, typer.Argument(metavar="NAMESPACE", help="Their first characters.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Delete all namespaces.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete even what a running process uses.")] = False,
    form: _AsFormat = _Format.table,
) -> None:
    """Delete namespaces. Files that are not the cache's stay."""
    if bool(namespaces) == everything:
        raise OptionError("expected namespaces after DIR, as `torchcache2 ls DIR` prints them, or --all")
    if is_url(directory):
        _remove_in_bucket(directory, namespaces, form, ask=not yes)
        return
    from torchcache2.cli import report
    from torchcache2.files.removal import remove_namespace

    cache = report.folder(directory, "rm")
    chosen = report.chosen(cache, namespaces)
    found = [report.namespace(cache, one) for one in chosen]
    used = [one for one in found if one.in_use is not False]
    if used and not force:
        for one in used:
            why = "is used by a running process" if one.in_use else "may be in use: there are no locks here"
            out.tell(f"torchcache2: {one.id} ({one.name}) {why}; --force deletes it")
        raise typer.Exit(1)
    if not yes:
        for one in found:
            out.tell(f"{one.id}  {one.title}  {one.rows:,} rows  {out.size(one.nbytes)}")
        typer.confirm("Delete?", abort=True, err=True)
    busy = [one.namespace for one in chosen if not remove_namespace(cache, one.namespace, force=force)]
    after = [cache.contents(one.namespace) for one in chosen]
    _print_deleted(report.gone(chosen, after), {one.id: one.name for one in found}, form)
    if busy:
        out.tell(f"torchcache2: {', '.join(busy)}: a process has begun to use it")
        raise typer.Exit(1)


def _remove_in_bucket(url: str, names: Sequence[str] | None, form: _Format, *, ask: bool) -> None:
    """Delete the objects of the format in namespaces, or of all and the tag; other objects stay."""
    from torchcache2.cli import report
    from torchcache2.files.directory import TAG
    from torchcache2.tiers.bucket.files import BucketFiles

    with report.opened(url) as cache:
        assert isinstance(cache.fs, BucketFiles)
        contents = report.chosen(cache, names)
        found = [report.namespace(cache, one) for one in contents]
        if ask:
            for one in found:
                out.tell(f"{one.id}  {one.title}  {one.rows:,} rows  {out.size(one.nbytes)}")
            nbytes = out.size(sum(one.nbytes for one in found))
            out.tell(
                f"{cache.path}: {out.counted(len(found), 'namespace')}, {nbytes}; other processes may "
                f"be using them"
            )
            typer.confirm("Delete?", abort=True, err=True)
        # Delete a namespace's description last, so that an interrupted deletion leaves no undescribed files.
        files = [(one.namespace, info) for one in contents for info in (*one.segments, *one.heads)]
        files += [(one.namespace, info) for one in contents for info in (*one.corrupt, *one.temporary)]
        files += [(one.namespace, info) for one in contents for info in (*one.runs, *one.packs, *one.others)]
        try:
            with out.progress("deleting", sum(info.size for _, info in files)) as advance:
                for first in range(0, len(files), _AT_ONCE):
                    some = files[first : first + _AT_ONCE]
                    cache.fs.remove_all([os.path.join(cache.path, name, info.name) for name, info in some])
                    advance(sum(info.size for _, info in some))
            if not names and not any(one.files for one in cache.scan()):
                cache.fs.remove(os.path.join(cache.path, TAG))
        finally:  # also after a fault of the bucket
            after = [cache.contents(one.namespace) for one in contents]
            _print_deleted(report.gone(contents, after), {one.id: one.name for one in found}, form)


@app.command("export")
def _export(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The cache directory.")],
    file: Annotated[str, typer.Argument(metavar="FILE.tar", help="The file to write.")],
    form: _AsFormat = _Format.table,
) -> None:
    """Write all segments to one file, for another machine."""
    from torchcache2.cli import archive
    from torchcache2.cli.report import folder

    cache = folder(directory, "export")
    contents = cache.scan()
    with out.progress("exporting", sum(info.size for one in contents for info in one.segments)) as advance:
        count, nbytes = archive.export(cache, file, advance)
    if form is _Format.json:
        out.print_json({"file": os.path.abspath(file), "segments": count, "bytes": nbytes})
    else:
        out.say(f"{file}: {out.counted(count, 'segment')}, {out.size(nbytes)}")


@app.command("import")
def _import(
    file: Annotated[str, typer.Argument(metavar="FILE.tar", help="A file that `export` wrote.")],
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The cache directory; it may be new.")],
    form: _AsFormat = _Format.table,
) -> None:
    """Add the segments of an exported file, after checking each. Exit code 1 if some are left out."""
    from torchcache2.cli import archive
    from torchcache2.cli.archive import ArchiveError
    from torchcache2.cli.report import check_folder
    from torchcache2.files.directory import CacheDirectory
    from torchcache2.files.filesystem import FileSystem

    check_folder(directory, "import")
    try:
        with out.progress("importing", os.stat(file).st_size) as advance:
            done = archive.import_archive(file, CacheDirectory(directory, FileSystem()), advance)
    except ArchiveError as error:
        raise OptionError(f"{file!r} {error}; nothing was imported") from None
    bad = [{"file": name, "state": found.state, "reason": found.reason} for name, found in done.refused]
    if form is _Format.json:
        counts = {"segments": done.segments, "rows": done.rows, "bytes": done.nbytes, "kept": done.kept}
        out.print_json({**counts, "files": bad})
    else:
        _print_bad(bad)
        new = f"{out.counted(done.segments, 'segment')} with {out.counted(done.rows, 'row')}"
        out.say(
            f"{new}, {out.size(done.nbytes)} imported; {done.kept:,} there already, {len(bad):,} left out"
        )
    raise typer.Exit(1 if bad else 0)


@app.command("dump")
def _dump(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.")],
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Its first characters.")],
    file: Annotated[str, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    form: _AsFormat = _Format.table,
) -> None:
    """Write the rows of a namespace to a plain safetensors file. Exit code 1 if some cannot be read."""
    from torchcache2.cli import dump
    from torchcache2.cli.report import matching, opened

    with opened(directory) as cache:
        contents = matching(cache, cache.scan(), namespace)
        done = dump.dump(cache, contents, file, lambda total: out.progress("writing", total))
    bad = [{"file": name, "state": one.state, "reason": one.reason} for name, one in done.refused.items()]
    bad = [one for one in bad if one["state"] != "gone"]
    if form is _Format.json:
        counts = {"rows": done.rows, "bytes": done.nbytes, "structures": done.structures}
        dataset = {} if done.length is None else {"length": done.length, "samples": done.indexed}
        out.print_json({"file": os.path.abspath(file), **counts, **dataset, "files": bad})
    else:
        _print_bad(bad)
        text = f"{file}: {out.counted(done.rows, 'row')}, {out.size(done.nbytes)}"
        if done.length is not None:
            text += f"; {done.indexed:,} of the dataset's {out.counted(done.length, 'sample')}"
        if done.structures > 1:
            text += f"; {done.structures} structures"
        out.say(text)
    raise typer.Exit(1 if bad else 0)
