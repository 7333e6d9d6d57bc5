"""The example of ranks in step, and the code on their page, as `torchrun` starts them."""

import re
from pathlib import Path

import pytest

from tests.helpers.examples import number, torchrun

SCRIPT = "collective_features.py"
PASS = re.compile(r"^(\w+(?: \d+)?) +\d+\.\d+ s   (\d+) \+ (\d+) +(\d+) \+ (\d+)$", re.MULTILINE)
SMALL = ("--size", 8, "--items", 96, "--batch-size", 8)
PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def test_each_image_is_computed_once_and_sent_to_the_other_rank():
    done = torchrun(SCRIPT, *SMALL)
    assert "torchcache2" not in done.err  # no warning
    assert "96 images, 32 of them in the gallery; 2 ranks" in done.out
    names, computed, received = passes(done.out)
    assert names == ["gallery", "pass 1", "pass 2", "pass 3"]
    assert computed[0] == received[0] == [16, 16]  # each has computed half of the same batches
    # 64 images: a third for the first rank, the rest for the second one.
    assert computed[1:] == [[21, 43], [0, 0], [0, 0]]
    assert received[1] == [0, 0] and sum(received[2]) > 0
    assert all(new <= size for row in received[2:] for new, size in zip(row, (21, 43), strict=True))
    assert number(r"^([\d,]+) images computed, of 96$", done.out) == 96
    assert number(r"shows the same digit: ([\d.]+)%$", done.out) > 30
    assert number(r"the same on every rank \(largest difference (\S+)\)$", done.out) < 1e-4


@pytest.mark.soak
def test_ranks_of_one_machine_find_what_the_others_have_computed():
    done = torchrun(SCRIPT, *SMALL, "--machines", 1, "--passes", 2)
    _, computed, received = passes(done.out)
    assert computed == [[16, 16], [21, 43], [0, 0]]
    assert received[1:] == [[0, 0], [0, 0]]


def passes(text):
    """Names, and for each the images that each rank has computed, and received."""
    found = PASS.findall(text)
    counts = [[int(number) for number in row[1:]] for row in found]
    return [row[0] for row in found], [row[:2] for row in counts], [row[2:] for row in counts]


def test_the_code_on_the_page_prints_what_it_says(tmp_path):
    page = PAGE.read_text()
    (tmp_path / "page.py").write_text("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    (expected,) = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    done = torchrun(tmp_path / "page.py")
    assert "torchcache2" not in done.err
    assert sorted(done.words) == sorted(expected.split())
