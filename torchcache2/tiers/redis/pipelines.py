"""`Pipelines`: commands to several servers at once, and what they answer, if they do."""

from __future__ import annotations

import contextlib
import enum
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from torchcache2.core.places import require_redis
from torchcache2.tiers.redis.health import Health
from torchcache2.tiers.redis.lines import Line, read, send

_TRIED = b"torchcache2:try"  # nothing has this name
Command = tuple[Any, ...]


class Lost(enum.Enum):
    """What stands in the place of a reply that did not come."""

    LOST = "lost"


LOST: Final = Lost.LOST


class Pipelines:
    """Exchanges commands for replies; several threads may do so at once.

    A server that has failed is left out for a while, and then tried again by a thread: nobody waits for it.

    Parameters
    ----------
    health : Health
    read_timeout : float
        Seconds in which all servers have to begin to answer.
    look_again : callable
        Called when a server has failed once more, or another node of its cluster serves a name.
    """

    def __init__(self, health: Health, read_timeout: float, look_again: Callable[[], None]) -> None:
        self._health = health
        self._read_timeout = read_timeout
        self._look_again = look_again
        self._errors = require_redis("a Redis server").exceptions
        self._trying: set[tuple[int, str]] = set()  # the process, and the server that a thread of it tries

    def exchange(self, commands: Mapping[Line, Sequence[Command]]) -> dict[Line, list[Any]]:
        """The replies of each server to its commands; all are sent before the first reply is waited for.

        A reply is an instance of `redis.exceptions.ResponseError` if the server answers so, and `LOST` if the
        server is left out or fails.
        """
        answers: dict[Line, list[Any]] = {line: [LOST] * len(asked) for line, asked in commands.items()}
        waiting: list[tuple[Line, Any]] = []
        try:
            for line, asked in commands.items():
                if asked and self._may_use(line) and (connection := self._sent(line, asked)) is not None:
                    waiting.append((line, connection))
            deadline = time.monotonic() + self._read_timeout
            while waiting:
                line, connection = waiting[0]
                try:
                    if not connection.can_read(max(0.0, deadline - time.monotonic())):
                        raise TimeoutError(f"no answer in {self._read_timeout:g} s")
                    replies = [read(connection, self._errors.ResponseError) for _ in commands[line]]
                except Exception as error:  # no fault of a server may stop who uses the cache
                    self._health.server_failed(line.name, error)
                    connection.disconnect()
                    del waiting[0]
                    continue
                # This comes before the connection is given back: then another thread may use it, and
                # `finally` must not close it.
                del waiting[0]
                line.give_back(connection)
                answers[line] = replies
                self._count_errors(line, commands[line], replies)
        finally:
            for _, connection in waiting:  # an interrupt came: nobody may read these replies
                connection.disconnect()
        return answers

    def refusal(self, line: Line, commands: Sequence[Command]) -> str:
        """Why a server refuses us or one of the commands; empty if it does not, or cannot be reached."""
        refused = (self._errors.AuthenticationError, self._errors.ResponseError)
        try:
            connection = line.take()
            send(connection, commands)
            replies = [read(connection, self._errors.ResponseError) for _ in commands]
            line.give_back(connection)
        except refused as error:
            reason = self._health.text_of(error)
            return f"refuses the connection ({reason}): give its password, or its username and db"
        except Exception as error:
            self._health.server_failed(line.name, error)
            return ""
        for command, reply in zip(commands, replies, strict=True):
            is_error = isinstance(reply, self._errors.ResponseError)
            is_unknown = is_error and str(reply).lower().startswith("unknown command")
            if is_unknown or isinstance(reply, self._errors.NoPermissionError):
                needed = b" ".join(name for name, *_ in commands).decode()
                return (
                    f"refuses {command[0].decode()} ({self._health.text_of(reply)}): it has to be Redis from "
                    f"6.2 on, or Valkey, and allow {needed} for names that begin with torchcache2:"
                )
        return ""

    def _sent(self, line: Line, commands: Sequence[Command]) -> Any:
        """A connection to which commands were sent, or None."""
        try:
            connection = line.take()
            send(connection, commands)
        except Exception as error:
            self._health.server_failed(line.name, error)
            return None
        return connection

    def _count_errors(self, line: Line, commands: Sequence[Command], replies: Sequence[Any]) -> None:
        """Count and tell the errors among the replies of a server, one of each kind."""
        found = {}
        for command, reply in zip(commands, replies, strict=True):
            if isinstance(reply, self._errors.ResponseError):
                found[command[0], type(reply)] = reply
        for (name, _), reply in found.items():
            self._health.error_reply(line.name, name, reply)
        if not found:
            self._health.worked(line.name.encode())
        if any(isinstance(reply, self._errors.AskError) for reply in found.values()):
            self._look_again()

    def _may_use(self, line: Line) -> bool:
        """Whether a server is asked now; if it is time, a thread tries one that has failed."""
        if line.is_closed or not self._health.is_failing(line.name):
            return not line.is_closed
        who = os.getpid(), line.name
        if self._health.allows(line.name.encode()) and who not in self._trying:
            self._trying.add(who)
            try:
                threading.Thread(target=self._try, args=(line, who), daemon=True).start()
            except RuntimeError:  # the interpreter is ending, or there are too many threads
                self._trying.discard(who)
        return False

    def _try(self, line: Line, who: tuple[int, str]) -> None:
        try:
            connection = line.take()
            send(connection, [(b"MGET", _TRIED)])
            with contextlib.suppress(self._errors.AskError):  # another node of the cluster has this name
                read(connection)
            line.give_back(connection)
            self._health.worked(line.name.encode())
        except Exception as error:
            self._health.server_failed(line.name, error)
            self._look_again()
        finally:
            self._trying.discard(who)
