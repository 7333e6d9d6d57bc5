"""Where rows are kept outside of memory: a folder, Redis servers or a bucket. No secret is in any text."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any
from urllib.parse import urlsplit

from torchcache2.core.errors import OptionError, require
from torchcache2.core.logs import shown
from torchcache2.core.sizes import Size, parse_size

__all__ = [
    "SCHEMES",
    "Bucket",
    "Place",
    "Secrets",
    "Server",
    "Servers",
    "check_unused",
    "is_url",
    "place_of",
    "require_redis",
]

# Buckets.

_EXTRAS = {  # the library that a scheme needs, and the extra that installs it
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
}
_EXAMPLES = "'s3://bucket/folder', 'gs://bucket/folder' or 'file:///mnt/share/folder'"


def is_url(path: Any) -> bool:
    """Whether a path is a URL."""
    return isinstance(path, str) and "://" in path


class Secrets(dict[str, Any]):
    """Options that are shown nowhere, and are in no pickle but one for a process that is being started."""

    def __repr__(self) -> str:
        return "{…}"

    def __reduce__(self) -> tuple[Any, ...]:
        is_for_child = get_spawning_popen() is not None
        return Secrets, (dict(self) if is_for_child else {},)

    def __deepcopy__(self, memo: dict[int, Any]) -> Secrets:
        return self


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Where rows are kept remotely, and the local folder in front of it.

    Attributes
    ----------
    url : str
        Such as ``s3://bucket/folder``, without a slash at the end.
    storage_options : Secrets
        What the file system of fsspec takes, such as keys.
    local_dir : str, optional
        The folder that has segments of the bucket, and new ones until they are uploaded. None: a temporary
        one.
    remote_size : int or str, optional
        How many bytes the folder in the bucket may have. None: any number.
    """

    url: str
    storage_options: Secrets = dataclasses.field(default_factory=Secrets, repr=False)
    local_dir: str | None = None
    remote_size: Size | None = None

    @classmethod
    def of(
        cls,
        url: str,
        *,
        local_dir: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        remote_size: Size | None = None,
        option: str = "path",
    ) -> Bucket:
        """From options as users give them; `option` is what they call the URL.

        Raises
        ------
        OptionError
            If an option cannot have its value, or a library is missing. Nothing is asked of the bucket yet.
        """
        scheme, _, rest = url.partition("://")
        if "@" in rest.partition("/")[0] and scheme not in ("abfs", "abfss"):
            raise OptionError(
                f"{option} is a URL with a name or a password, which messages would show: give these as "
                "storage_options="
            )
        if scheme in ("http", "https"):
            raise OptionError(
                f"{option}='{scheme}://…': nothing can be written to a web server; expected a URL such as "
                f"{_EXAMPLES}. The address of a storage server belongs into storage_options="
            )
        if not rest.strip("/"):
            raise OptionError(f"{option}={url!r} names no bucket: expected a URL such as {_EXAMPLES}")
        if storage_options is not None and not (
            isinstance(storage_options, Mapping) and all(isinstance(name, str) for name in storage_options)
        ):
            kind = type(storage_options).__name__
            raise OptionError(
                f"storage_options=…, a {kind}: expected a dict of what fsspec's file system takes"
            )
        if local_dir is not None:
            is_path = isinstance(local_dir, (str, os.PathLike)) and os.fspath(local_dir) != ""
            if not is_path or is_url(local_dir):
                raise OptionError(f"local_dir={local_dir!r}: expected None or the path of a local folder")
            local_dir = os.path.abspath(os.path.expanduser(os.fspath(local_dir)))
            if scheme in ("file", "local"):
                place = url.partition("://")[2]
                if os.path.realpath(place) == os.path.realpath(local_dir):
                    raise OptionError(
                        f"local_dir={local_dir!r} is the folder of {option} itself: what makes room there "
                        "would be lost. Give another one, or the folder as a path that is no URL"
                    )
        if remote_size is not None:
            if isinstance(remote_size, float):
                raise OptionError(
                    f"remote_size={remote_size!r}: expected bytes, or a text like '2TB': nobody knows what "
                    "is free in a bucket"
                )
            parse_size("remote_size", remote_size, free=None)
        cls._check_scheme(scheme, option)
        return cls(url.rstrip("/"), Secrets(storage_options or {}), local_dir, remote_size)

    @staticmethod
    def _check_scheme(scheme: str, option: str) -> None:
        library, extra = _EXTRAS.get(scheme, ("fsspec", "remote"))
        wanted = f"{option}='{scheme}://…'"
        fsspec = require("fsspec", "remote", wanted)
        require(library, extra, wanted)
        try:
            fsspec.get_filesystem_class(scheme)
        except ValueError:
            raise OptionError(
                f"{wanted}: fsspec knows no such scheme; expected a URL such as {_EXAMPLES}"
            ) from None
        except ImportError as error:
            raise OptionError(f"{wanted} needs a library that is not installed ({error})") from None

    def __hash__(self) -> int:
        return hash(self.url)


# Redis servers.

SCHEMES = ("redis://", "rediss://", "unix://")
_PORT = 6379
_EXPECTED = (
    "expected a URL such as 'redis://:password@host:6379/0' (rediss:// for TLS, unix:// for a socket), or a "
    "dict such as {'host': 'node1', 'port': 6379, 'password': '…'}"
)
_OPTIONS: dict[str, tuple[type, ...]] = {  # of a dict, and the types of their values
    "host": (str,),
    "port": (int, str),
    "path": (str,),
    "db": (int, str),
    "username": (str,),
    "password": (str,),
    "ssl": (bool,),
    "ssl_ca_certs": (str,),
    "ssl_ca_path": (str,),
    "ssl_ca_data": (str,),
    "ssl_certfile": (str,),
    "ssl_keyfile": (str,),
    "ssl_password": (str,),
    "ssl_cert_reqs": (str,),
    "ssl_check_hostname": (bool,),
}


@dataclasses.dataclass(frozen=True)
class Server:
    """How one server is reached.

    Attributes
    ----------
    name : str
        ``host:port``, or ``unix:path``: what messages call it, and by which keys are shared out.
    options : tuple of (str, object)
        What redis-py's connections take, sorted by name; a password may be among them.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, entry: Any, option: str = "hosts") -> Server:
        """The server that a URL or a dict names; `OptionError`, which shows no value, for anything else."""
        if isinstance(entry, Server):
            return entry
        if isinstance(entry, str):
            given = _of_url(entry, option)
        elif isinstance(entry, Mapping):
            given = dict(entry)
        else:
            raise OptionError(f"{option} has an entry of type {type(entry).__name__}: {_EXPECTED}")
        for name, value in list(given.items()):
            if name not in _OPTIONS:
                known = ", ".join(_OPTIONS)
                raise OptionError(
                    f"{option} has an entry with {name!r}, which a server does not have: {known}"
                )
            if value is None:
                del given[name]
            elif type(value) not in _OPTIONS[name]:
                kind = type(value).__name__
                raise OptionError(f"{option} has an entry whose {name!r} is of type {kind}: {_EXPECTED}")
        for name, least, most in (("port", 1, 65535), ("db", 0, 1 << 31)):
            if name in given:
                given[name] = _number(given[name], least, most, f"{option} has an entry whose {name!r}")
        if "path" in given:
            if {"host", "port", "ssl"} & set(given):
                raise OptionError(f"{option} has an entry with a path and a host: a server has one of them")
            name = f"unix:{given['path']}"
        else:
            if not given.get("host"):
                raise OptionError(f"{option} has an entry without a host: {_EXPECTED}")
            given.setdefault("port", _PORT)
            name = f"{given['host']}:{given['port']}"
        return cls(name, tuple(sorted(given.items())))


@dataclasses.dataclass(frozen=True)
class Servers:
    """The servers that keep the rows of a cache, each a part of them.

    Attributes
    ----------
    servers : tuple of Server
        At least one, sorted by name, so that the order in which they were given does not matter.
    buffer : int
        So many rows are gathered before they are written.
    guard : str
        The pipe that processes hold open as long as they use a server of our own; empty if there is none.
    """

    servers: tuple[Server, ...]
    buffer: int = 1
    guard: str = ""

    @classmethod
    def of(cls, hosts: Any, option: str = "hosts", *, buffer: int = 1) -> Servers:
        """The servers that a URL, a dict, or a sequence of these names."""
        require_redis(option)
        entries = hosts if isinstance(hosts, Sequence) and not isinstance(hosts, str) else [hosts]
        servers = {server.name: server for server in (Server.of(entry, option) for entry in entries)}
        if not servers:
            raise OptionError(f"{option} is empty: {_EXPECTED}; None starts a server")
        if len(servers) < len(entries):
            raise OptionError(f"{option} names a server twice: {', '.join(sorted(servers))}")
        return cls(tuple(servers[name] for name in sorted(servers)), buffer)

    def __str__(self) -> str:
        return ", ".join(server.name for server in self.servers)


def require_redis(option: str) -> Any:
    """The module `redis`; an `OptionError` says how to install it."""
    return require("redis", "redis", option)


def _of_url(url: str, option: str) -> dict[str, Any]:
    if not url.startswith(SCHEMES):
        raise OptionError(f"{option} has a text that is no URL of a server: {_EXPECTED}")
    connection = require_redis(option).connection
    try:
        given = dict(connection.parse_url(url))
        place = urlsplit(url)
        if "path" not in given and not re.fullmatch("/?[0-9]*", place.path):
            raise ValueError("a data base that is no number, which redis-py ignores")
        kind = given.pop("connection_class", None)
    except ValueError:  # its message may have the password
        raise OptionError(f"{option} has a URL that cannot be read: {_EXPECTED}") from None
    if kind is connection.SSLConnection:
        given["ssl"] = True
    if "path" not in given:
        given.setdefault("host", "localhost")
    return given


def _number(value: Any, least: int, most: int, what: str) -> int:
    with contextlib.suppress(ValueError):
        if least <= int(value) <= most:
            return int(value)
    raise OptionError(f"{what} is not a number from {least} to {most}")  # its value may be a password


# Any place.

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
