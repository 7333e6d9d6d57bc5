import re
import subprocess
import sys
from pathlib import Path

from matplotlib.image import imread

EXAMPLES = Path(__file__).parent.parent / "examples"
TRAIN_ITEMS, TEST_ITEMS = 1536, 261


def run(name, *arguments):
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def number(pattern, text):
    found = re.search(pattern, text, re.MULTILINE)
    assert found, f"no {pattern!r} in:\n{text}"
    return float(found[1].replace(",", ""))


def test_linear_probe_runs_and_the_cache_changes_nothing_but_the_time(tmp_path):
    plot = tmp_path / "epochs.png"
    done = run("linear_probe.py", "--epochs", 3, "--plot", plot)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""

    rows = re.findall(r"^ +(\d+) +\d+\.\d+ +(\d+\.\d+) s +(\d+\.\d+) s$", done.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2", "3"]
    assert number(r"speed-up: ([\d.]+)x per epoch after the first", done.stdout) > 0
    assert number(r"([\d.]+)x in all$", done.stdout) > 0

    assert number(r"^hits +([\d,]+) ", done.stdout) == 2 * TRAIN_ITEMS
    assert number(r"^misses +([\d,]+)$", done.stdout) == TRAIN_ITEMS + TEST_ITEMS
    assert number(r"^bypasses +(\S+)$", done.stdout) == 0
    assert "losses of all 72 steps equal bit by bit" in done.stdout
    assert number(r"test accuracy of both ([\d.]+)%", done.stdout) > 80

    image = imread(plot)
    assert image.shape == (675, 1200, 4)
    assert image[..., :3].std() > 0.05  # something is drawn


def test_linear_probe_refuses_a_single_epoch():
    done = run("linear_probe.py", "--epochs", 1)
    assert done.returncode == 2
    assert "at least 2 epochs" in done.stderr
