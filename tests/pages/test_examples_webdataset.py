import re

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.slow

pytest.importorskip("webdataset")


def decoded(*arguments):
    """How many images each epoch has decoded."""
    # WebDataset leaves it to the garbage collector to close its tars.
    done = run("webdataset_stream.py", "--items", 24, *arguments, ignored=["ResourceWarning"])
    assert "24 JPEG files of 768 x 768 pixels in 8 tars" in done.out
    assert "all images equal bit by bit" in done.out
    return [
        int(number) for number in re.findall(r"^ +\d+ +[\d.]+ s +[\d.]+ s +(\d+)$", done.out, re.MULTILINE)
    ]


def test_images_in_tars_are_decoded_once_and_not_again_in_a_second_run(tmp_path):
    assert decoded("--cache-dir", tmp_path, "--epochs", 2) == [24, 0]
    assert decoded("--cache-dir", tmp_path, "--epochs", 1, "--workers", 0) == [0]
