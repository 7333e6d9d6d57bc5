"""`Clients`: what a process says to all its servers, and what they answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Flags, Positions, Words
from torchcache2.core.logs import ToldOnce
from torchcache2.core.places import Server, Servers
from torchcache2.tiers.redis.health import Health
from torchcache2.tiers.redis.lines import Line
from torchcache2.tiers.redis.pieces import Pieces
from torchcache2.tiers.redis.pipelines import LOST, Command, Pipelines
from torchcache2.tiers.redis.shares import Shares, Slots

_CHECKED = b"torchcache2:check"
_NEEDED: tuple[Command, ...] = (
    (b"INFO", b"cluster"),
    (b"SCAN", b"0", b"MATCH", _CHECKED, b"COUNT", 1),
    (b"SET", _CHECKED, b"", b"NX", b"PX", 1),
    (b"MGET", _CHECKED),
    (b"EXISTS", _CHECKED),
    (b"GETEX", _CHECKED, b"PX", 1),
    (b"DEL", _CHECKED),
    (b"UNLINK", _CHECKED),
    (b"DBSIZE",),
)
_PAGE = 1000  # names that a server looks at for a page of SCAN


class Clients:
    """The connections of one process to its servers; faults of these are met inside.

    Threads may share it. A forked child has connections of its own. The servers may be nodes of a Redis
    Cluster, which then says which node serves a name.

    Parameters
    ----------
    servers : Servers
    tell : ToldOnce, optional
        Warns once a kind of fault and server.
    connect_timeout, read_timeout : float
        Seconds that a server may take to take a connection, and to answer.
    pause : float
        Seconds for which a server is left out that has failed; each further time twice as long.
    """

    def __init__(
        self,
        servers: Servers,
        tell: ToldOnce | None = None,
        *,
        connect_timeout: float = 1.0,
        read_timeout: float = 5.0,
        pause: float = 1.0,
    ) -> None:
        self.servers = servers
        self._health = Health(servers.servers, tell, pause)
        self._timeouts = connect_timeout, read_timeout
        self._pipelines = Pipelines(self._health, read_timeout, self._look_again)
        self._known: dict[Server, Line] = {}  # all that were ever spoken to
        lines = [self._line(server) for server in servers.servers]
        # Both are replaced together, so that no thread looks up a line of the old list by a new share.
        self._route: tuple[list[Line], Shares | Slots] = lines, Shares([line.name for line in lines])
        self._is_noticed = False  # whether it is known if this is a Redis Cluster
        self._looked = 0.0
        self._pieces = Pieces()

    def __repr__(self) -> str:
        return f"Clients({self.servers})"

    @property
    def tell(self) -> ToldOnce:
        """Warns once for each kind of fault."""
        return self._health.tell

    @property
    def faults(self) -> int:
        """How often a server did not answer, or answered with an error."""
        return self._health.faults

    @property
    def corrupt(self) -> int:
        """Values that were met and that are no rows."""
        return self._health.corrupt

    @corrupt.setter
    def corrupt(self, count: int) -> None:
        self._health.corrupt = count

    def check(self) -> None:
        """Raise `OptionError` if a server refuses the password or a command that is needed."""
        checked: set[Line] = set()
        for _ in range(2):  # the nodes of a cluster are known when the first of them has answered
            for line in {*self._known.values()} - checked:
                refusal = self._pipelines.refusal(line, _NEEDED)
                if refusal:
                    raise OptionError(f"the Redis server {line.name} {refusal}")
                checked.add(line)
            self._routed()

    def mget(self, names: Sequence[bytes], words: Words) -> list[bytes | None]:
        """The values of some names, None for those that are not there or whose server fails.

        The value of ``names[i]`` lies on the server of the key ``words[i]``, uint64 ``(n, 2)``.
        """
        values: list[bytes | None] = [None] * len(names)
        left, is_cluster = self._by_line(names, words)
        while left:
            pieces = {line: places[: self._pieces.count(names[places[0]])] for line, places in left.items()}
            asked = {}
            for line, places in pieces.items():
                some = [names[i] for i in places]
                # A node of a cluster takes no command about names of several slots.
                asked[line] = [(b"MGET", name) for name in some] if is_cluster else [(b"MGET", *some)]
            answers = self._pipelines.exchange(asked)
            for line, places in pieces.items():
                replies = answers[line]
                if replies[0] is LOST:
                    continue
                found = _values(replies, len(places))
                if found is None:
                    self._health.server_failed(line.name, ValueError("it answers MGET with something else"))
                    continue
                self._pieces.saw(names[places[0]], found)
                for place, value in zip(places, found, strict=True):
                    values[place] = value
            left = {
                line: places[len(pieces[line]) :]
                for line, places in left.items()
                if len(places) > len(pieces[line]) and answers[line][0] is not LOST
            }
        return values

    def run(self, commands: Sequence[Command], words: Words) -> list[Any]:
        """The replies to some commands, each about a name: a pipeline for each server.

        ``commands[i]``, such as ``(b"SET", name, value)``, goes to the server of the key ``words[i]``. A
        reply is what the server has sent, an instance of `redis.exceptions.ResponseError`, or `LOST`. SET is
        not sent to a server that takes no new rows for now.
        """
        replies: list[Any] = [LOST] * len(commands)
        asked = {}
        places, _ = self._by_line([command[1] for command in commands], words)
        for line, which in places.items():
            if not self._health.may_write(line.name):
                which = places[line] = [i for i in which if commands[i][0] != b"SET"]
            asked[line] = [commands[i] for i in which]
        for _, name, value, *_ in (command for command in commands if command[0] == b"SET"):
            self._pieces.will_see(name, value)
        answers = self._pipelines.exchange(asked)
        for line, which in places.items():
            for place, reply in zip(which, answers[line], strict=True):
                replies[place] = reply
        return replies

    def counts(self, command: bytes, names: Sequence[bytes], words: Words) -> list[tuple[list[int], Any]]:
        """The replies to a command that takes many names and counts them, such as EXISTS.

        That is far faster than a command for each name. Returns the places in `names` that each reply, as
        those of `run`, is about: all of a server, or each alone in a Redis Cluster.
        """
        places, is_cluster = self._by_line(names, words)
        groups = {line: [[i] for i in which] if is_cluster else [which] for line, which in places.items()}
        asked = {line: [(command, *[names[i] for i in group]) for group in of] for line, of in groups.items()}
        answers = self._pipelines.exchange(asked)
        return [pair for line, of in groups.items() for pair in zip(of, answers[line], strict=True)]

    def exist(self, names: Sequence[bytes], words: Words) -> Flags:
        """Whether each name is there, bool ``(n,)``; a server that fails has none.

        A server is asked for all names at once. Where it has some only, it is asked for each of them.
        """
        there, unsure = np.zeros(len(names), bool), list[int]()
        for places, count in self.counts(b"EXISTS", names, words):
            if count == len(places):
                there[places] = True
            elif isinstance(count, int) and count:
                unsure += places
        commands = [(b"EXISTS", names[place]) for place in unsure]
        there[unsure] = [reply == 1 for reply in self.run(commands, words[unsure])]
        return there

    def each(self, *command: Any) -> list[Any]:
        """The reply of each server to one command."""
        lines, _ = self._routed()
        answers = self._pipelines.exchange({line: [command] for line in lines})
        return [answers[line][0] for line in lines]

    def scan(self, pattern: bytes) -> Iterator[list[bytes]]:
        """The names that match, in pages; a name may come twice."""
        return (page for _, page in self._pages(pattern))

    def delete(self, pattern: bytes) -> None:
        """Delete the names that match, wherever they are: a server may have some that belong on another."""
        for line, page in self._pages(pattern):
            # A node of a cluster takes no command about names of several slots.
            self._pipelines.exchange({line: [(b"UNLINK", name) for name in page]})

    def _pages(self, pattern: bytes) -> Iterator[tuple[Line, list[bytes]]]:
        for line in self._routed()[0]:
            cursor: Any = b"0"
            while True:
                command = (b"SCAN", cursor, b"MATCH", pattern, b"COUNT", _PAGE)
                reply = self._pipelines.exchange({line: [command]})[line][0]
                if not _is_page(reply):
                    break
                cursor, page = reply
                if page:
                    yield line, page
                if int(cursor) == 0:
                    break

    def allows_writes(self, words: Words) -> Flags:
        """Whether the server of each key takes new rows now, bool ``(n,)``.

        In a Redis Cluster, it depends on names which server that is: then, whether any server does.
        """
        lines, places = self._route
        allowed = np.array([not line.is_closed and self._health.may_write(line.name) for line in lines])
        if isinstance(places, Slots):
            return np.full(len(words), allowed.any())
        flags: Flags = allowed[places.of(words)]
        return flags

    def close(self) -> None:
        """Close all connections; from now on everything is `LOST`."""
        for line in list(self._known.values()):
            line.close()

    def _by_line(self, names: Sequence[bytes], words: Words) -> tuple[dict[Line, list[int]], bool]:
        """The places of the names of each server, and whether these are a Redis Cluster."""
        lines, places = self._routed()
        if len(lines) == 1 and isinstance(places, Shares):
            return {lines[0]: list(range(len(names)))} if names else {}, False
        found: dict[Line, list[int]] = {}
        which: Positions = places.of(names) if isinstance(places, Slots) else places.of(words)
        for place in np.unique(which).tolist():
            if place >= 0:
                found[lines[place]] = np.flatnonzero(which == place).tolist()
        return found, isinstance(places, Slots)

    def _line(self, server: Server) -> Line:
        """The line to a server, the same for as long as this process speaks to it."""
        return self._known.get(server) or self._known.setdefault(server, Line(server, *self._timeouts))

    def _routed(self) -> tuple[list[Line], Shares | Slots]:
        """The lines, and what finds the right one; the first server that answers says what it is."""
        for line in self._route[0] if not self._is_noticed else ():
            reply = self._pipelines.exchange({line: [_NEEDED[0]]})[line][0]
            if reply is not LOST:
                is_node = isinstance(reply, bytes) and b"cluster_enabled:1" in reply
                self._is_noticed = self._ask_slots([line]) if is_node else True
                break
        return self._route

    def _look_again(self) -> None:
        """A node of a cluster has failed, or does not serve what it did: another one may by now."""
        is_time = time.monotonic() - self._looked > self._health.shortest
        if is_time and isinstance(self._route[1], Slots):
            self._ask_slots(list(self._known.values()))

    def _ask_slots(self, lines: Sequence[Line]) -> bool:
        """Go by what the first node says that answers; False if none does."""
        self._looked = time.monotonic()
        for line in lines:
            reply = self._pipelines.exchange({line: [Slots.ASKED]})[line][0]
            if isinstance(reply, list) and reply:
                slots = Slots(reply, line.server)
                self._route = [self._line(node) for node in slots.nodes], slots
                return True
        return False


def _values(replies: Sequence[Any], count: int) -> list[bytes | None] | None:
    """The values in the replies to one or more MGET; None if these are no such replies."""
    if not all(isinstance(reply, (list, Exception)) for reply in replies):
        return None
    lists: list[list[Any]] = [
        reply if isinstance(reply, list) else [None] * (count // len(replies)) for reply in replies
    ]
    found = lists[0] if len(lists) == 1 else [value for one in lists for value in one]
    is_right = len(found) == count and set(map(type, found)) <= {bytes, type(None)}
    return found if is_right else None


def _is_page(reply: Any) -> bool:
    """Whether a reply is one to SCAN: where to go on, and names."""
    if not isinstance(reply, list) or [*map(type, reply)] != [bytes, list]:
        return False
    return reply[0].isdigit() and set(map(type, reply[1])) <= {bytes}
