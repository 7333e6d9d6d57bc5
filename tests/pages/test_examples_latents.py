import os
import re

from tests.helpers.examples import run

SMALL = "--epochs", 2, "--images", 12, "--size", 32, "--width", 16, "--batch-size", 4
READ = ["reading the autoencoder", "reading CLIP", "reading T5"]


def read(text):
    """The encoders that were loaded in each of the two runs."""
    first, second = text.split("second run\n")
    return [re.findall(r"^  (reading .*)$", part, re.MULTILINE) for part in (first, second)]


def test_the_second_run_loads_no_encoder_and_has_equal_losses(tmp_path):
    done = run("latents.py", *SMALL, "--cache-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert read(done.stdout) == [READ, []]
    counts = re.findall(r"^  ([\w, ]+): (\d+) computed, (\d+) found$", done.stdout, re.MULTILINE)
    assert counts[0] == ("images", "12", "12") and counts[3] == ("images", "0", "24")
    assert [computed for _, computed, _ in counts[3:]] == ["0", "0", "0"]
    assert int(counts[1][1]) == int(counts[2][1]) <= 12  # two images may have one caption
    assert done.stdout.endswith("losses equal bit by bit\n")
    losses = re.findall(r"mean loss (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 4 and losses[:2] == losses[2:]

    if not os.environ.get("SOAK"):
        return
    again = run("latents.py", *SMALL, "--cache-dir", tmp_path)
    assert again.returncode == 0, again.stderr
    assert read(again.stdout) == [[], []]
    assert re.findall(r"mean loss (\d\.\d+)$", again.stdout, re.MULTILINE) == losses


def test_latents_refuses_a_size_that_the_autoencoder_cannot_halve():
    done = run("latents.py", "--size", 40)
    assert done.returncode == 2
    assert "a multiple of 16 for --size" in done.stderr
