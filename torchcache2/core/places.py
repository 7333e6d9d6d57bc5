"""`place_of`: where rows are kept outside of memory: a folder, Redis servers, or a bucket."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torchcache2.core.buckets import Bucket, is_url
from torchcache2.core.errors import OptionError
from torchcache2.core.logs import shown
from torchcache2.core.servers import SCHEMES, Servers

__all__ = ["Place", "check_unused", "place_of"]

Place = str | os.PathLike[str] | Servers | Bucket
_OPTION = "persistent_cache_dir"


def place_of(path: Any, for_buckets: Mapping[str, Any]) -> str | Servers | Bucket | None:
    """The place that the option `persistent_cache_dir` names.

    Parameters
    ----------
    path : path, URL, Servers, Bucket or None
        As it was given, or as it was returned before.
    for_buckets : mapping
        The options that only a bucket has, with their values.

    Raises
    ------
    OptionError
        If this is no place, or an option has no meaning there.
    """
    text = path
    if path is None or isinstance(path, (Servers, Bucket)):
        text = None
    elif isinstance(path, (str, os.PathLike)):
        text = os.fspath(path)
    if text is not None and not (isinstance(text, str) and text):
        raise OptionError(
            f"{_OPTION}={shown(path)}: expected None, the path of a folder, or the URL of a server or bucket"
        )
    is_server = text is not None and text.startswith(tuple(scheme[:-1] for scheme in SCHEMES))
    if text is not None and is_url(text) and not is_server:
        return Bucket.of(text, option=_OPTION, **for_buckets)
    if not isinstance(path, Bucket):
        check_unused(for_buckets, _OPTION)
    if text is None:
        return path  # type: ignore[no-any-return]
    if text.startswith(SCHEMES):
        return Servers.of(text, _OPTION)
    if is_server:
        raise OptionError(  # the URL is not shown, as there may be a password in it
            f"{_OPTION} is a URL of {text.partition(':')[0]}: expected one that begins with "
            f"{', '.join(SCHEMES)}"
        )
    if not _is_name(text):
        raise OptionError(f"{_OPTION}={shown(path)}: expected a path that the system can have")
    return os.path.abspath(os.path.expanduser(text))


def check_unused(for_buckets: Mapping[str, Any], option: str) -> None:
    """Raise `OptionError` if there is an option that only a bucket has."""
    for name, value in for_buckets.items():
        if value is not None:
            shown = "…" if name == "storage_options" else repr(value)  # there may be a secret in it
            raise OptionError(
                f"{name}={shown}: expected None, as only a bucket has this option: {option}='s3://bucket/folder'"
            )


def _is_name(path: str) -> bool:
    """Whether the system can be asked for a path at all."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:  # the text has half of a surrogate pair
        return False
