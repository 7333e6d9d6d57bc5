"""Looks at our own Redis servers from outside: which processes and files there are."""

import contextlib
import json
import os
import shutil
import signal
import tempfile
from pathlib import Path

import redis

from tests.helpers.storage import wait_until
from torchcache2.tiers.redis import watcher
from torchcache2.tiers.redis.server import let_go
from torchcache2.tiers.shared.region import start_time


class Place:
    """A folder for temporary files whose path is short, and the servers in it."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="tc2s", dir="/tmp"))

    @property
    def folders(self):
        return sorted(self.path.glob("torchcache2_redis_*"))

    @property
    def about(self):
        """What the file of the only server says."""
        (folder,) = self.folders
        return json.loads((folder / watcher.FILE).read_text())

    def all_ended(self, *pids):
        """Wait until there is no folder, and until some processes have ended."""
        wait_until(lambda: not self.folders and not any(map(start_time, pids)))

    def remove(self):
        for folder in self.folders:
            let_go(str(folder / watcher.HELD))
            with contextlib.suppress(OSError, ValueError, KeyError):
                about = json.loads((folder / watcher.FILE).read_text())
                if b"watcher.py" in Path(f"/proc/{about['watcher']}/cmdline").read_bytes():
                    os.kill(about["watcher"], signal.SIGKILL)
        shutil.rmtree(self.path, ignore_errors=True)


def client(server):
    """A client of redis-py, which must be closed."""
    options = dict(server.options)
    if "path" in options:
        options["unix_socket_path"] = options.pop("path")
    return redis.Redis(**options, protocol=2, retry=None, socket_timeout=5)


def answers(server):
    try:
        with contextlib.closing(client(server)) as asked:
            return asked.ping()
    except redis.exceptions.ConnectionError:
        return False
