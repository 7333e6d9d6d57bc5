import re
import signal
import time

import pytest

from tests.helpers.examples import TEST_ITEMS, TRAIN_ITEMS, number, run, size_of_plot, start

pytestmark = pytest.mark.slow

SIZE = 16  # pixels


def test_linear_probe_runs_and_the_cache_changes_nothing_but_the_time(tmp_path):
    plot = tmp_path / "epochs.png"
    done = run("linear_probe.py", "--epochs", 2, "--size", SIZE, "--plot", plot)

    rows = re.findall(r"^ +(\d+) +\d+\.\d+ +(\d+\.\d+) s +(\d+\.\d+) s$", done.out, re.MULTILINE)
    assert [row[0] for row in rows] == ["1", "2"]
    assert number(r"speed-up: ([\d.]+)x per epoch after the first", done.out) > 0
    assert number(r"([\d.]+)x in all$", done.out) > 0

    assert number(r"^hits +([\d,]+) ", done.out) == TRAIN_ITEMS
    assert number(r"^misses +([\d,]+)$", done.out) == TRAIN_ITEMS + TEST_ITEMS
    assert number(r"^bypasses +(\S+)$", done.out) == 0
    assert "losses of all 48 steps equal bit by bit" in done.out
    assert number(r"test accuracy of both ([\d.]+)%", done.out) > 80

    assert size_of_plot(plot) == (1200, 675)


def test_linear_probe_goes_on_from_a_folder(tmp_path):
    items, test_items = 64, TEST_ITEMS
    arguments = ["--items", items, "--size", SIZE, "--cache-dir", tmp_path / "rows"]
    arguments += ["--plot", tmp_path / "epochs.png"]
    # Killed in the middle, when some rows have been sealed: it has more epochs to do than it can by then.
    killed = start("linear_probe.py", "--epochs", 100_000, *arguments)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("rows/*/*.safetensors")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL

    # It goes on from what was sealed.
    arguments += ["--epochs", 2]
    done = run("linear_probe.py", *arguments)
    computed = number(r"^misses +([\d,]+)$", done.out)
    assert 0 <= computed < items + test_items
    assert number(r"^hits +([\d,]+) ", done.out) == 2 * items + test_items - computed

    # The next one computes nothing.
    again = run("linear_probe.py", *arguments)
    assert number(r"^misses +([\d,]+)$", again.out) == 0
    assert number(r"^hits +([\d,]+) ", again.out) == 2 * items + test_items
    assert "equal bit by bit" in again.out
    losses = [re.findall(r"^ +\d+ +(\d+\.\d+) ", text, re.MULTILINE) for text in (done.out, again.out)]
    assert losses[0] == losses[1] and len(losses[0]) == 2
