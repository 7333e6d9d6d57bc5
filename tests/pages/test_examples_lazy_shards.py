"""The example of shards, as `torchrun` starts it."""

import importlib.util
import re

import pytest

from tests.helpers.examples import torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("zarr") is None, reason="it comes with the examples"),
]
EPOCH = re.compile(r"^epoch (\d): loss [\d.]+, images read: (\d+) \+ (\d+), [\d.]+ s$", re.MULTILINE)
SMALL = ("--items", 81, "--epochs", 2)


@pytest.mark.parametrize(("mode", "workers"), [("rank", 0), ("node", 1)])
def test_each_rank_reads_its_images_once(mode, workers):
    done = torchrun("lazy_shards.py", *SMALL, "--mode", mode, "--workers", workers)
    assert "torchcache2" not in done.err  # no warning
    assert "81 images in chunks of 32; the ranks have 40 + 40\n" in done.out
    assert EPOCH.findall(done.out) == [("1", "40", "40"), ("2", "0", "0")]
