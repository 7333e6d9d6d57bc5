"""A small process that starts a job's Redis server, and ends it with the job.

It runs as ``python -I -S watcher.py``, and imports little to start fast. It reads its task as JSON from
standard input, and answers on standard output.

Each process of the job holds a shared lock on a file; forked children inherit it, and the system releases it
however they end. The watcher waits for an exclusive lock: once it has that, or the server has ended, it
deletes the server's files, and ends. If the watcher is killed, the system kills the server (Linux).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

# Files in a server's folder: its address, the file that its job locks, and its socket.
FILE, HELD, SOCKET = "server", "held", "socket"
_READY, _TAKEN = b"eady to accept connections", b"in use"  # what servers print
_PATIENCE = 5.0  # seconds until a program is ready
_PORTS = 10  # tried ports; another process may take one before the server does
_LAST = 2000  # last bytes of the server's output to keep
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_LONG = 12 * 3600.0  # seconds


class Process:
    """A running server: its pid, and what it has printed last; `OSError` if it cannot be run."""

    def __init__(self, program: str, configuration: str) -> None:
        self.printed = b""
        self._process = subprocess.Popen(
            [program, "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            preexec_fn=partial(_end_with, os.getpid()),
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid, self._output = self._process.pid, self._process.stdout
        with contextlib.suppress(BrokenPipeError), self._process.stdin as given:  # it has ended
            given.write(configuration.encode())

    def read(self, seconds: float) -> bool | None:
        """Read what the server prints; False if it has ended, None if it prints nothing."""
        if not select.select([self._output], [], [], max(0.0, seconds))[0]:
            return None
        some = self._output.read(1 << 16)
        self.printed = (self.printed + some)[-_LAST:]
        return bool(some)

    def is_ready(self) -> bool:
        """Wait until the server says so; False if it has ended, or takes too long."""
        deadline = time.monotonic() + _PATIENCE
        while _READY not in self.printed:
            if not self.read(deadline - time.monotonic()):
                return False
        return True

    def end(self) -> None:
        """End the server at once: it has nothing to save."""
        self._process.kill()
        self._process.wait()
        self._output.close()


def _end_with(watcher: int) -> None:
    """Have the system kill this process, which was forked for a server, when its watcher ends (Linux)."""
    with contextlib.suppress(ImportError, OSError, AttributeError):  # another system
        import ctypes

        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != watcher:  # it has ended meanwhile
        os._exit(1)


def start(programs: Sequence[str], configuration: str, host: str | None) -> tuple[Process | None, object]:
    """The first program that starts, and its port (0: none); else None, and what each program printed."""
    errors = []
    for program in programs:
        for _ in range(_PORTS if host else 1):
            port = _free_port(host) if host else 0
            try:
                process = Process(program, f"{configuration}port {port}\n")
            except OSError as error:
                printed = str(error)
                break
            if process.is_ready():
                return process, port
            process.end()
            printed = process.printed.decode("utf-8", "replace")
            if _TAKEN not in process.printed:
                break
        errors.append([program, printed])
    return None, errors


def _free_port(host: str) -> int:
    import socket  # slow import, needed for several nodes only

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def remove(folder: str) -> None:
    """Delete a server's files, under the lock of `FILE`, which goes last."""
    for name in (SOCKET, HELD, FILE):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, name))
    with contextlib.suppress(OSError):  # it has other content
        os.rmdir(folder)


def watch(folder: str, file: int, held: int, process: Process) -> None:
    """End the server with the last process of its job, and delete its files; returns then."""

    def wait_for_job() -> None:
        fcntl.flock(held, fcntl.LOCK_EX)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)

    threading.Thread(target=wait_for_job, daemon=True).start()
    while process.read(_LONG) is not False:
        pass
    process.end()
    fcntl.flock(file, fcntl.LOCK_EX)
    # If the server had ended by itself, another process may have started a new one in the same place.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(held), os.stat(os.path.join(folder, HELD))):
            remove(folder)


def _main() -> None:
    if os.fork():
        os._exit(0)  # daemonise, so that the starting process has no zombie
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the job ends it
    os.chdir("/")
    request = json.load(sys.stdin)
    folder = request["folder"]
    # Open both files before the server starts: later, another server may have files of these names.
    file, held = (os.open(os.path.join(folder, name), os.O_RDWR | os.O_NOFOLLOW) for name in (FILE, HELD))
    try:
        process, found = start(request["programs"], request["configuration"], request["host"])
    except OSError as error:
        process, found = None, [["", str(error)]]
    if process is None:
        answer = {"errors": found}
    else:
        answer = {"port": found, "pid": process.pid, "watcher": os.getpid()}
    with contextlib.suppress(BrokenPipeError):  # the asking process has ended
        os.write(1, json.dumps(answer).encode())
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    if process is not None:
        watch(folder, file, held, process)


if __name__ == "__main__":
    _main()
