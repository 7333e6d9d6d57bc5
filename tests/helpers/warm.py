"""Processes that need not import torch: they are forked from one that has.

Those that need other slow libraries as well name them, and are forked from another one that has these too.

`start` runs a script as ``__main__`` in a process of its own, which ends as any other: its threads are waited
for, its handlers of `atexit` run, and it has an exit code. With ``whole=True`` the interpreter is also
taken down, which costs half a second more. A process that does not end in time is killed, and the test fails
with the stacks of its threads.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0  # seconds
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
    """The process that has imported torch, and some other modules; with a hash seed for texts."""

    def __init__(self, seed, *imports):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.warm", *imports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONHASHSEED": seed,
            },
        )
        atexit.register(self.close)

    def ask(self, **request):
        with self._lock:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())

    def start(self, script, *args, env=None, cwd=None, whole=False, warnings=()):
        """Run a script: a path, or its text; what is to be done about warnings, as in Python's ``-W``."""
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
        request["warnings"] = warnings
        return Process(self, self.ask(**request), out, err)

    def run(self, script, *args, **options):
        """Run a script, and return when it has ended well."""
        return self.start(script, *args, **options).done()

    def close(self):
        self._process.stdin.close()
        self._process.wait(DEADLINE)
        self._process.stdout.close()
        self._folder.cleanup()


@functools.cache
def server(seed, *imports):
    """The one of this run of the tests that has this hash seed and has imported these modules."""
    return Server(seed, *imports)


def start(script, *args, seed="random", imports=(), **options):
    return server(seed, *imports).start(script, *args, **options)


def run(script, *args, seed="random", imports=(), **options):
    return server(seed, *imports).run(script, *args, **options)


dedented = textwrap.dedent


# In the other process


def _main():
    import torch

    import torchcache2
    import torchcache2.tiers.disk.tier

    for name in torchcache2.__all__:
        getattr(torchcache2, name)  # it is imported only now, and half of what is slow to import with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of each other when they are imported
        for name in sys.argv[1:]:
            importlib.import_module(name)
    torch.set_num_threads(1)
    replies = sys.stdout
    gc.collect()
    gc.freeze()  # or the children copy all objects when they collect
    living = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "start" in request:
            reply = os.fork()
            if reply == 0:
                return _become(request)
            living.add(reply)
        else:
            reply = _wait(request["wait"], request["timeout"])
            if reply is not None:
                living.remove(request["wait"])
        print(json.dumps(reply), file=replies, flush=True)
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return None


def _wait(pid, timeout):
    end = time.monotonic() + timeout
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(0.002)


def _become(request):
    """Make this process one that looks as if it had been started with a script."""
    for number, name, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["out"], os.O_WRONLY | os.O_APPEND),
        (2, request["err"], os.O_WRONLY | os.O_APPEND),
    ):
        file = os.open(name, flags)
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.update(request["env"])
    warnings._processoptions(request["warnings"])  # as Python does with its ``-W``
    tempfile.tempdir = None  # TMPDIR may be another
    os.chdir(request["cwd"])
    path = request["start"]
    sys.argv = [path, *request["args"]]
    sys.path[:1] = [os.path.dirname(path), str(ROOT)]
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__dict__["__spec__"] = None
    sys.modules["__main__"] = main
    faulthandler.register(signal.SIGUSR1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if pytest runs in the background
    return functools.partial(_run if request["whole"] else _run_and_leave, path, main.__dict__)


def _run(path, names):
    # Without this file's `annotations` of the future, which torch 2.4 cannot read in a custom op.
    exec(compile(Path(path).read_text(), path, "exec", dont_inherit=True), names)


def _run_and_leave(path, names):
    code = 0
    try:
        _run(path, names)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if code != stop.code and stop.code is not None:
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    job = _main()
    if job is not None:
        job()
