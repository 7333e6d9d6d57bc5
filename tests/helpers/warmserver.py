"""The process that has imported torch, and those that are forked from it: see `tests.helpers.warm`."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import multiprocessing.connection
import multiprocessing.forkserver
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATIENCE = 60.0  # seconds that it waits for whoever has started it


def _main():
    """Import what all need, and fork a process for each connection, as long as there are some."""
    import torch

    import torchcache2
    import torchcache2.tiers.disk.tier

    for name in torchcache2.__all__:
        getattr(torchcache2, name)  # it is imported only now, and half of what is slow to import with it
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or the children copy all objects when they collect
    living, address = set(), sys.argv[1]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        if os.fork():
            os._exit(0)  # who has started this may connect
        wait = _PATIENCE  # for the first one
        while select.select([listener], [], [], wait)[0] or living:
            if select.select([listener], [], [], 0.0)[0]:
                connection, _ = listener.accept()
                pid = os.fork()
                if pid == 0:
                    listener.close()
                    return _serve(connection)
                connection.close()
                living.add(pid)
            living -= {pid for pid in living if os.waitpid(pid, os.WNOHANG)[0]}
            wait = 0.5
        os.unlink(address)
    return None


def _serve(connection):
    """Import what these need, and fork them."""
    with connection:
        requests = connection.makefile("rw")
    living = set()
    for line in requests:
        request, reply = json.loads(line), None
        if "imports" in request:
            os.environ.clear()
            os.environ.update(request["env"])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what libraries say of each other when they are imported
                for name in request["imports"]:
                    importlib.import_module(name)
            gc.collect()
            gc.freeze()
        elif "start" in request:
            reply = os.fork()
            if reply == 0:
                requests.close()
                return _become(request)
            living.add(reply)
        elif "wait" in request:
            reply = _wait(request["wait"], request["timeout"])
            if reply is not None:
                living.remove(request["wait"])
        with contextlib.suppress(OSError):  # nobody is there any more
            requests.write(json.dumps(reply) + "\n")
            requests.flush()
    for pid in living:
        os.kill(pid, signal.SIGKILL)
    return None


def _wait(pid, timeout):
    end, pause = time.monotonic() + timeout, 0.001
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= end:
            return None
        time.sleep(pause)
        pause = min(1.1 * pause, 0.02)


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
    if request["forks"]:
        _start_forkserver()
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


def _start_forkserver():
    """Have the server of the method "forkserver" of `multiprocessing`, as a fork of this process now."""
    server = multiprocessing.forkserver._forkserver
    with socket.socket(socket.AF_UNIX) as listener:
        address = multiprocessing.connection.arbitrary_address("AF_UNIX")
        listener.bind(address)
        listener.listen()
        alive, server._forkserver_alive_fd = os.pipe()
        server._forkserver_address, server._forkserver_pid = address, os.fork()
        if server._forkserver_pid == 0:
            os.close(server._forkserver_alive_fd)
            try:
                multiprocessing.forkserver.main(listener.detach(), alive, [])
            finally:  # it ends with the last process that may ask it
                os._exit(0)
        os.close(alive)


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
