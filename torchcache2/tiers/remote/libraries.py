"""What the libraries of fsspec differ in: their classes, time limits, finalizers, and words."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from typing import Any

from torchcache2.core.errors import require
from torchcache2.core.private import FINALIZERS

AT_ONCE = 32  # requests
CONNECT = 5.0  # seconds that a server may take to accept a connection
_TIMES = ("mtime", "LastModified", "last_modified", "created")  # when an object was written


def class_of(url: str) -> Any:
    """The file system of a URL."""
    scheme = url.partition("://")[0]
    if scheme in ("gs", "gcs"):
        # For these schemes gcsfs registers another class, which first asks by gRPC of which type a bucket is.
        # An emulator does not answer that, and in a forked child it fails.
        return require("gcsfs.core", "gcs", "a URL").GCSFileSystem
    return require("fsspec", "remote", "a URL").get_filesystem_class(scheme)


def time_limits(protocols: Iterable[str], options: Mapping[str, Any], patience: float) -> dict[str, Any]:
    """Options that have a library give up a connection that hangs; what the user has said comes first."""
    if "s3" in protocols:
        config: dict[str, Any] = {"connect_timeout": CONNECT, "read_timeout": patience}
        config |= {"max_pool_connections": AT_ONCE, "retries": {"max_attempts": 0}}
        return {"config_kwargs": {**config, **(options.get("config_kwargs") or {})}}
    if "gs" in protocols:
        aiohttp = require("aiohttp", "gcs", "a URL")
        limits = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT, sock_read=patience)
        return {"requests_timeout": limits} | dict(options)
    return {}


def keep_finalizers_off(fs: Any) -> None:
    """Have a library not close a file system when that is collected, or when the process ends."""
    for finalizer in list(FINALIZERS):
        alive = finalizer.peek()
        if alive is not None and alive[0] is fs:
            finalizer.detach()


def mtime(info: Mapping[str, Any]) -> float:
    """When an object was written, in seconds since 1970; 0 if nobody knows."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0
