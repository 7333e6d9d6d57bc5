"""TLS in front of a server that has none."""

import contextlib
import select
import socket
import ssl
import threading
from pathlib import Path

CERTIFICATE = str(
    Path(__file__).parents[1] / "golden" / "tls.pem"
)  # with its key; for localhost and 127.0.0.1


class TLSProxy:
    """Listens on a port of loopback, and passes what comes by TLS on to a `RedisServer`."""

    def __init__(self, server):
        self.server = server
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(CERTIFICATE)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        while True:
            try:
                taken = self._listener.accept()[0]
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(taken,)))
            self._threads[-1].start()

    def _serve(self, taken):
        with contextlib.suppress(OSError), taken, socket.socket(socket.AF_UNIX) as inner:
            taken.settimeout(10)
            inner.connect(self.server.path)
            with self._context.wrap_socket(taken, server_side=True) as outer:
                # One thread for both ways: what OpenSSL knows of a connection is not made for two.
                while True:
                    ready = [outer] if outer.pending() else select.select([outer, inner], [], [])[0]
                    for one in ready:
                        data = one.recv(65536)
                        if not data:
                            return
                        (inner if one is outer else outer).sendall(data)

    def stop(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()
