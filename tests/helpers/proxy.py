"""A TCP proxy in front of a server of HTTP: it delays, cuts, answers errors, or hangs, as a test has it."""

import contextlib
import re
import select
import socket
import threading
import time

_REQUEST = re.compile(rb"[A-Z]{3,7} \S+ HTTP/1\.[01]\r\n")
_SIZE = 1 << 16


class Proxy:
    """Passes connections on to a port of this machine; its attributes may be set at any time.

    Attributes
    ----------
    port : int
        Where clients connect.
    only : str
        What is in the head of those requests that faults concern, such as ``"PUT "``; the others pass.
    times : int, optional
        How many of these have the faults; None: all.
    delay : float
        Seconds that each request waits, whichever it is.
    cut_up, cut_down : int, optional
        How many bytes of a request, and of a reply, pass before the connection is closed.
    status : int, optional
        What requests are answered with, such as 503; the server does not see them.
    body : bytes
        The content of such an answer.
    hangs : bool
        Whether requests get no answer.
    refuses : bool
        Whether the connection is closed when a request comes.
    requests : list of str
        The lines of all requests.
    """

    def __init__(self, port, **faults):
        self._target = ("127.0.0.1", port)
        self.heal()
        self.requests = []
        for name, value in faults.items():
            setattr(self, name, value)
        self._is_closed = False
        self._threads = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def heal(self):
        """Have no faults from now on."""
        self.only, self.times, self.delay, self.cut_up, self.cut_down = "", None, 0.0, None, None
        self.status, self.body, self.hangs, self.refuses = None, b"", False, False

    def close(self):
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def _start(self, function, *args):
        thread = threading.Thread(target=function, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        while not self._is_closed:
            if select.select([self._listener], [], [], 0.05)[0]:
                client, _ = self._listener.accept()
                self._start(self._serve, client)

    def _serve(self, client):
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._pass_on(client, server)
            finally:
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_RDWR)  # a forked child may have the socket open, too

    def _pass_on(self, client, server):
        is_hit, up, down = False, 0, 0
        while not self._is_closed:
            ready = select.select([client, server], [], [], 0.05)[0]
            if client in ready:
                data = client.recv(_SIZE)
                if not data:
                    return None
                if found := _REQUEST.match(data):
                    self.requests.append(found[0].decode().strip())
                    time.sleep(self.delay)
                    is_hit, up, down = self._is_hit(data), 0, 0
                if is_hit and self.refuses:
                    return None
                if is_hit and self.hangs:
                    continue
                if is_hit and self.status is not None:
                    return self._answer(client)
                if is_hit and self.cut_up is not None:
                    data = data[: self.cut_up - up]
                server.sendall(data)
                up += len(data)
                if is_hit and self.cut_up is not None and up >= self.cut_up:
                    return None
            if server in ready:
                data = server.recv(_SIZE)
                if not data:
                    return None
                if is_hit and self.cut_down is not None:
                    data = data[: self.cut_down - down]
                client.sendall(data)
                down += len(data)
                if is_hit and self.cut_down is not None and down >= self.cut_down:
                    return None
        return None

    def _is_hit(self, data):
        is_hit = self.only.encode() in data[:4096] and self.times != 0
        if is_hit and self.times is not None:
            self.times -= 1
        return is_hit

    def _answer(self, client):
        head = (
            f"HTTP/1.1 {self.status} Fault\r\nContent-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        )
        client.sendall(head.encode() + self.body)
        client.shutdown(socket.SHUT_WR)
        client.settimeout(1.0)
        while client.recv(_SIZE):  # what the client still sends; an unread rest would reset the connection
            pass
