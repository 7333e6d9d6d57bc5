import re

import pytest

from tests.helpers.examples import TRAIN_ITEMS, number, run

pytestmark = pytest.mark.slow

BATCH = 64


def test_teacher_runs_and_the_cache_changes_nothing_but_the_time():
    done = run("teacher.py", "--epochs", 2, "--width", 12)

    rows = re.findall(r"^ +(\d+) +\d+\.\d+(?: +\d+\.\d+ s){3}$", done.out, re.MULTILINE)
    assert rows == ["1", "2"]
    assert "losses of all 48 steps equal bit by bit" in done.out
    assert number(r"([\d.]+) s without", done.out) > 0
    assert number(r"([\d.]+) s with the cache$", done.out) > 0

    assert number(r"^teacher .* test accuracy ([\d.]+)%$", done.out) > 90
    assert number(r"^student, distilled .* test accuracy ([\d.]+)%$", done.out) > 50
    assert number(r"^student, without teacher .* test accuracy ([\d.]+)%$", done.out) > 50
    large, small, other = re.findall(r" ([\d,]+) weights ", done.out)
    assert small == other != large

    # A batch of images is found, and computed again with the teacher's next weights.
    assert "64 images found; after one more step of the teacher 64 of 64 computed again" in done.out
    assert number(r"^hits +([\d,]+) ", done.out) == TRAIN_ITEMS + BATCH
    assert number(r"^misses +([\d,]+)$", done.out) == TRAIN_ITEMS + BATCH
    assert number(r"^bypasses +(\S+)$", done.out) == 0
