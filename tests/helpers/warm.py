"""Processes that need not import torch: they are forked from one that has.

Those that need other slow libraries as well name them, and are forked from another one that has these too,
which was itself forked from the first one. All workers of pytest share that.

`start` runs a script as ``__main__`` in a process of its own, which ends as any other: its threads are waited
for, its handlers of `atexit` run, and it has an exit code. With ``whole=True`` the interpreter is also
taken down, which costs half a second more. A process that does not end in time is killed, and the test fails
with the stacks of its threads.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0  # seconds
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TEMPORARY = tempfile.gettempdir()  # tests change it
_PATIENCE = 2.0


class Process:
    """A script that runs."""

    def __init__(self, server, pid, out, err):
        self.pid = pid
        self._server, self._out, self._err = server, out, err
        self._code = None

    @property
    def out(self):
        return self._out.read_text()

    @property
    def err(self):
        return self._err.read_text(errors="replace")

    @property
    def words(self):
        return self.out.split()

    def send(self, number):
        if self._code is None:
            os.kill(self.pid, number)

    def poll(self, timeout=0.0):
        """The exit code, negative for a signal; None if it has not ended in time."""
        if self._code is None:
            self._code = self._server.ask(wait=self.pid, timeout=timeout)
        return self._code

    def wait(self, timeout=DEADLINE):
        """The exit code. Fails if there is none in time."""
        code = self.poll(timeout)
        if code is None:
            self.send(signal.SIGUSR1)  # it prints the stacks of its threads
            self.poll(_PATIENCE)
            self.send(signal.SIGKILL)
            self.poll(_PATIENCE)
            raise AssertionError(f"it has not ended after {timeout} s\n{self.out}\n{self.err}")
        return code

    def done(self, code=0, timeout=DEADLINE):
        """Itself, when it has ended as expected."""
        assert self.wait(timeout) == code, f"exit code {self._code}\n{self.out}\n{self.err}"
        return self

    def until(self, text, timeout=DEADLINE):
        """Itself, when it has printed a text."""
        end = time.monotonic() + timeout
        while text not in self.out:
            if self.poll() is not None or time.monotonic() > end:
                self.wait(0.0)
                raise AssertionError(f"it ended without {text!r}\n{self.out}\n{self.err}")
            time.sleep(0.005)
        return self


class Server:
    """A process that has imported torch, and some other modules; with a hash seed for texts."""

    def __init__(self, seed, *imports):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        first = {"imports": imports, "env": {**os.environ, **ENVIRONMENT, "PYTHONHASHSEED": seed}}
        with open(__file__) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # or two start the one that they share
            try:
                self._connect(seed)
            except (OSError, ValueError):  # there is none, or it is about to end
                subprocess.run(
                    [sys.executable, "-m", "tests.helpers.warmserver", _address(seed)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    cwd=ROOT,
                    env=first["env"],
                    check=True,
                )
                self._connect(seed)
        self.ask(**first)
        atexit.register(self.close)

    def _connect(self, seed):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(_address(seed))
            self._requests = connection.makefile("rw")
            try:
                self.ask()
            except BaseException:
                self._requests.close()
                raise

    def ask(self, **request):
        with self._lock:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            return json.loads(self._requests.readline())

    def start(self, script, *args, env=None, cwd=None, whole=False, warnings=(), forks=False):
        """Run a script: a path, or its text; what is to be done about warnings, as in Python's ``-W``.

        With `forks`, its processes of the method "forkserver" come from a server that has imported torch.
        """
        number = next(self._numbers)
        folder = Path(self._folder.name)
        if not isinstance(script, Path):
            text, script = textwrap.dedent(script), folder / f"script_{hash(script) & 0xFFFFFFFF:08x}.py"
            if not script.exists():
                script.write_text(text)
        out, err = folder / f"{number}.out", folder / f"{number}.err"
        out.touch()
        err.touch()
        request = {"start": str(script), "args": list(map(str, args)), "out": str(out), "err": str(err)}
        request |= {"env": env or {}, "cwd": str(cwd or folder), "whole": whole}
        request |= {"warnings": warnings, "forks": forks}
        return Process(self, self.ask(**request), out, err)

    def run(self, script, *args, **options):
        """Run a script, and return when it has ended well."""
        return self.start(script, *args, **options).done()

    def close(self):
        self._requests.close()
        self._folder.cleanup()


def _address(seed):
    """The socket of the process that all workers of this run of the tests share."""
    return f"{TEMPORARY}/warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}-{seed}"


@functools.cache
def server(seed, *imports):
    """The one of this run of the tests that has this hash seed and has imported these modules."""
    return Server(seed, *imports)


def start(script, *args, seed="random", imports=(), **options):
    return server(seed, *imports).start(script, *args, **options)


def run(script, *args, seed="random", imports=(), **options):
    return server(seed, *imports).run(script, *args, **options)


dedented = textwrap.dedent
