"""Processes that fill a bucket through one small folder, and are killed, lose nothing that was sealed."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.buckets import bucket, opened
from tests.helpers.remote import mirrored_disk, reader
from tests.helpers.storage import NAMESPACES, found, keys_of, put, segments, size_of
from torchcache2.core.places import Bucket
from torchcache2.tiers.bucket.mirror import Mirror
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.disk import segmentwriter

pytestmark = pytest.mark.slow

CYCLES = 40 if os.environ.get("SOAK") else 3
IMPORTS = ("s3fs", "gcsfs.core", "tests.helpers.buckets")  # as other tests have them
FOLDER = NAMESPACES[0].hex()
ROWS, WIDTH = 10, 1000
BUDGET = 10 * ROWS * WIDTH * 4 + 30_000

SCRIPT = """
import sys
from tests.tiers.bucket.test_mirror_kills import fill_for_ever
fill_for_ever(*sys.argv[1:])
"""


def fill_for_ever(path, url, first):
    """Seal segments of rows that no other process has; print the number of each that is sealed."""
    segmentwriter.PAUSE = 0.002
    tier, mirror, _ = opened_stack(path, Bucket.of(url))
    for number in range(int(first), int(first) + 1000):
        names = [(number, row) for row in range(ROWS)]
        put(tier, names, WIDTH)
        tier.flush()
        if tier.has(keys_of(names)).all():
            print(number, flush=True)
        else:
            mirror.flush()  # the folder was full of rows that the bucket did not have yet


def opened_stack(path, place):
    objects = Objects(place)
    tier = mirrored_disk(path, BUDGET)
    mirror = Mirror(objects, tier.directory, tier.bucket.folder, BUDGET, tier.flush, pause=0.002)
    mirror.begin()
    return tier, mirror, objects


def check_heads(path, objects):
    """Each head says the truth."""
    sizes = {info.name: info.size for info in objects.listing(FOLDER)}
    local = {file.name: file.stat().st_size for file in segments(path)}
    for file in Path(path).glob("*/*.head"):
        name = file.name.removesuffix(".head")
        assert name in sizes and local.get(name, sizes[name]) == sizes[name]


def test_killed_processes_lose_nothing_that_was_sealed(tmp_path):
    rng, path, place, sealed = random.Random(7), tmp_path / "local", bucket("file", tmp_path), set()
    for cycle in range(CYCLES):
        both = [
            warm.start(SCRIPT, path, place.url, 10_000 * (2 * cycle + i), imports=IMPORTS) for i in range(2)
        ]
        for process in both:
            process.until("\n")
            time.sleep(rng.uniform(0.02, 0.2))
            process.send(signal.SIGKILL)
            process.wait()
            assert "Traceback" not in process.err  # a warning says when the bucket is behind
        sealed.update(int(word) for process in both for word in process.words)
        with opened(place) as objects:
            check_heads(path, objects)
    tier, mirror, objects = opened_stack(path, place)
    mirror.flush()
    tier.close()
    mirror.close()
    check_heads(path, objects)
    assert size_of(path) <= BUDGET + 3 * ROWS * WIDTH * 4
    objects.close()
    remote = reader(place, tmp_path / "empty")
    names = [(number, row) for number in sorted(sealed) for row in range(ROWS)]
    assert found(remote, names, WIDTH) == names and len(sealed) > 2 * CYCLES
    remote.close()
