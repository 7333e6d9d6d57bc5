import re

import pytest

from tests.helpers.examples import DIGITS, run, size_of_plot, start


def epochs_of(text):
    """Of each epoch, its number and how many images were decoded."""
    rows = re.findall(r"^ +(\d+) +[\d.]+ s +[\d.]+ s +(\d+)$", text, re.MULTILINE)
    return [(int(number), int(decoded)) for number, decoded in rows]


def test_cached_dataset_decodes_each_image_once_and_not_again_in_a_second_run(tmp_path):
    arguments = ["--items", 16, "--cache-dir", tmp_path / "rows", "--plot", tmp_path / "epochs.png"]
    done = run("cached_dataset.py", *arguments, "--epochs", 2, imports=DIGITS)
    assert "16 JPEG files of 768 x 768 pixels, 2 workers" in done.out
    assert epochs_of(done.out) == [(1, 16), (2, 0)]
    assert "all batches equal bit by bit, each epoch augmented anew" in done.out
    assert size_of_plot(tmp_path / "epochs.png")

    again = run("cached_dataset.py", *arguments, "--epochs", 1, imports=DIGITS)
    assert epochs_of(again.out) == [(1, 0)]


@pytest.mark.slow
def test_cached_dataset_decodes_again_what_has_no_room(tmp_path):
    arguments = ["--items", 24, "--epochs", 2, "--memory", 60_000, "--workers", 0]
    done = start("cached_dataset.py", *arguments, "--plot", tmp_path / "epochs.png").done(timeout=600)
    assert done.err.count("\n") == 1 and "memory_size is used up" in done.err
    (_, first), (_, second) = epochs_of(done.out)
    assert first == 24
    assert 24 - 60_000 // 64**2 <= second < 24
