"""Real Redis servers for tests: each on a socket in a folder of its own, or on a port of loopback."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import redis

from torchcache2.tiers.redis.server import find_servers

PROGRAMS = find_servers()
PASSWORD = "not-a-secret"


def names(programs=None):
    """Ids of tests, without a path of this machine."""
    return [os.path.basename(program) for program in programs or PROGRAMS]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """A server that runs until `stop`; `port=True`, or a number, has it listen on loopback, not on a socket.

    `lines` are lines of its configuration.
    """

    def __init__(self, program=None, *lines, port=False, password=PASSWORD):
        self.program, self.lines, self.password = program or PROGRAMS[0], lines, password
        self.folder = tempfile.mkdtemp(prefix="tc2r")  # a path of a socket must be short
        self.port = free_port() if port is True else int(port)
        self.path = os.path.join(self.folder, "s")
        self.start()

    @property
    def name(self):
        return f"127.0.0.1:{self.port}" if self.port else f"unix:{self.path}"

    @property
    def url(self):
        given = f":{self.password}@" if self.password else ""
        return f"redis://{given}127.0.0.1:{self.port}/0" if self.port else f"unix://{given}{self.path}?db=0"

    def start(self):
        where = "bind 127.0.0.1" if self.port else f"unixsocket {self.path}"
        secret = f"requirepass {self.password}" if self.password else ""
        always = [f"port {self.port}", where, secret, f"dir {self.folder}", 'save ""', "appendonly no"]
        text = "\n".join([*always, *self.lines, ""])
        self.process = subprocess.Popen([self.program, "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.process.stdin.write(text.encode())
        self.process.stdin.close()
        deadline = time.monotonic() + 10
        while True:
            try:
                with contextlib.closing(self.client()) as client:
                    client.ping()
                return
            except redis.exceptions.ConnectionError:
                assert time.monotonic() < deadline and self.process.poll() is None
                time.sleep(0.005)

    def client(self):
        """A client of redis-py, to look at what is there and to spoil it."""
        return redis.Redis.from_url(self.url, retry=None, socket_timeout=5)

    def kill(self):
        """End the server at once; `start` begins an empty one in the same place."""
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def pause(self):
        self.process.send_signal(signal.SIGSTOP)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def stop(self):
        if hasattr(self, "emptier"):
            self.emptier.close()
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()


def emptied(servers):
    """The servers, which have nothing now."""
    for server in servers:
        if not hasattr(server, "emptier"):
            server.emptier = server.client()  # to make one takes longer than what it is for
        server.emptier.flushall()
    return servers
