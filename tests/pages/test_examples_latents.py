import os
import re

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.slow

SMALL = "--epochs", 2, "--images", 12, "--size", 32, "--width", 16, "--batch-size", 4
READ = ["reading the autoencoder", "reading CLIP", "reading T5"]


def read(text):
    """The encoders that were loaded in each of the two runs."""
    first, second = text.split("second run\n")
    return [re.findall(r"^  (reading .*)$", part, re.MULTILINE) for part in (first, second)]


def test_the_second_run_loads_no_encoder_and_has_equal_losses(tmp_path):
    done = run("latents.py", *SMALL, "--cache-dir", tmp_path)
    assert read(done.out) == [READ, []]
    counts = re.findall(r"^  images and captions: (\d+) computed, (\d+) found$", done.out, re.MULTILINE)
    assert counts == [("12", "12"), ("0", "24")]
    assert done.out.endswith("losses equal bit by bit\n")
    losses = re.findall(r"mean loss (\d\.\d+)$", done.out, re.MULTILINE)
    assert len(losses) == 4 and losses[:2] == losses[2:]

    if not os.environ.get("SOAK"):
        return
    again = run("latents.py", *SMALL, "--cache-dir", tmp_path)
    assert read(again.out) == [[], []]
    assert re.findall(r"mean loss (\d\.\d+)$", again.out, re.MULTILINE) == losses
