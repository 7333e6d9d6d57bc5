"""The example of several ranks, as `torchrun` starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.examples import EXAMPLES, number

SCRIPT = "ddp_linear_probe.py"
EPOCH = re.compile(r"^ +(\d+) +(\d+\.\d+) +\d+\.\d+ s   (\d+) \+ (\d+)$", re.MULTILINE)


def torchrun(*arguments):
    """What two ranks have printed, and the exit code of their launcher."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += [EXAMPLES / SCRIPT, *arguments]
    env = {name: value for name, value in os.environ.items() if name not in ("TORCHCACHE_JOB", "LOCAL_RANK")}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, env.get("PYTHONPATH", "")])}
    return subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=300)


def test_the_ranks_of_torchrun_compute_each_image_once():
    done = torchrun("--size", 8, "--items", 66, "--batch-size", 16, "--epochs", 3)
    assert done.returncode == 0, done.stderr
    assert "torchcache2" not in done.stderr  # no warning
    assert "64 images, 2 ranks, batches of 16 on each" in done.stdout
    epochs = EPOCH.findall(done.stdout)
    assert [(epoch, *counts) for epoch, _, *counts in epochs] == [
        ("1", "32", "32"),
        ("2", "0", "0"),
        ("3", "0", "0"),
    ]
    losses = [float(loss) for _, loss, *_ in epochs]
    assert losses[2] < losses[0]
    assert number(r"final loss ([\d.]+),", done.stdout) == losses[2]
    assert number(r"test accuracy ([\d.]+)%", done.stdout) > 20
    assert number(r"^backbone: ([\d,]+) images computed, of 64,", done.stdout) == 64
    assert number(r"^memory of all ranks: ([\d,]+) rows", done.stdout) == 64
