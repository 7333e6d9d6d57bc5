"""A bucket in forked children: each has connections of its own, and its parent keeps those that it had."""

import http.server
import re
import threading

import pytest
import torch

from tests.helpers import warm
from tests.helpers.buckets import bucket, opened

DATA = bytes(range(256)) * 10
IMPORTS = ("s3fs", "gcsfs.core", "tests.helpers.buckets")  # as other tests have them
FORKS = """
    import atexit, gc, os, sys
    from torchcache2.core.places import Bucket
    from torchcache2.tiers.bucket.objects import Objects

    DATA = bytes(range(256)) * 10

    def forked(uses, closes):
        if child := os.fork():
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        global objects
        try:
            if uses:
                assert objects.read([("one", 5, 9)]) == [DATA[5:9]]
            if closes:
                objects.close()
            del objects
            gc.collect()
            atexit._run_exitfuncs()
        except BaseException:
            os._exit(1)
        os._exit(0)

    address = {"endpoint_url": f"http://127.0.0.1:{sys.argv[1]}"}
    s3 = Bucket.of("s3://tc2/folder", storage_options=address | {"key": "a", "secret": "b"})
    gs = Bucket.of("gs://tc2/folder", storage_options=address | {"token": "anon", "project": "test"})
    kept = []
    for place in (s3, gs):
        objects = Objects(place)
        assert objects.read([("one", 0, 100)]) == [DATA[:100]]
        for uses, closes in ((True, False), (True, True), (False, True)):
            assert forked(uses, closes) == 0
            assert objects.read([("one", 7, 9)]) == [DATA[7:9]]
        assert objects.faults == 0
        kept.append(objects)  # it is not closed before the process ends
    print("read")
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Keeps connections open, which the emulators do not."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        start, end = map(int, re.findall(r"\d+", self.headers["Range"]))
        self.send_response(206)
        self.send_header("Content-Length", str(end + 1 - start))
        self.send_header("Content-Range", f"bytes {start}-{end}/{len(DATA)}")
        self.end_headers()
        self.wfile.write(DATA[start : end + 1])

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = False
    clients = 0

    def process_request(self, request, address):
        self.clients += 1
        request.settimeout(10.0)
        super().process_request(request, address)


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.mark.slow
def test_children_have_connections_of_their_own_and_leave_those_of_their_parent(server):
    said = ["always::ResourceWarning", "ignore::DeprecationWarning"]  # that a process with threads forks
    ended = warm.run(FORKS, server.server_port, whole=True, warnings=said, imports=IMPORTS)
    assert server.clients == 2 * 3, "the parent's, and of each child that reads"
    assert ended.out == "read\n" and ended.err == ""


class Numbers(torch.utils.data.Dataset):
    def __init__(self, objects):
        self.objects = objects

    def __len__(self):
        return 8

    def __getitem__(self, index):
        (data,) = self.objects.read([("one", index, index + 1)])
        return data[0]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # fsspec has a thread
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_workers_read_what_the_process_that_forks_them_has_read(scheme, tmp_path):
    with opened(bucket(scheme, tmp_path)) as objects:
        objects.write("one", DATA)
        assert objects.read([("one", 0, 3)]) == [DATA[:3]]
        loader = torch.utils.data.DataLoader(
            Numbers(objects), num_workers=2, batch_size=4, multiprocessing_context="fork"
        )
        assert torch.cat(list(loader)).tolist() == list(range(8))
        assert objects.read([("one", 3, 5)]) == [DATA[3:5]] and objects.faults == 0
