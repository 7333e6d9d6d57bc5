import re

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.slow


def test_features_of_images_and_texts_are_computed_once_and_found_in_the_second_run():
    done = run("clip.py", "--epochs", 2, "--images", 128, "--width", 16)
    counts = re.findall(r"^  get_(\w+)_features: (\d+) computed, (\d+) found$", done.out, re.MULTILINE)
    # Ten labels in each of two batches an epoch.
    assert counts == [
        ("image", "128", "128"),
        ("text", "10", "30"),
        ("image", "0", "256"),
        ("text", "0", "40"),
    ]
    accuracies = re.findall(r"accuracy (\d\.\d\d)$", done.out, re.MULTILINE)
    assert len(accuracies) == 4 and accuracies[:2] == accuracies[2:]
    assert done.out.endswith("losses equal bit by bit\n")
