"""Runs a script of `examples`, and reads the numbers that it prints."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN_ITEMS, TEST_ITEMS = 1536, 261  # of the digits of scikit-learn


def run(name, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def number(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1].replace(",", ""))
