"""The example of several ranks, as `torchrun` starts it."""

import re

import pytest

from tests.helpers.examples import number, torchrun

pytestmark = pytest.mark.slow

SCRIPT = "ddp_linear_probe.py"
EPOCH = re.compile(r"^ +(\d+) +(\d+\.\d+) +\d+\.\d+ s   (\d+) \+ (\d+)$", re.MULTILINE)
SMALL = ("--size", 8, "--items", 66, "--batch-size", 16)


def test_the_ranks_of_torchrun_compute_each_image_once():
    done = torchrun(SCRIPT, *SMALL)
    assert "torchcache2" not in done.err  # no warning
    assert "64 images, 2 ranks, batches of 16 on each" in done.out
    epochs = EPOCH.findall(done.out)
    computed = [(epoch, *counts) for epoch, _, *counts in epochs]
    assert computed == [("1", "32", "32"), ("2", "0", "0"), ("3", "0", "0")]
    losses = [float(loss) for _, loss, *_ in epochs]
    assert losses[2] < losses[0]
    assert number(r"final loss ([\d.]+),", done.out) == losses[2]
    assert number(r"test accuracy ([\d.]+)%", done.out) > 20
    assert number(r"^backbone: ([\d,]+) images computed, of 64,", done.out) == 64
    assert number(r"^memory of all ranks: ([\d,]+) rows", done.out) == 64


def test_after_a_warmup_no_epoch_computes_anything():
    done = torchrun(SCRIPT, *SMALL, "--warmup", "--epochs", 2)
    assert re.search(r"^warmup: \d+\.\d+ s, images computed by each rank: 32 \+ 32$", done.out, re.MULTILINE)
    assert [counts for _, _, *counts in EPOCH.findall(done.out)] == [["0", "0"], ["0", "0"]]
    assert number(r"^backbone: ([\d,]+) images computed, of 64,", done.out) == 64
