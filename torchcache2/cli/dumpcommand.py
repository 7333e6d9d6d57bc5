"""The command ``torchcache2 dump``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

import torchcache2.cli.printing as out
from torchcache2.cli.parameters import AsFormat, Format, print_bad


def dump(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="The cache directory, or a URL.")],
    namespace: Annotated[str, typer.Argument(metavar="NAMESPACE", help="Its first characters.")],
    file: Annotated[str, typer.Argument(metavar="OUT.safetensors", help="The file to write.")],
    form: AsFormat = Format.table,
) -> None:
    """Write the rows of a namespace to a plain safetensors file. Exit code 1 if some cannot be read."""
    from torchcache2.cli import dump as dumping
    from torchcache2.cli.places import opened
    from torchcache2.cli.report import matching

    with opened(directory) as cache:
        contents = matching(cache, cache.scan(), namespace)
        done = dumping.dump(cache, contents, file, lambda total: out.progress("writing", total))
    bad = [{"file": name, "state": one.state, "reason": one.reason} for name, one in done.refused.items()]
    bad = [one for one in bad if one["state"] != "gone"]
    if form is Format.json:
        counts = {"rows": done.rows, "bytes": done.nbytes, "structures": done.structures}
        dataset = {} if done.length is None else {"length": done.length, "samples": done.indexed}
        out.print_json({"file": os.path.abspath(file), **counts, **dataset, "files": bad})
    else:
        print_bad(bad)
        text = f"{file}: {out.counted(done.rows, 'row')}, {out.size(done.nbytes)}"
        if done.length is not None:
            text += f"; {done.indexed:,} of the dataset's {out.counted(done.length, 'sample')}"
        if done.structures > 1:
            text += f"; {done.structures} structures"
        out.say(text)
    raise typer.Exit(1 if bad else 0)
