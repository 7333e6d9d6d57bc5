"""Buckets for tests: `memory://`, `file://`, S3 and GCS, on real HTTP servers in a child process.

One process serves for a session of tests; each test has a new bucket or folder there.
"""

import atexit
import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
import urllib.request

from tests.helpers.proxy import Proxy
from torchcache2.core.places import Bucket

SCHEMES = ["memory", "file", "s3", "gs"]
KEY, SECRET = "not-an-id-of-anybody", "not-a-secret-of-anybody"
_NUMBERS = itertools.count()
_SERVE = """
import json, sys
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer
s3 = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
s3.start()
gcs = create_server("127.0.0.1", 0, in_memory=True)
gcs.start()
ports = {"s3": s3.get_host_and_port()[1], "gs": gcs._api._httpd.server_address[1]}
print(json.dumps(ports), flush=True)
sys.stdin.read()  # until the tests end
"""


@functools.cache
def servers():
    """The ports of the servers, which a child process runs until this one ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )

    def stop():
        process.stdin.close()
        process.kill()
        process.wait()
        process.stdout.close()

    atexit.register(stop)
    return json.loads(process.stdout.readline())


@functools.cache
def session():
    """For clients of S3 in this process: a tenth of a second of each is to load the same tables again."""
    from aiobotocore.session import AioSession

    return AioSession()


def options_of(scheme, port=None, **more):
    """Options for a client of a server, or of a proxy on another port."""
    address = {"endpoint_url": f"http://127.0.0.1:{port or servers()[scheme]}"}
    if scheme == "gs":
        return address | {"token": "anon", "project": "test"} | more
    return address | {"key": KEY, "secret": SECRET} | more


def new_bucket(scheme):
    """The name of a new bucket of S3 or GCS."""
    name = f"tc2-{os.getpid()}-{next(_NUMBERS)}"
    address = f"http://127.0.0.1:{servers()[scheme]}"
    if scheme == "gs":
        content = {"Content-Type": "application/json"}
        data = json.dumps({"name": name}).encode()
        request = urllib.request.Request(f"{address}/storage/v1/b?project=test", data, content)
    else:
        request = urllib.request.Request(f"{address}/{name}", method="PUT")
    with urllib.request.urlopen(request):
        return name


def bucket(scheme, tmp_path, *, local_dir=None, remote_size=None, port=None, **options):
    """A new, empty bucket; `port` is that of a proxy, and `options` are added to `storage_options`."""
    if scheme == "memory":
        url = f"memory://tc2-{os.getpid()}-{next(_NUMBERS)}/folder"
    elif scheme == "file":
        url = f"file://{tmp_path}/bucket-{next(_NUMBERS)}"
    else:
        url = f"{scheme}://{new_bucket(scheme)}/folder"
        options = options_of(scheme, port, **options)
    return Bucket.of(url, local_dir=local_dir, remote_size=remote_size, storage_options=options)


@contextlib.contextmanager
def proxied(scheme, tmp_path, **more):
    """A new bucket that is reached through a `Proxy`, and the proxy."""
    with Proxy(servers()[scheme]) as proxy:
        yield bucket(scheme, tmp_path, port=proxy.port, **more), proxy


@contextlib.contextmanager
def opened(bucket, **options):
    """`Objects` of a bucket."""
    from torchcache2.tiers.bucket.objects import Objects

    objects = Objects(bucket, **options)
    try:
        yield objects
    finally:
        objects.close()
