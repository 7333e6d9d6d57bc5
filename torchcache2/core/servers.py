"""`Servers`: the Redis servers that keep rows. No password of theirs is in any text."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from torchcache2.core.errors import OptionError
from torchcache2.core.extras import require

__all__ = ["SCHEMES", "Server", "Servers", "require_redis"]

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
