"""`Health`: how the faults of Redis servers are met: counted, told once a kind and server, and left alone.

No password of theirs is in any text: a server may send back what it did not understand, such as AUTH.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchcache2.core.logs import ToldOnce
from torchcache2.core.places import Server
from torchcache2.tiers.breaker import Breaker

_SECRET = ("password", "ssl_password")
_LONGEST = 200
_DOWN = ("ClusterDownError", "MasterDownError")  # names, as redis-py is imported only when it is used
_MOVED = ("MovedError", "AskError", "TryAgainError")  # another node of the cluster serves a name
_UNWRITABLE = ("ReadOnlyError", "NoPermissionError")
_UNWRITABLE_WORDS = ("MISCONF", "NOREPLICAS")
_FULL = (
    "the Redis server %s is full: its rows are read, and new ones are not kept there for a minute. Raise its "
    "maxmemory (capacity_per_node if this library has started it), or have it forget rows: policy='lru', "
    "which is its maxmemory-policy allkeys-lru"
)


class Health(Breaker):
    """The state of some servers, as one process has found it; a part is a server, or what writes to it.

    Attributes
    ----------
    corrupt : int
        Values that were met and that are no rows.
    """

    def __init__(self, servers: Sequence[Server], tell: ToldOnce | None, pause: float) -> None:
        super().__init__(tell, pause)
        self.corrupt = 0
        options = [option for server in servers for option in server.options]
        self._secrets = {str(value) for name, value in options if name in _SECRET and value}

    def is_failing(self, name: str) -> bool:
        """Whether the last try of a server has failed."""
        return self._failures[name.encode()] > 0

    def server_failed(self, name: str, error: BaseException) -> None:
        """Respond to a server that does not answer, or does not serve: it is left out for a while."""
        self.faults += 1
        part = name.encode()
        if self.allows(part):  # another thread may have found out at the same time
            self.failed(part, is_lasting=True)
        message = "the Redis server %s fails, and what it keeps is computed again: %s. It is tried later"
        self.tell(f"{name} {type(error).__name__}", message, name, self.text_of(error))

    def may_write(self, name: str) -> bool:
        """Whether new rows may be sent to a server now."""
        return self.allows(name.encode()) and self.allows(_writing(name))

    def error_reply(self, name: str, command: bytes, error: BaseException) -> None:
        """Respond to an error that a server has answered to a command."""
        kind = type(error).__name__
        text = self.text_of(error)
        if kind in _DOWN or (command == b"MGET" and kind not in _MOVED):
            self.server_failed(name, error)
            return
        self.faults += 1
        if kind == "OutOfMemoryError":
            self.pause(_writing(name))
            self.tell(f"{name} full", _FULL, name)
        elif command == b"SET" and (kind in _UNWRITABLE or str(error).startswith(_UNWRITABLE_WORDS)):
            self.pause(_writing(name))
            self.tell(f"{name} {kind} SET", "the Redis server %s takes no new rows now: %s", name, text)
        else:
            message = "the Redis server %s answers %s with an error: %s"
            self.tell(f"{name} {kind}", message, name, command.decode(), text)

    def text_of(self, error: BaseException) -> str:
        """What an error says, without a password."""
        text = str(error).partition(", with args")[0]
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return f"{type(error).__name__}: {text[:_LONGEST]}"


def _writing(name: str) -> bytes:
    return b"writing " + name.encode()
