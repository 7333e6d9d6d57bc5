"""``torchcache2 rm`` for a URL: the only thing that deletes in a bucket."""

from __future__ import annotations

import os
from collections.abc import Sequence

import typer

import torchcache2.cli.printing as out
from torchcache2.cli.parameters import Format, print_deleted

_AT_ONCE = 100  # objects


def remove_in_bucket(names: Sequence[str], url: str, form: Format, *, ask: bool) -> None:
    """Delete the objects of the format in namespaces, or of all and the tag; other objects stay.

    See `torchcache2.cli.places.chosen` for the names.
    """
    from torchcache2.cli import report
    from torchcache2.cli.places import chosen
    from torchcache2.files.directory import TAG
    from torchcache2.tiers.bucket.files import BucketFiles

    with chosen(names, url) as (cache, contents, is_all):
        assert isinstance(cache.fs, BucketFiles)
        found = [report.namespace(cache, one) for one in contents]
        if ask:
            for one in found:
                out.tell(f"{one.id}  {one.title}  {one.rows:,} rows  {out.size(one.nbytes)}")
            nbytes = out.size(sum(one.nbytes for one in found))
            out.tell(f"{cache.path}: {out.counted(len(found), 'namespace')}, {nbytes}; somebody may use them")
            typer.confirm("Delete?", abort=True, err=True)
        # A namespace loses what describes it last, so that nobody wonders what is left when this is stopped.
        files = [(one.namespace, info) for one in contents for info in (*one.segments, *one.heads)]
        files += [(one.namespace, info) for one in contents for info in (*one.corrupt, *one.temporary)]
        files += [(one.namespace, info) for one in contents for info in one.others]
        try:
            with out.progress("deleting", sum(info.size for _, info in files)) as advance:
                for first in range(0, len(files), _AT_ONCE):
                    some = files[first : first + _AT_ONCE]
                    cache.fs.remove_all([os.path.join(cache.path, name, info.name) for name, info in some])
                    advance(sum(info.size for _, info in some))
            if is_all and not any(one.files for one in cache.scan()):
                cache.fs.remove(os.path.join(cache.path, TAG))
        finally:  # also what is gone if the bucket has failed
            after = [cache.contents(one.namespace) for one in contents]
            print_deleted(report.gone(contents, after), {one.id: one.name for one in found}, form)
