"""Which Redis servers a job uses: our own, one on each node, or of those that were named."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

from torchcache2.core.errors import OptionError
from torchcache2.core.places import Server, Servers, require_redis
from torchcache2.core.process import has_ranks, node_number
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size
from torchcache2.tiers.meeting import JOB, job_name, machine
from torchcache2.tiers.redis.exchange import listening_address, servers_of_all
from torchcache2.tiers.redis.ownserver import Found, find_or_start
from torchcache2.tiers.shared.region import start_time


def own_servers(capacity: Size, policy: Policy, *, cluster_mode: bool = True, buffer: int = 1) -> Servers:
    """Our own servers, which are started unless they run: one on each node of the job.

    Where there is a process group of several nodes, all ranks have to call this. This process keeps the
    server of its node until it ends; one that gets the `Servers` has to `hold` them.

    Parameters
    ----------
    capacity : int, float or str
        Bytes that each server may use; the first process on a node decides.
    policy : {"mru", "lru"}
        What a server does that is full: keep the rows that it has, or make room.
    cluster_mode : bool
        Whether the nodes share their rows; if not, each has its own.
    buffer : int
        Rows that are gathered before they are written.
    """
    if not hasattr(os, "mkfifo"):
        raise OptionError('backend="redis" starts no server on this system: give hosts=…')
    is_shared = has_ranks() or bool(os.environ.get(JOB))
    # Processes that no launcher has started share with nobody but their workers.
    process = [] if is_shared else [str(os.getpid()), str(start_time(os.getpid()))]
    name = partial(job_name, os.environ, "redis server", str(os.getuid()), *process)
    host = listening_address(machine() + name().hex()) if cluster_mode else None
    if host is None:
        found = _found(name(), None, capacity, policy)
        return Servers((found.server,), buffer, found.guard)
    try:
        found = _found(name("tcp"), host, capacity, policy)
    except Exception as error:
        with contextlib.suppress(OptionError):  # which is raised in the other ranks: they wait for this one
            servers_of_all(None, str(error))
        raise
    return Servers(servers_of_all(found.server), buffer, found.guard)


def _found(name: bytes, host: str | None, capacity: Size, policy: Policy) -> Found:
    require_redis('backend="redis"')
    return find_or_start(name, host, capacity, policy)


def one_of(hosts: Any, option: str = "hosts") -> Server:
    """The server that this node uses alone: one that runs on it, else one by the node's number.

    Parameters
    ----------
    hosts : str, dict or sequence of these
        As for `Servers.of`, in the order in which the user has given them.
    """
    Servers.of(hosts, option)
    entries = hosts if isinstance(hosts, Sequence) and not isinstance(hosts, str) else [hosts]
    servers = [Server.of(entry, option) for entry in entries]
    if len(servers) > 1:
        for server in servers:
            if _is_here(dict(server.options)):
                return server
    return servers[node_number() % len(servers)]


def _is_here(options: dict[str, Any]) -> bool:
    """Whether a server is on this machine: only an address of its own can be listened at."""
    if "host" not in options:
        return True
    found = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(options["host"], 0, type=socket.SOCK_DGRAM)
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False
