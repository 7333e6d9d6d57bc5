"""`Line`: the connections of one process to one server."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from torchcache2.core.places import Server, require_redis

_BLOCK = 256 << 10  # commands are sent in blocks of this size, as each costs a call of the system


class Line:
    """Connections to a server, which the threads of a process share.

    A connection is `idle` only while no reply is on its way to it: otherwise somebody would take the reply to
    another's question for his own. So whoever takes one gives it back when all replies are read, and does
    nothing if something goes wrong meanwhile: it is closed then, as nobody refers to it.
    """

    def __init__(self, server: Server, connect_timeout: float, read_timeout: float) -> None:
        self.server = server
        self.name = server.name
        self._timeouts = {"socket_connect_timeout": connect_timeout, "socket_timeout": read_timeout}
        self._idle: list[Any] = []
        self.is_closed = False

    def __repr__(self) -> str:
        return f"Line({self.name!r})"

    def take(self) -> Any:
        """A connection that no other thread or process uses."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.pid == os.getpid() and _is_quiet(connection):
                return connection
            connection.disconnect()  # in a child this does not end the connection of its parent
        connection = self._make()
        connection.connect()
        return connection

    def give_back(self, connection: Any) -> None:
        """Keep a connection for others; all replies have been read."""
        if connection.pid == os.getpid():
            self._idle.append(connection)
        if self.is_closed:
            self.close()

    def close(self) -> None:
        """Close the connections that are idle, and others when they are given back."""
        self.is_closed = True
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().disconnect()

    def _make(self) -> Any:
        connections = require_redis("a Redis server").connection
        options: dict[str, Any] = dict(self.server.options)
        is_secret = options.pop("ssl", any(name.startswith("ssl_") for name in options))
        kind = connections.Connection
        if "path" in options:
            kind = connections.UnixDomainSocketConnection
        elif is_secret:
            kind = connections.SSLConnection
        # The connection does not tell the server its name and version, since that command may be forbidden.
        # Later versions of redis-py look these up when it is made, which takes milliseconds, unless told so.
        if hasattr(connections, "DriverInfo"):
            options["driver_info"] = None
        # Without an object for retries, redis-py does not try anything again.
        connection = kind(**options, **self._timeouts, protocol=2)
        connection.driver_info = connection.lib_name = connection.lib_version = None
        return connection


def send(connection: Any, commands: Sequence[tuple[Any, ...]]) -> None:
    """Send commands, in blocks; their replies are not waited for."""
    for block in _blocks(connection, commands):
        connection.send_packed_command(block, check_health=False)


def read(connection: Any, returned: Any = ()) -> Any:
    """The next reply; an error of a class that is `returned` is not raised."""
    try:
        return connection.read_response()
    except returned as error:
        return error.with_traceback(None)


def _blocks(connection: Any, commands: Sequence[tuple[Any, ...]]) -> Iterator[list[Any]]:
    """The bytes of some commands, each block as parts that are sent one by one."""
    pieces: list[bytes] = []
    size = 0
    for command in commands:
        packed = connection.pack_command(*command)
        more = sum(map(len, packed))
        if pieces and size + more > _BLOCK:
            yield [b"".join(pieces)]
            pieces, size = [], 0
        pieces += packed
        size += more
        if size > _BLOCK:  # a timeout is for all that one call sends
            whole = memoryview(b"".join(pieces))
            yield [whole[start : start + _BLOCK] for start in range(0, size, _BLOCK)]
            pieces, size = [], 0
    if pieces:
        yield [b"".join(pieces)]


def _is_quiet(connection: Any) -> bool:
    """Whether an idle connection is open, with nothing to be read."""
    try:
        return not connection.can_read()
    except Exception:
        return False
