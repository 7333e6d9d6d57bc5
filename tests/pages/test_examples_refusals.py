"""Arguments that an example cannot run with: it ends at once, with a sentence, and before ranks meet."""

import pytest

from tests.helpers import warm
from tests.helpers.examples import EXAMPLES, LIBRARIES

pytestmark = pytest.mark.slow

RANK = {"RANK": "0", "WORLD_SIZE": "2"}
REFUSED = [
    ("clip.py", ["--width", 6], {}, "a multiple of 4 for --width"),
    ("linear_probe.py", ["--epochs", 1], {}, "at least 2 epochs"),
    ("sentences.py", ["--sentences", 3], {}, "at least 4 sentences"),
    ("ddp_linear_probe.py", ["--items", 100, "--batch-size", 64], RANK, "a batch of each of the 2 ranks"),
    ("ddp_linear_probe.py", [], {}, "run it as torchrun --nproc-per-node 2 examples/ddp_linear_probe.py"),
]


def said(name, arguments, code, **env):
    process = warm.start(EXAMPLES / name, *arguments, env=env, imports=LIBRARIES, warnings=["error"])
    assert process.wait() == code
    return " ".join(process.err.split())


@pytest.mark.parametrize(("name", "arguments", "env", "text"), REFUSED)
def test_it_is_an_error_of_the_command(name, arguments, env, text):
    assert text in said(name, arguments, 2, **env)


def test_a_folder_without_sentences_is_named(tmp_path):
    text = said("text_embeddings.py", ["--random", "--library", tmp_path], 1)
    assert f"no docstring of a Python file in {tmp_path} has a sentence" in text
