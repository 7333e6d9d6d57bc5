"""`Clients`: a process's commands to its Redis servers, and their replies, with faults handled.

Commands go to each server in pipelines, over connections of redis-py. Each of several servers keeps a share
of the keys; all are asked at once. A failing server is skipped for a while, and then tried by a background
thread, so that no call waits for it. Meanwhile its rows are misses, with one warning.
"""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import xxhash

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Flags, Positions, Words
from torchcache2.core.logs import WarnOnce
from torchcache2.core.places import Secrets, Server, Servers, require_redis
from torchcache2.tiers.base import Breaker

Command = tuple[Any, ...]
_CHECKED = b"torchcache2:check"
_NEEDED: tuple[Command, ...] = (
    (b"INFO", b"cluster"),
    (b"SCAN", b"0", b"MATCH", _CHECKED, b"COUNT", 1),
    (b"SET", _CHECKED, b"", b"NX", b"PX", 1),
    (b"MGET", _CHECKED),
    (b"EXISTS", _CHECKED),
    (b"DEL", _CHECKED),
    (b"UNLINK", _CHECKED),
    (b"DBSIZE",),
)
_SLOTS = b"CLUSTER", b"SLOTS"
_TRIED = b"MGET", b"torchcache2:try"  # nothing has this name
_PAGE = 1000  # names that a server visits for a page of SCAN
_ASKED = 512  # values asked of a server at once: it holds its whole answer in memory
_SECRET = ("password", "ssl_password")
_LONGEST = 200  # characters of an error
_DOWN = ("ClusterDownError", "MasterDownError")  # by name, as redis-py is imported only when used
_MOVED = ("MovedError", "AskError", "TryAgainError")  # another node of the cluster serves this name
_UNWRITABLE = ("ReadOnlyError", "NoPermissionError")
_UNWRITABLE_WORDS = ("MISCONF", "NOREPLICAS")
_FULL = (
    "the Redis server %s is full: its rows are read, and new ones are not kept there for a minute. Raise its "
    "maxmemory (capacity_per_node if this library has started it), or have it forget rows: policy='lru', "
    "which is its maxmemory-policy allkeys-lru"
)
# The constants of splitmix64. All processes must compute the same shares, so never change them.
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)


class Lost(enum.Enum):
    """Stands for a reply that did not arrive."""

    LOST = "lost"


LOST: Final = Lost.LOST


def failed(reply: Any) -> bool:
    """Whether a reply is missing or an error."""
    return reply is LOST or isinstance(reply, Exception)


class Node:
    """One server, and connections to it, shared by the threads of a process.

    A connection is idle only if no reply is pending: otherwise the next user would take that reply for its
    own. redis-py's pool is unsuitable: an interrupt may leave a connection there before it has authenticated.

    Attributes
    ----------
    using, writing : Breaker
        Pauses of the server, and of writes to it.
    """

    def __init__(
        self, server: Server, connect_timeout: float, read_timeout: float, pause: float = 1.0
    ) -> None:
        redis, options = require_redis("a Redis server"), dict(server.options)
        self.server, self.name = server, server.name
        self.using, self.writing = Breaker(pause), Breaker(pause)
        if "path" in options:
            options["unix_socket_path"] = options.pop("path")
        options.setdefault("ssl", any(name.startswith("ssl_") for name in options))
        self._pool = redis.Redis(
            **options,
            protocol=2,
            socket_connect_timeout=connect_timeout,
            socket_timeout=read_timeout,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        ).connection_pool
        self._error = redis.exceptions.ResponseError
        self._idle: list[Any] = []
        self._is_closed = False

    def send(self, commands: Sequence[Command]) -> Any:
        """Send commands; returns the connection, to `give_back` after reading all replies.

        On an error, drop it instead: without references, it is closed.
        """
        connection = self._take()
        connection.send_packed_command(connection.pack_commands(commands))
        return connection

    def reply(self, connection: Any) -> Any:
        """The next reply; returns an error of the command, and raises an error of the connection."""
        try:
            return connection.read_response()
        except self._error as error:
            return error.with_traceback(None)  # which would keep the connection

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands, and return their replies."""
        connection = self.send(commands)
        replies = [self.reply(connection) for _ in commands]
        self.give_back(connection)
        return replies

    def give_back(self, connection: Any) -> None:
        """Make a connection available to other threads."""
        if connection.pid == os.getpid():
            self._idle.append(connection)
        if self._is_closed:
            self.close()

    def close(self) -> None:
        """Close idle connections, and the others when they are given back."""
        self._is_closed = True
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().disconnect()

    def _take(self) -> Any:
        """A connection that no other thread or process uses."""
        while self._idle:
            with contextlib.suppress(Exception):  # another thread was faster, or the server has gone
                connection = self._idle.pop()
                if connection.pid == os.getpid() and not connection.can_read():
                    return connection
                connection.disconnect()  # a child's disconnect leaves its parent's connection open
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        connection.connect()
        return connection


class Shares:
    """Which of several servers keeps a row.

    Rendezvous hashing: name and key give a number, and the server with the highest one gets the key. So the
    order of the servers does not matter, and adding or losing a server moves no key between the others.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._seeds = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)

    def of(self, words: Words) -> Positions:
        """The position of each key's server in the list of names, int64 ``(n,)``."""
        if len(self._seeds) == 1:
            return np.zeros(len(words), np.int64)
        drawn = words[:, :1] ^ self._seeds
        drawn = (drawn ^ (drawn >> _SHIFTS[0])) * _FIRST + words[:, 1:]
        drawn = (drawn ^ (drawn >> _SHIFTS[1])) * _SECOND
        places: Positions = np.argmax(drawn ^ (drawn >> _SHIFTS[2]), axis=1)
        return places


class Slots:
    """Which node of a Redis Cluster serves a name, by the cluster's own table of slots.

    redis-py's own cluster client fails a whole call if one node is dead. So nodes are used like other
    servers, and only asked for their table of slots.

    Attributes
    ----------
    nodes : list of Server
        The nodes that serve slots, sorted by name; they get the options of `asked`.
    """

    def __init__(self, reply: Sequence[Any], asked: Server) -> None:
        ranges = []
        for start, end, primary, *_ in reply:  # replicas follow; they serve no names
            host, port = primary[:2]  # a node that does not know its host has that of `asked`
            options = dict(asked.options) | ({"host": host.decode()} if host else {})
            ranges.append((start, end, Server.of(options | {"port": port})))
        self.nodes = sorted({node for _, _, node in ranges}, key=lambda node: node.name)
        self._places = np.full(16384, -1, np.int64)
        for start, end, node in ranges:
            self._places[start : end + 1] = self.nodes.index(node)

    def of(self, names: Sequence[bytes]) -> Positions:
        """The position of each name's node in `nodes`, int64 ``(n,)``; -1 if no node serves it."""
        slot = require_redis("a Redis Cluster").crc.key_slot
        places: Positions = self._places[[slot(name) for name in names]]
        return places


class Clients:
    """The clients of one process; handles faults of the servers itself.

    Threads may share it; a forked child makes its own connections. Passwords are removed from all texts: a
    server may echo commands that it did not understand, such as AUTH.

    Parameters
    ----------
    servers : Servers
        They may be nodes of a Redis Cluster, which then decides which node serves a name.
    tell : WarnOnce, optional
        Warns once for each kind of fault and server.
    connect_timeout, read_timeout : float
        Seconds that a server may take to accept a connection, and to answer.
    pause : float
        Seconds to skip a failing server; doubles each time.

    Attributes
    ----------
    faults, corrupt : int
        Requests that failed, and damaged values found.
    """

    def __init__(
        self,
        servers: Servers,
        tell: WarnOnce | None = None,
        *,
        connect_timeout: float = 1.0,
        read_timeout: float = 5.0,
        pause: float = 1.0,
    ) -> None:
        self.servers = servers
        self.tell = WarnOnce() if tell is None else tell
        self.faults = self.corrupt = 0
        options = [option for server in servers.servers for option in server.options]
        self._secrets = Secrets({str(value): "" for name, value in options if name in _SECRET and value})
        self._timeouts, self._pause = (connect_timeout, read_timeout), pause
        self._known: dict[Server, Node] = {}  # all servers ever used
        nodes = [self._node(server) for server in servers.servers]
        # Replaced together, so that no thread uses new shares with the old list.
        self._route: tuple[list[Node], Shares | Slots] = nodes, Shares([node.name for node in nodes])
        self._is_noticed = False  # whether we know if this is a Redis Cluster
        self._looked = 0.0
        self._closed = False

    def __repr__(self) -> str:
        return f"Clients({self.servers})"

    def check(self) -> None:
        """Raise `OptionError` if a server refuses the password or a needed command."""
        checked: set[Node] = set()
        for _ in range(2):  # the first node to answer reveals a cluster's other nodes
            for node in {*self._known.values()} - checked:
                if refusal := self._refusal(node):
                    raise OptionError(f"the Redis server {node.name} {refusal}")
                checked.add(node)
            self._routed()

    def mget(self, names: Sequence[bytes], words: Words) -> list[bytes | None]:
        """The values of some names; None if there is none or the server fails.

        The value of ``names[i]`` lies on the server of the key ``words[i]``, uint64 ``(n, 2)``.
        """
        values: list[bytes | None] = [None] * len(names)
        places, is_cluster = self._by_node(names, words)
        for start in range(0, max(map(len, places.values()), default=0), _ASKED):
            asked, groups = {}, {}
            for node, which in places.items():
                some = which[start : start + _ASKED]
                # In a cluster, a command must not span slots.
                groups[node] = [[place] for place in some] if is_cluster else [some] if some else []
                asked[node] = [(b"MGET", *[names[place] for place in group]) for group in groups[node]]
            for node, replies in self._exchange(asked).items():
                for group, reply in zip(groups[node], replies, strict=True):
                    if _are_values(reply, len(group)):
                        for place, value in zip(group, reply, strict=True):
                            values[place] = value
                    elif not failed(reply):
                        self._failed(node, ValueError("it answers MGET with something else"))
        return values

    def run(self, commands: Sequence[Command], words: Words) -> list[Any]:
        """The replies to some commands, each about a name: a pipeline for each server.

        ``commands[i]``, such as ``(b"SET", name, value)``, goes to the server of the key ``words[i]``. A
        reply is what the server has sent, an instance of `redis.exceptions.ResponseError`, or `LOST`. Servers
        that take no new rows for now get no SET.
        """
        replies: list[Any] = [LOST] * len(commands)
        asked = {}
        places, _ = self._by_node([command[1] for command in commands], words)
        for node, which in places.items():
            if not self._may_write(node):
                which = places[node] = [i for i in which if commands[i][0] != b"SET"]
            asked[node] = [commands[i] for i in which]
        answers = self._exchange(asked)
        for node, which in places.items():
            for place, reply in zip(which, answers[node], strict=True):
                replies[place] = reply
        return replies

    def exist(self, names: Sequence[bytes], words: Words) -> Flags:
        """Whether each name exists, bool ``(n,)``; False on a failing server."""
        replies = self.run([(b"EXISTS", name) for name in names], words)
        return np.array([reply == 1 for reply in replies], bool)

    def each(self, *command: Any) -> list[Any]:
        """The reply of each server to one command."""
        nodes, _ = self._routed()
        answers = self._exchange({node: [command] for node in nodes})
        return [answers[node][0] for node in nodes]

    def scan(self, pattern: bytes) -> Iterator[list[bytes]]:
        """The names that match, in pages; a name may come twice."""
        return (page for _, page in self._pages(pattern))

    def delete(self, pattern: bytes) -> None:
        """Delete matching names on all servers, as a server may have names that belong on another."""
        for node, page in self._pages(pattern):
            # In a cluster, a command must not span slots.
            self._exchange({node: [(b"UNLINK", name) for name in page]})

    def _pages(self, pattern: bytes) -> Iterator[tuple[Node, list[bytes]]]:
        for node in self._routed()[0]:
            cursor: Any = b"0"
            while True:
                command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _PAGE)
                reply = self._exchange({node: [command]})[node][0]
                if not _is_page(reply):
                    break
                cursor, page = reply
                if page:
                    yield node, page
                if int(cursor) == 0:
                    break

    def allows_writes(self, words: Words) -> Flags:
        """Whether the server of each key takes new rows now, bool ``(n,)``.

        In a Redis Cluster, where the server depends on names: whether any server does.
        """
        nodes, places = self._route
        allowed = np.array([not self._closed and self._may_write(node) for node in nodes])
        if isinstance(places, Slots):
            return np.full(len(words), allowed.any())
        flags: Flags = allowed[places.of(words)]
        return flags

    def close(self) -> None:
        """Close all connections; from now on everything is `LOST`."""
        self._closed = True
        for node in list(self._known.values()):
            node.close()

    # Which server.

    def _by_node(self, names: Sequence[bytes], words: Words) -> tuple[dict[Node, list[int]], bool]:
        """The positions of each server's names, and whether this is a Redis Cluster."""
        nodes, places = self._routed()
        if len(nodes) == 1 and isinstance(places, Shares):
            return {nodes[0]: list(range(len(names)))} if names else {}, False
        found: dict[Node, list[int]] = {}
        which: Positions = places.of(names) if isinstance(places, Slots) else places.of(words)
        for place in np.unique(which).tolist():
            if place >= 0:
                found[nodes[place]] = np.flatnonzero(which == place).tolist()
        return found, isinstance(places, Slots)

    def _node(self, server: Server) -> Node:
        """The node of a server, always the same object."""
        return self._known.get(server) or self._known.setdefault(
            server, Node(server, *self._timeouts, self._pause)
        )

    def _routed(self) -> tuple[list[Node], Shares | Slots]:
        """The nodes, and the table that assigns names; the first answer tells if it is a cluster."""
        for node in self._route[0] if not self._is_noticed else ():
            reply = self._exchange({node: [_NEEDED[0]]})[node][0]
            if reply is not LOST:
                is_node = isinstance(reply, bytes) and b"cluster_enabled:1" in reply
                self._is_noticed = self._ask_slots([node]) if is_node else True
                break
        return self._route

    def _look_again(self) -> None:
        """Ask a cluster for its slots again: a node has failed, or no longer serves a name."""
        is_time = time.monotonic() - self._looked > self._pause
        if is_time and isinstance(self._route[1], Slots):
            self._ask_slots(list(self._known.values()))

    def _ask_slots(self, nodes: Sequence[Node]) -> bool:
        """Take the slots from the first node that answers; False if none does."""
        self._looked = time.monotonic()
        for node in nodes:
            reply = self._exchange({node: [_SLOTS]})[node][0]
            if isinstance(reply, list) and reply:
                slots = Slots(reply, node.server)
                self._route = [self._node(server) for server in slots.nodes], slots
                return True
        return False

    # Commands and replies.

    def _exchange(self, asked: Mapping[Node, Sequence[Command]]) -> dict[Node, list[Any]]:
        """Send all commands to all servers, then read the replies of each.

        Replies are `LOST` if a server is skipped or fails.
        """
        answers: dict[Node, list[Any]] = {node: [LOST] * len(some) for node, some in asked.items()}
        waiting: list[tuple[Node, Any]] = []
        try:
            for node, commands in asked.items():
                if commands and self._may_use(node):
                    try:
                        waiting.append((node, node.send(commands)))
                    except Exception as error:  # a server's fault must not stop the caller
                        self._failed(node, error)
            deadline = time.monotonic() + self._timeouts[1]
            while waiting:
                node, connection = waiting[0]
                try:
                    if not connection.can_read(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"no answer in {self._timeouts[1]:g} s")
                    replies = [node.reply(connection) for _ in asked[node]]
                except Exception as error:
                    self._failed(node, error)
                    connection.disconnect()
                    del waiting[0]
                    continue
                # Before `give_back`: then another thread may use the connection, and `finally` must not close
                # it.
                del waiting[0]
                node.give_back(connection)
                answers[node] = replies
                self._count_errors(node, asked[node], replies)
        finally:
            for _, connection in waiting:  # after an interrupt, these replies must not be read
                connection.disconnect()
        return answers

    def _count_errors(self, node: Node, commands: Sequence[Command], replies: Sequence[Any]) -> None:
        """Count and report the errors in a server's replies, one of each kind."""
        found = {}
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, Exception):
                found[command[0], type(reply)] = reply
        for (name, _), reply in found.items():
            self._error_reply(node, name, reply)
        if not found:
            node.using.worked()
        if any(type(reply).__name__ in _MOVED for reply in found.values()):
            self._look_again()

    def _may_use(self, node: Node) -> bool:
        """Whether to use a server now; if due, a thread tries a failed one."""
        if self._closed or not node.using.failures:
            return not self._closed
        if node.using.allows():
            node.using.pause(2 * sum(self._timeouts))  # while the thread tries
            with contextlib.suppress(
                RuntimeError
            ):  # the interpreter is ending, or there are too many threads
                threading.Thread(target=self._try, args=(node,), daemon=True).start()
        return False

    def _try(self, node: Node) -> None:
        try:
            (reply,) = node.ask([_TRIED])
            if isinstance(reply, Exception) and type(reply).__name__ not in _MOVED:
                raise reply
            node.using.pause(0.0)
            node.using.worked()
        except Exception as error:
            node.using.pause(0.0)
            self._failed(node, error)
            self._look_again()

    def _may_write(self, node: Node) -> bool:
        """Whether new rows may be sent to a server now."""
        return node.using.allows() and node.writing.allows()

    # Faults.

    def _failed(self, node: Node, error: BaseException) -> None:
        """Skip a failing server for a while, with a warning."""
        self.faults += 1
        if node.using.allows():  # another thread may have found out at the same time
            node.using.failed()
        message = "the Redis server %s fails, so its rows are computed again: %s. It is tried again later"
        self.tell(f"{node.name} {type(error).__name__}", message, node.name, self._text_of(error))

    def _error_reply(self, node: Node, command: bytes, error: Exception) -> None:
        """Respond to a server's error reply to a command."""
        kind = type(error).__name__
        if kind in _DOWN or (command == b"MGET" and kind not in _MOVED):
            self._failed(node, error)
            return
        self.faults += 1
        text, told = self._text_of(error), f"{node.name} {kind}"
        if kind == "OutOfMemoryError":
            node.writing.pause()
            self.tell(f"{node.name} full", _FULL, node.name)
        elif command == b"SET" and (kind in _UNWRITABLE or str(error).startswith(_UNWRITABLE_WORDS)):
            node.writing.pause()
            self.tell(f"{told} SET", "the Redis server %s takes no new rows now: %s", node.name, text)
        else:
            message = "the Redis server %s answers %s with an error: %s"
            self.tell(told, message, node.name, command.decode(), text)

    def _text_of(self, error: BaseException) -> str:
        """The text of an error, without passwords."""
        text = str(error).partition(", with args")[0]
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return f"{type(error).__name__}: {text[:_LONGEST].rstrip('.')}"

    def _refusal(self, node: Node) -> str:
        """Why a server refuses us or a command; empty if it does neither, or is unreachable."""
        errors = require_redis("a Redis server").exceptions
        try:
            replies = node.ask(_NEEDED)
        except (errors.AuthenticationError, errors.ResponseError) as error:
            reason = self._text_of(error)
            return f"refuses the connection ({reason}): give its password, or its username and db"
        except Exception as error:
            self._failed(node, error)
            return ""
        for command, reply in zip(_NEEDED, replies, strict=True):
            is_unknown = isinstance(reply, Exception) and str(reply).lower().startswith("unknown command")
            if is_unknown or isinstance(reply, errors.NoPermissionError):
                needed = b" ".join(name for name, *_ in _NEEDED).decode()
                return (
                    f"refuses {command[0].decode()} ({self._text_of(reply)}): it has to be Redis from "
                    f"6.2 on, or Valkey, and allow {needed} for names that begin with torchcache2:"
                )
        return ""


def _are_values(reply: Any, count: int) -> bool:
    """Whether a reply is one to MGET of so many names."""
    return isinstance(reply, list) and len(reply) == count and set(map(type, reply)) <= {bytes, type(None)}


def _is_page(reply: Any) -> bool:
    """Whether a reply is one to SCAN: a cursor, and names."""
    if not isinstance(reply, list) or [*map(type, reply)] != [bytes, list]:
        return False
    return reply[0].isdigit() and set(map(type, reply[1])) <= {bytes}
