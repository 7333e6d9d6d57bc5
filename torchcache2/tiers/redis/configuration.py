"""What our own Redis server is told: how much it may keep, where it listens, and what its clients may do."""

from __future__ import annotations

import hashlib

from torchcache2.core.settings import Policy

COMMANDS = (  # that clients use; the server refuses all others
    *("auth", "ping", "select", "info", "scan", "dbsize"),
    *("get", "mget", "exists", "set", "del", "unlink"),
)
_KEYS = "torchcache2:*"
_POLICIES = {"mru": "noeviction", "lru": "allkeys-lru"}
# When memory runs out, the system is to end the cache, not who trains.
_EXPENDABLE = 500


def configuration(folder: str, where: str, password: str, capacity: int, policy: Policy) -> str:
    """The lines of a configuration file, but for the port.

    Parameters
    ----------
    folder : str
        The server's working directory; it writes nothing there.
    where : str
        The path of its socket, or the one address at which it listens.
    password : str
        The text has its hash only.
    capacity : int
        Bytes of memory that the server may use.
    policy : {"mru", "lru"}
        Whether rows that are there stay when it is full, or make room.
    """
    secret = hashlib.sha256(password.encode()).hexdigest()
    allowed = " ".join(f"+{command}" for command in COMMANDS)
    listens = [f"unixsocket {_quoted(where)}", "unixsocketperm 700"] if "/" in where else [f"bind {where}"]
    lines = [
        *listens,
        "protected-mode yes",
        f"user default reset on #{secret} resetchannels ~{_KEYS} -@all {allowed}",
        "databases 1",
        'save ""',
        "appendonly no",
        f"dir {_quoted(folder)}",
        f"maxmemory {max(1, capacity)}",  # 0 would mean any amount
        f"maxmemory-policy {_POLICIES[policy]}",
        "oom-score-adj absolute",
        "oom-score-adj-values " + " ".join([str(_EXPENDABLE)] * 3),
        "daemonize no",
        "loglevel notice",
        'logfile ""',
    ]
    return "\n".join([*lines, ""])


def _quoted(path: str) -> str:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
