"""What several commands take and print: a cache directory, and the form of the result."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

import torchcache2.cli.printing as out

if TYPE_CHECKING:
    from torchcache2.cli.report import Gone


class Format(str, enum.Enum):
    """How a result is printed."""

    table = "table"
    json = "json"


Dir = Annotated[
    str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.", show_default="here")
]
AsFormat = Annotated[Format, typer.Option("--format", help="How to print the result.")]


def print_bad(files: Sequence[dict[str, str]]) -> None:
    """Print a line for each file that is not good."""
    for one in files:
        out.say("{file}: {state}: {reason}".format_map(one))


def print_deleted(gone: Sequence[Gone], names: Mapping[str, str], form: Format) -> None:
    """Print what was deleted of each namespace, whose classes have these names."""
    if form is Format.json:
        out.print_json([{"class": names[one.namespace], **one._asdict()} for one in gone])
        return
    if gone:
        rows = [(one.namespace, names[one.namespace], f"{one.files:,}", out.size(one.bytes)) for one in gone]
        out.print_table(("namespace", "class", "files", "bytes"), rows)
    files, nbytes = sum(one.files for one in gone), sum(one.bytes for one in gone)
    out.say(f"{out.counted(files, 'file')} deleted, {out.size(nbytes)}")
