import re

import pytest

from tests.helpers.examples import DIGITS, run


def test_shared_cache_decodes_each_image_once():
    done = run("shared_cache.py", "--items", 40, "--epochs", 2, imports=DIGITS)
    assert "40 images, 40 of them with a slot; 2 workers" in done.out
    epochs = re.findall(r"^epoch (\d): (\d+) found, (\d+) decoded, [\d.]+ s$", done.out, re.MULTILINE)
    assert epochs == [("1", "0", "40"), ("2", "40", "0")]


@pytest.mark.slow
def test_shared_cache_decodes_again_what_has_no_slot():
    done = run("shared_cache.py", "--items", 12, "--epochs", 2, "--gib", 4e-5, "--workers", 0)
    slots = int(4e-5 * 2**30 - 12) // 64**2
    assert f"12 images, {slots} of them with a slot" in done.out
    assert f"epoch 2: {slots} found, {12 - slots} decoded" in done.out
