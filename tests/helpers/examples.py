"""Runs a script of `examples`, and reads the numbers that it prints."""

import re
import subprocess
from pathlib import Path

from tests.helpers import warm

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN_ITEMS, TEST_ITEMS = 1536, 261  # of the digits of scikit-learn


def run(name, *arguments):
    """What a script has printed, and its exit code."""
    process = warm.start(EXAMPLES / name, *arguments, warnings=["error"])
    return subprocess.CompletedProcess(name, process.wait(600), process.out, process.err)


def number(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1].replace(",", ""))
