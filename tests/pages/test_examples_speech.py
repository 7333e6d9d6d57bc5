import re

import pytest

from tests.helpers.examples import run

pytestmark = pytest.mark.slow


def test_recordings_of_all_lengths_are_computed_once_and_found_in_the_second_run():
    # 16 does not divide 24: the last batch is a smaller one.
    done = run("speech.py", "--epochs", 2, "--recordings", 24, "--width", 16)
    counts = re.findall(r"^  (\w+): (\d+) computed, (\d+) found$", done.out, re.MULTILINE)
    assert counts == [
        (name, *found) for found in (("24", "24"), ("0", "48")) for name in ("Whisper", "wav2vec2")
    ]
    assert done.out.endswith("losses equal bit by bit\n")
