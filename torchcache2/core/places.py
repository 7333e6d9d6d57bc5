"""Places for rows outside of memory: a folder, Redis servers or a bucket. Texts never contain secrets."""

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

# Buckets.

_EXTRAS = {  # by scheme: the library needed, and the extra that installs it
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
    """Options that are never shown, and pickled only for processes being started."""

    def __repr__(self) -> str:
        return "{…}"

    def __reduce__(self) -> tuple[Any, ...]:
        is_for_child = get_spawning_popen() is not None
        return Secrets, (dict(self) if is_for_child else {},)

    def __deepcopy__(self, memo: dict[int, Any]) -> Secrets:
        return self


@dataclasses.dataclass(frozen=True)
class Bucket:
    """A bucket that keeps rows, and the local folder in front of it.

    Attributes
    ----------
    url : str
        Such as ``s3://bucket/folder``, without a slash at the end.
    storage_options : Secrets
        Options of fsspec's file system, such as keys.
    local_dir : str, optional
        The folder for segments of the bucket, and for new ones until they are uploaded. None: temporary.
    remote_size : int or str, optional
        Most bytes of the folder in the bucket. None: no limit.
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
        option: str = "cache_dir",
    ) -> Bucket:
        """From the user's options; `option` is their name for the URL.

        Raises
        ------
        OptionError
            If an option has an invalid value, or a library is missing. Does not contact the bucket.
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
                f"{_EXAMPLES}. The address of a storage server belongs in storage_options="
            )
        if not rest.strip("/"):
            raise OptionError(f"{option}={url!r} names no bucket: expected a URL such as {_EXAMPLES}")
        given = {} if storage_options is None else storage_options
        if not (isinstance(given, Mapping) and all(isinstance(name, str) for name in given)):
            kind = type(given).__name__
            raise OptionError(
                f"storage_options=…, a {kind}: expected a dict of options of fsspec's file system"
            )
        if local_dir is not None:
            if is_url(local_dir) or not isinstance(local_dir, (str, os.PathLike)) or not os.fspath(local_dir):
                raise OptionError(f"local_dir={local_dir!r}: expected None or the path of a local folder")
            local_dir = os.path.abspath(os.path.expanduser(os.fspath(local_dir)))
            if scheme in ("file", "local") and os.path.realpath(rest) == os.path.realpath(local_dir):
                raise OptionError(
                    f"local_dir={local_dir!r} is the folder of {option} itself: files deleted there "
                    "for room would be lost. Give another folder, or pass this one as a path, not a URL"
                )
        if isinstance(remote_size, float):
            raise OptionError(
                f"remote_size={remote_size!r}: expected bytes, or a text like '2TB': the free space of a "
                f"bucket is unknown"
            )
        if remote_size is not None:
            parse_size("remote_size", remote_size)
        cls._check_scheme(scheme, option)
        return cls(url.rstrip("/"), Secrets(given), local_dir, remote_size)

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
_OPTIONS: dict[str, tuple[type, ...]] = {  # keys of a dict, and the types of their values
    **dict.fromkeys(("host", "path", "username", "password"), (str,)),
    **dict.fromkeys(("port", "db"), (int, str)),
    **dict.fromkeys(("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile"), (str,)),
    **dict.fromkeys(("ssl_password", "ssl_cert_reqs"), (str,)),
    **dict.fromkeys(("ssl", "ssl_check_hostname"), (bool,)),
}
_NUMBERS = {"port": (1, 65535), "db": (0, 1 << 31)}  # the least and the most


@dataclasses.dataclass(frozen=True)
class Server:
    """The address and options of one server.

    Attributes
    ----------
    name : str
        ``host:port``, or ``unix:path``: used in messages, and to assign keys to servers.
    options : tuple of (str, object)
        Options of redis-py's connections, sorted by name; may include a password.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = dataclasses.field(repr=False)

    @classmethod
    def of(cls, entry: Any, option: str = "hosts") -> Server:
        """The server of a URL or a dict; for anything else, `OptionError`, without showing the value."""
        if isinstance(entry, Server):
            return entry
        given = _of_url(entry, option) if isinstance(entry, str) else entry
        if not isinstance(given, Mapping):
            raise OptionError(f"{option} has an entry of type {type(entry).__name__}: {_EXPECTED}")
        its = f"{option} has an entry"
        for name, value in given.items():
            if name not in _OPTIONS:
                raise OptionError(f"{its} with {name!r}, which a server does not have: {', '.join(_OPTIONS)}")
            if value is not None and type(value) not in _OPTIONS[name]:
                raise OptionError(f"{its} whose {name!r} is of type {type(value).__name__}: {_EXPECTED}")
        given = {name: value for name, value in given.items() if value is not None}
        for name in _NUMBERS.keys() & given.keys():
            least, most = _NUMBERS[name]
            with contextlib.suppress(ValueError):
                given[name] = int(given[name])
            if type(given[name]) is str or not least <= given[name] <= most:  # not shown: may be a password
                raise OptionError(f"{its} whose {name!r} is not a number from {least} to {most}")
        if "path" in given:
            if {"host", "port", "ssl"} & set(given):
                raise OptionError(f"{its} with a path and a host: a server has one of them")
            return cls(f"unix:{given['path']}", tuple(sorted(given.items())))
        if not given.get("host"):
            raise OptionError(f"{its} without a host: {_EXPECTED}")
        given.setdefault("port", _PORT)
        return cls(f"{given['host']}:{given['port']}", tuple(sorted(given.items())))


@dataclasses.dataclass(frozen=True)
class Servers:
    """The servers that keep the rows of a cache, each a part of them.

    Attributes
    ----------
    servers : tuple of Server
        At least one, sorted by name, so that the user's order does not matter.
    buffer : int
        Rows to collect before sending them.
    guard : str
        The file that processes lock as long as they use a server of our own; empty if there is none.
    """

    servers: tuple[Server, ...]
    buffer: int = 1
    guard: str = ""

    @classmethod
    def of(cls, hosts: Any, option: str = "hosts", *, buffer: int = 1) -> Servers:
        """The servers of a URL, a dict, or a sequence of these."""
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
        raise OptionError(f"{option} has a text that is not the URL of a server: {_EXPECTED}")
    connection = require_redis(option).connection
    try:
        given = dict(connection.parse_url(url))
        place = urlsplit(url)
        if "path" not in given and not re.fullmatch("/?[0-9]*", place.path):
            raise ValueError("a database that is not a number, which redis-py would ignore")
        kind = given.pop("connection_class", None)
    except ValueError:  # its message may contain the password
        raise OptionError(f"{option} has a URL that cannot be read: {_EXPECTED}") from None
    if kind is connection.SSLConnection:
        given["ssl"] = True
    if "path" not in given:
        given.setdefault("host", "localhost")
    return given


# Any place.

Place = str | os.PathLike[str] | Servers | Bucket
_OPTION = "persistent_cache_dir"


def place_of(path: Any, for_buckets: Mapping[str, Any]) -> str | Servers | Bucket | None:
    """The place given by the option `persistent_cache_dir`.

    Parameters
    ----------
    path : path, URL, Servers, Bucket or None
        The option's value, or an earlier result.
    for_buckets : mapping
        The options for buckets only, with their values.

    Raises
    ------
    OptionError
        If this is not a valid place, or an option does not apply there.
    """
    if path is None or isinstance(path, (Servers, Bucket)):
        if not isinstance(path, Bucket):
            check_unused(for_buckets, _OPTION)
        return path
    text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
    if not (isinstance(text, str) and text):
        raise OptionError(
            f"{_OPTION}={shown(path)}: expected None, the path of a folder, or the URL of a server or bucket"
        )
    is_server = text.startswith(tuple(scheme[:-1] for scheme in SCHEMES))
    if is_url(text) and not is_server:
        return Bucket.of(text, option=_OPTION, **for_buckets)
    check_unused(for_buckets, _OPTION)
    if text.startswith(SCHEMES):
        return Servers.of(text, _OPTION)
    if is_server:
        raise OptionError(  # without the URL, which may contain a password
            f"{_OPTION} is a URL of {text.partition(':')[0]}: expected one that begins with "
            f"{', '.join(SCHEMES)}"
        )
    with contextlib.suppress(UnicodeEncodeError):  # a text with an unpaired surrogate
        if b"\0" not in os.fsencode(text):
            return os.path.abspath(os.path.expanduser(text))
    raise OptionError(f"{_OPTION}={shown(path)}: the system does not accept this path")


def check_unused(for_buckets: Mapping[str, Any], option: str) -> None:
    """Raise `OptionError` if an option for buckets only is set."""
    for name, value in for_buckets.items():
        if value is not None:
            shown = "…" if name == "storage_options" else repr(value)  # may contain a secret
            raise OptionError(
                f"{name}={shown}: expected None, as only a bucket has this option: "
                f"{option}='s3://bucket/folder'"
            )
