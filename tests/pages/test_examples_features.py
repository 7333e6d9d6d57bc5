import re

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.slow


def test_an_epoch_computes_each_photo_once_and_the_second_run_none():
    done = run("features.py", "--epochs", 2, "--images", 80, "--workers", 1)
    rows = re.findall(r"^ +(\d+) +\d+\.\d+ s +\d+\.\d+ s +(\d+)$", done.out, re.MULTILINE)
    assert rows == [("1", "80"), ("2", "0")]
    assert "all 4 losses equal bit by bit" in done.out
    assert re.search(r"second run, first epoch: \d+\.\d+ s, 0 computed\n", done.out)
