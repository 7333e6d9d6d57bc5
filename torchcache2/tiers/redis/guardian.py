"""A small process that starts the Redis server of a job, and ends it with the job.

It runs as ``python -I -S guardian.py``, and imports little, so that it starts fast. What it is to do comes as
JSON through its standard input, and it answers through its standard output.

The processes of the job hold a pipe open for writing, and the system closes it when they end in whatever way.
When the last one has, or the server has ended, this process deletes the files of both, and ends. If it is
killed itself, the system kills the server (on Linux).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]


# Names of files in the folder of a server.
FILE, PIPE, SOCKET = "server", "pipe", "socket"
_READY, _TAKEN = b"eady to accept connections", b"in use"  # what servers print
_PATIENCE = 5.0  # seconds until a program is ready
_PORTS = 10  # that are tried; each may be taken by another process before the server has it
_LAST = 2000  # bytes of what the server has printed
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_DAILY = 12 * 3600 * 1000  # milliseconds


class Process:
    """A running server: its pid, and what it has printed last."""

    def __init__(self, program: str, configuration: str) -> None:
        guardian, (given, giving), (self.output, printing) = os.getpid(), os.pipe(), os.pipe()
        self.printed = b""
        self.pid = os.fork()
        if self.pid == 0:
            _become(program, given, printing, guardian)
        os.close(given)
        os.close(printing)
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and what it printed says why
            os.write(giving, configuration.encode())
        os.close(giving)

    def read(self) -> bool:
        """Take note of what the server prints; False if it has ended."""
        some = os.read(self.output, 1 << 16)
        self.printed = (self.printed + some)[-_LAST:]
        return bool(some)

    def is_ready(self) -> bool:
        """Wait until the server says so; False if it has ended, or takes too long."""
        poll, deadline = select.poll(), time.monotonic() + _PATIENCE
        poll.register(self.output, select.POLLIN)
        while _READY not in self.printed:
            left = deadline - time.monotonic()
            if left <= 0 or (poll.poll(left * 1000) and not self.read()):
                return False
        return True

    def end(self) -> None:
        """End the server at once: it has nothing to save."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.output)


def _become(program: str, given: int, printing: int, guardian: int) -> None:
    """Run a program in this process, which was forked for it."""
    try:
        with contextlib.suppress(ImportError, OSError, AttributeError):  # another system than Linux
            import ctypes

            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != guardian:  # it has ended meanwhile
            os._exit(1)
        os.dup2(given, 0)
        os.dup2(printing, 1)
        os.dup2(printing, 2)
        os.execv(program, [program, "-"])
    except OSError as error:
        os.write(2, str(error).encode())
    finally:
        os._exit(127)


def start(programs: Sequence[str], configuration: str, host: str | None) -> tuple[Process | None, object]:
    """The first program that runs, and its port, 0 without a host; else what each one has printed."""
    errors = []
    for program in programs:
        for _ in range(_PORTS if host else 1):
            port = _free_port(host) if host else 0
            process = Process(program, f"{configuration}port {port}\n")
            if process.is_ready():
                return process, port
            process.end()
            if not host or _TAKEN not in process.printed:
                break
        errors.append([program, process.printed.decode("utf-8", "replace")])
    return None, errors


def _free_port(host: str) -> int:
    import socket  # slow, and only several nodes need it

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def remove(folder: str) -> None:
    """Delete what belongs to a server, under the lock of its file; the file goes last."""
    for name in (SOCKET, PIPE, FILE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):  # somebody has put something else there
        os.rmdir(folder)


class _Guard:
    """Waits until the server ends, or nobody needs it any more."""

    def __init__(self, folder: str, pipe: int) -> None:
        self._folder, self._pipe = folder, pipe
        # The file is opened now, as another server may have one of this name later.
        self._file = os.open(os.path.join(folder, FILE), os.O_RDWR | os.O_NOFOLLOW)

    def watch(self, process: Process) -> None:
        poll = select.poll()
        poll.register(self._pipe, 0)
        poll.register(process.output, select.POLLIN)
        while True:
            events = dict(poll.poll(_DAILY))
            if process.output in events and not process.read():
                break
            if self._pipe in events:
                with self._lock():  # who joins opens the pipe under this lock
                    if self._is_left():
                        return self._end(process)
            elif not events:
                self._touch()
        with self._lock():
            return self._end(process)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _is_left(self) -> bool:
        poll = select.poll()
        poll.register(self._pipe, 0)
        return bool(poll.poll(0))

    def _end(self, process: Process) -> None:
        process.end()
        # If the server had ended, another process may have started a new one in the same place.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(self._pipe), os.stat(os.path.join(self._folder, PIPE))):
                remove(self._folder)

    def _touch(self) -> None:
        """Show services that delete old temporary files that these are in use."""
        for name in (FILE, PIPE, SOCKET):
            with contextlib.suppress(OSError):
                os.utime(os.path.join(self._folder, name))


def _main() -> None:
    if os.fork():
        os._exit(0)  # so that the process that has started this one has no child to wait for
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # what ends it is the end of the job
    os.chdir("/")
    request = json.load(sys.stdin)
    os.set_inheritable(request["pipe"], False)
    guard = _Guard(request["folder"], request["pipe"])
    try:
        process, found = start(request["programs"], request["configuration"], request["host"])
    except OSError as error:
        process, found = None, [["", str(error)]]
    if process is None:
        answer = {"errors": found}
    else:
        answer = {"port": found, "pid": process.pid, "guardian": os.getpid()}
    with contextlib.suppress(BrokenPipeError):  # who has asked has ended
        os.write(1, json.dumps(answer).encode())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    if process is not None:
        guard.watch(process)


if __name__ == "__main__":
    _main()
