"""The cache directory that a command is about: a folder, or the URL of one in a bucket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torchcache2.cli.report import existing, matching
from torchcache2.core.errors import OptionError
from torchcache2.core.logs import ToldOnce
from torchcache2.core.places import Bucket, is_url
from torchcache2.files.directory import NAMESPACE_NAME, TAG, CacheDirectory, Contents
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.bucket.files import BucketFiles
from torchcache2.tiers.bucket.objects import Objects

_OPTIONS = ": for the command line, variables such as FSSPEC_S3_KEY, or fsspec's configuration"


@contextlib.contextmanager
def opened(path: str) -> Iterator[CacheDirectory]:
    """The cache directory at a path or URL; an error if there is none, or if the bucket cannot be reached."""
    if not is_url(path):
        yield existing(path, FileSystem())
        return
    with _told():
        bucket = Bucket.of(path, option="DIR")
    url = bucket.url
    objects = Objects(bucket, ToldOnce(lambda _: False))  # a fault is an error here, and no warning
    try:
        with _told():
            objects.check()
        cache = CacheDirectory(url, BucketFiles(objects))
        try:
            names = [info.name for info in cache.fs.listing(cache.path)]
        except FileNotFoundError:
            raise OptionError(f"{url!r} does not exist") from None
        if (
            TAG not in names and not cache.scan()
        ):  # objects of others may be beside ours, with and without a tag
            raise OptionError(
                f"{cache.path!r} is not a cache directory: it has neither {TAG} nor a namespace"
            )
        yield cache
    finally:
        objects.close()


def folder(path: str, command: str) -> CacheDirectory:
    """The cache directory at a path; an `OptionError` if it is a URL."""
    check_folder(path, command)
    return existing(path, FileSystem())


def check_folder(path: str, command: str) -> None:
    """Raise an `OptionError` if a path is a URL, which is not shown, as there may be a password in it."""
    if is_url(path):
        raise OptionError(f"`torchcache2 {command}` takes a folder, not a URL: copy what is there")


@contextlib.contextmanager
def chosen(names: Sequence[str], url: str) -> Iterator[tuple[CacheDirectory, list[Contents], bool]]:
    """The namespaces of a bucket that are meant, and whether all of it is.

    The names are first characters of namespaces in `url`, or one URL: of a namespace, or of all.
    """
    if not is_url(url) or any(map(is_url, names)):
        if len(names) != 1:
            raise OptionError("expected one URL, or namespaces and --dir URL")
        url, names = names[0].rstrip("/"), []
        top, _, last = url.rpartition("/")
        if NAMESPACE_NAME.fullmatch(last):
            url, names = top, [last]
    with opened(url) as cache:
        contents = cache.scan()
        some = {one.namespace: one for name in names for one in [matching(cache, contents, name)]}
        yield cache, list(some.values()) if names else contents, not names


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Has an error that is about `storage_options` say where the command line takes them from."""
    try:
        yield
    except OptionError as error:
        if "storage_options" not in str(error):
            raise
        raise OptionError(f"{error}{_OPTIONS}") from None
