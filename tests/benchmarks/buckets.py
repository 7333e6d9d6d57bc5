"""Datasets in a bucket, beside one object a sample, plain downloads of the same objects, and a local folder.

The bucket is one of rclone's S3 server, behind a proxy that delays each request by 20 ms. The tests' emulator
would not do: it reads the whole object for each range.
"""

import contextlib
import itertools
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import s3fs
import torch
from torch.utils.data import DataLoader

from tests.benchmarks.dataset_peers import Arrays
from tests.benchmarks.disk_machine import seconds
from tests.benchmarks.report import at_least, at_most, duration
from tests.benchmarks.timing import progress
from tests.helpers import buckets
from torchcache2 import CachedDataset
from torchcache2.files.directory import SEGMENT_NAME
from torchcache2.files.layout import HEAD

DELAY = 0.02  # seconds a request
COUNT, WIDTH, BATCH, WORKERS = 2000, 2048, 64, 2  # samples of 8 kB
FEW = 200  # of them as objects: each costs a request
LARGE, SHAPE, LARGE_BATCH, LARGE_ROUNDS = 1700, (3, 448, 448), 32, 3  # 1 GB of samples of 600 kB
TAKES = 0.01  # seconds a sample, of a source that is filled from
SEGMENTS, OPENINGS = 1000, 5
PROXY = """
import sys
from tests.helpers.proxy import Proxy

with Proxy(int(sys.argv[1]), delay=float(sys.argv[2])) as proxy:
    print(proxy.port, flush=True)
    sys.stdin.read()  # until the benchmark ends
"""
# This server puts the checksum of the object into answers with a range of it.
OPTIONS = {"config_kwargs": {"response_checksum_validation": "when_required"}}
OURS, OBJECTS = "torchcache2", "one object a sample, s3fs.cat_file"


def run(report):
    logging.getLogger("torchcache2").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, _server() as server, _proxy(server) as port:
        place = partial(Place, Path(folder), port)
        targets = [*_shuffled(report, place()), *_large(report, place()), *_filling(report, place)]
        targets += _opening(report, place())
    logging.getLogger("torchcache2").setLevel(logging.NOTSET)
    report.targets(targets)


@contextmanager
def _server():
    """The port of an S3 server of a new folder in memory."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        command = [str(Path(sys.executable).with_name("rclone")), "serve", "s3", folder]
        command += ["--addr", f"127.0.0.1:{port}", "--auth-key", f"{buckets.KEY},{buckets.SECRET}"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield port
        finally:
            process.kill()
            process.wait()


@contextmanager
def _proxy(port):
    """The port of a proxy in a process of its own, so that it does not take turns with what is measured."""
    command = [sys.executable, "-c", PROXY, str(port), str(DELAY)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield int(process.stdout.readline())
        process.stdin.close()


class Place:
    """A folder in a new bucket."""

    numbers = itertools.count()

    def __init__(self, folder, port):
        self.folder, self.options = folder, buckets.options_of("s3", port, **OPTIONS)
        self.bucket = f"bench-{next(self.numbers)}"
        self.fs().mkdir(self.bucket)
        self.url = f"s3://{self.bucket}/folder"

    def fill(self, source, **options):
        """Have the samples of a source there."""
        with closing(CachedDataset(source, self.url, name="bench", **self._given() | options)) as data:
            data.warmup()

    def serve(self, **options):
        """What another machine makes, whose local folder is empty."""
        return closing(CachedDataset(None, self.url, **self._given(), **options))

    def fs(self):
        """A plain client."""
        return s3fs.S3FileSystem(**self.options, skip_instance_cache=True)

    def new(self):
        """A new local folder."""
        return tempfile.mkdtemp(dir=self.folder)

    def _given(self):
        return {"storage_options": self.options, "memory_size": 0}


class Slow(Arrays):
    """A source that takes time for each sample, as reading and decoding do."""

    def __getitem__(self, index):
        time.sleep(TAKES)
        return super().__getitem__(index)


class PerSample:
    """The layout of torch_xla's CachedDataset: a sample is an object, and costs a request."""

    def __init__(self, place):
        self.place, self.client = place, None

    def __len__(self):
        return FEW

    def __getitem__(self, index):
        if self.client is None:
            self.client = self.place.fs()  # a client does not survive a fork
        data = self.client.cat_file(f"{self.place.bucket}/samples/{index}")
        return torch.from_numpy(np.frombuffer(data, np.float32).copy())


def loader(dataset, batch, workers=WORKERS):
    return DataLoader(dataset, batch, shuffle=True, num_workers=workers)


def epoch(batches):
    """Seconds until the first batch, and of the epoch."""
    start, first = time.perf_counter(), None
    for _ in batches:
        first = time.perf_counter() - start if first is None else first
    return first, time.perf_counter() - start


def _shuffled(report, place):
    progress("buckets: filling, small samples")
    source = torch.randn(COUNT, WIDTH)
    place.fill(source)
    fs = place.fs()
    fs.pipe({f"{place.bucket}/samples/{i}": source[i].numpy().tobytes() for i in range(FEW)})
    progress("buckets: cold epochs of small samples")
    start = time.perf_counter()
    with place.serve(local_dir=place.new()) as ours:  # listing, heads and checks are part of it
        for batch in loader(ours, BATCH):
            assert batch.shape[1] == WIDTH
        found = {OURS: (COUNT, time.perf_counter() - start)}
    found[OBJECTS] = FEW, epoch(loader(PerSample(place), BATCH))[1]
    title = f"A cold epoch of {COUNT:,} shuffled samples of 8 kB, {WORKERS} workers, batches of {BATCH}"
    rows = [
        (name, f"{count:,}", duration(taken), f"{count / taken:,.0f}")
        for name, (count, taken) in found.items()
    ]
    report.table(title, ("", "samples", "an epoch", "samples/s"), rows)
    (ours, ours_taken), (few, few_taken) = found.values()
    what = f"cold epoch of {COUNT:,} samples of 8 kB: times as fast a sample as {OBJECTS}"
    return [at_least(what, (few_taken / few) / (ours_taken / ours), 20)]


def _large(report, place):
    progress("buckets: filling 1 GB")
    source = Arrays(LARGE, SHAPE)
    local = place.new()
    with closing(CachedDataset(source, local, name="bench", memory_size=0)) as data:
        data.warmup()
    place.fill(source, memory_size="1GB")  # with room for rows that wait, segments have 64 MB
    fs = place.fs()
    objects = [name for name in fs.find(f"{place.bucket}/folder") if SEGMENT_NAME.fullmatch(Path(name).name)]
    size = sum(fs.size(name) for name in objects)
    plain, ranges, firsts, cold, second, folder = [], [], [], [], [], []
    row = int(np.prod(SHAPE))
    for number in range(LARGE_ROUNDS):
        progress(f"buckets: 1 GB, {number + 1} of {LARGE_ROUNDS}")
        target = place.new()
        plain.append(seconds(lambda: place.fs().get(objects, target + "/")))  # noqa: B023
        names = [objects[i % len(objects)] for i in range(LARGE_BATCH)]
        starts = [row * (1 + i) for i in range(LARGE_BATCH)]
        ends = [start + row for start in starts]
        ranges.append(seconds(lambda: place.fs().cat_ranges(names, starts, ends)))  # noqa: B023
        start = time.perf_counter()
        with place.serve(local_dir=(local_dir := place.new()), disk_size="4GB") as ours:
            made = time.perf_counter() - start
            first, taken = epoch(loader(ours, LARGE_BATCH))
            firsts.append(first)
            cold.append(made + taken)
            while not all(head.with_suffix("").exists() for head in Path(local_dir).glob(f"*/*{HEAD}")):
                time.sleep(0.1)  # until whole segments are here
            second.append(epoch(loader(ours, LARGE_BATCH))[1])
        with closing(CachedDataset(None, local, memory_size=0)) as here:
            folder.append(epoch(loader(here, LARGE_BATCH))[1])
    progress("buckets: 1 GB through a quarter")
    with place.serve(local_dir=place.new(), disk_size=size // 4) as small:
        epoch(loader(small, LARGE_BATCH, workers=0))
        quarter = small.stats().bytes_down / (LARGE * np.prod(SHAPE) + size // 4)
    names = ("fs.get of the same objects", f"{OURS}, cold epoch", f"{OURS}, epoch 2", "a local folder")
    names += ("fs.get, then an epoch of a local folder",)
    medians = [statistics.median(taken) for taken in (plain, cold, second, folder)]
    medians.append(medians[0] + medians[3])
    rows = [
        (name, duration(taken), f"{size / 1e6 / taken:,.0f}")
        for name, taken in zip(names, medians, strict=True)
    ]
    report.table(
        f"{size / 1e9:.2f} GB in {len(objects)} segments, samples of 600 kB", ("", "time", "MB/s"), rows
    )
    return [
        at_least(
            "1 GB, cold epoch: speed over that of fs.get of the same objects", medians[0] / medians[1], 0.8
        ),
        at_most(
            "first batch of a cold epoch of 1 GB: time over that of cat_ranges of as many rows",
            statistics.median(firsts) / statistics.median(ranges),
            1.5,
        ),
        at_most("epoch 2 of 1 GB: time over that of a local folder", medians[2] / medians[3], 1.1),
        at_most(
            "local_dir of a quarter of 1 GB: bytes from the bucket over rows and folder",
            quarter,
            1,
        ),
    ]


def _filling(report, place):
    count = LARGE // 4
    quick, slow = Arrays(count, SHAPE), Slow(count, SHAPE)
    found = {}

    def measured(name, function):
        found.setdefault(name, []).append(seconds(function))

    def fill(source, folder):
        with closing(CachedDataset(source, folder, name="bench", memory_size=0)) as data:
            data.warmup()

    for number in range(LARGE_ROUNDS):
        progress(f"buckets: filling, {number + 1} of {LARGE_ROUNDS}")
        new = place()
        folder = new.new()
        measured("local", partial(fill, quick, folder))
        measured("bucket", partial(new.fill, quick))
        files = list(map(str, Path(folder).rglob("*.safetensors")))
        measured("put", lambda: new.fs().put(files, f"{new.bucket}/plain/"))  # noqa: B023
        measured("slow local", partial(fill, slow, new.new()))
        measured("slow bucket", partial(place().fill, slow))
    medians = {name: statistics.median(taken) for name, taken in found.items()}
    size = sum(Path(name).stat().st_size for name in files)
    names = {
        "local": "samples that cost nothing: a local folder",
        "bucket": "samples that cost nothing: a bucket",
        "put": "fs.put of the same objects, which are there already: the limit of server and client",
        "slow local": f"samples that take {TAKES * 1000:.0f} ms: a local folder",
        "slow bucket": f"samples that take {TAKES * 1000:.0f} ms: a bucket",
    }
    rows = [
        (what, duration(medians[name]), f"{size / 1e6 / medians[name]:,.0f}") for name, what in names.items()
    ]
    title = f"Filling with {count} samples of 600 kB, close included"
    report.table(title, ("", "time", "MB/s"), rows)
    over = medians["bucket"] / medians["put"]
    return [at_most("filling a bucket: time over that of fs.put of the same objects", over, 1.2)]


def _opening(report, place):
    progress(f"buckets: {SEGMENTS} segments")
    source = torch.randn(SEGMENTS, 16)
    local, heads = place.new(), place.new()
    with closing(CachedDataset(source, local, name="bench", memory_size=0)) as data:
        for index in range(SEGMENTS):
            data[index]
            data.flush()
    place.fs().put(local + "/", f"{place.bucket}/folder", recursive=True)
    with place.serve(local_dir=heads, disk_size="1MB"):
        pass  # the heads are there from now on
    found = {"heads in local_dir": [], "a local folder": [], "one listing of the bucket": []}
    fs = place.fs()
    (folder,) = [name for name in fs.ls(f"{place.bucket}/folder") if fs.isdir(name)]
    for number in range(OPENINGS):
        progress(f"buckets: opening, {number + 1} of {OPENINGS}")
        for name, options in (
            ("heads in local_dir", {"cache_dir": place.url, "local_dir": heads, "disk_size": "1MB"}),
            ("a local folder", {"cache_dir": local}),
        ):
            if "local_dir" in options:
                options["storage_options"] = place.options
            start = time.perf_counter()
            with closing(CachedDataset(None, memory_size=0, **options)):
                found[name].append(time.perf_counter() - start)
        fs.invalidate_cache()
        found["one listing of the bucket"].append(seconds(lambda: fs.ls(folder)))
    medians = {name: statistics.median(taken) for name, taken in found.items()}
    rows = [(name, duration(taken)) for name, taken in medians.items()]
    report.table(f"Opening a dataset of {SEGMENTS:,} segments", ("", "time"), rows)
    over = medians["heads in local_dir"] / medians["a local folder"]
    return [at_most(f"opening {SEGMENTS:,} segments: time over that of a local folder", over, 1.5)]
