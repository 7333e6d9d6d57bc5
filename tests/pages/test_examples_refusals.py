"""Arguments that an example cannot run with: it ends at once, with a sentence, and before ranks meet."""

import pytest

from tests.helpers import warm
from tests.helpers.examples import EXAMPLES, LIBRARIES

pytestmark = pytest.mark.slow

REFUSED = [
    ("clip.py", ["--width", 6], "a multiple of 4 for --width"),
    ("latents.py", ["--size", 40], "a multiple of 16 for --size"),
    ("linear_probe.py", ["--epochs", 1], "at least 2 epochs"),
    ("linear_probe.py", ["--size", 20], "a multiple of 8 pixels"),
    ("prompts.py", ["--epochs", 1], "at least 2 epochs"),
    ("sentences.py", ["--sentences", 3], "at least 4 sentences"),
    ("speech.py", ["--width", 20], "a multiple of 16 for --width"),
    ("teacher.py", ["--epochs", 1], "at least 2 epochs"),
    ("text_embeddings.py", ["--length", 513], "3 to 512 tokens"),
]
REFUSED_BY_RANKS = [
    ("ddp_linear_probe.py", ["--epochs", 1], "at least 2 epochs"),
    ("ddp_linear_probe.py", ["--items", 100, "--batch-size", 64], "a batch of each of the 2 ranks"),
    ("ddp_linear_probe.py", ["--size", 20], "a multiple of 8 pixels"),
]
WITHOUT_A_LAUNCHER = [
    (name, [], f"run it as torchrun --nproc-per-node 2 examples/{name}")
    for name in ("lazy_shards.py", "ddp_linear_probe.py")
]


def said(name, arguments, code, **env):
    process = warm.start(EXAMPLES / name, *arguments, env=env, imports=LIBRARIES, warnings=["error"])
    assert process.wait() == code
    return " ".join(process.err.split())


@pytest.mark.parametrize(("name", "arguments", "text"), [*REFUSED, *WITHOUT_A_LAUNCHER])
def test_it_is_an_error_of_the_command(name, arguments, text):
    assert text in said(name, arguments, 2)


@pytest.mark.parametrize(("name", "arguments", "text"), REFUSED_BY_RANKS)
def test_arguments_are_checked_before_the_ranks_meet(name, arguments, text):
    assert text in said(name, arguments, 2, RANK="0", WORLD_SIZE="2")


def test_a_folder_without_sentences_is_named(tmp_path):
    text = said("text_embeddings.py", ["--random", "--library", tmp_path], 1)
    assert f"no docstring of a Python file in {tmp_path} has a sentence" in text
