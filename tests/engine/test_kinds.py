"""Values of every kind, from functions and datasets: found as they were, or not kept; never different."""

import contextlib
import os

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from tests.helpers import warm
from tests.helpers.kinds import AROUND, KINDS, Largest, build
from tests.helpers.outputs import Notes, assert_same, note
from torchcache2 import CachedDataset, OutputError, torchcache

SOAK = bool(os.environ.get("SOAK"))
X = torch.arange(32.0).reshape(8, 4) + 1
SPECS = [*KINDS, ("tuple", "attributes", "dict"), ("dict", "frozen", "list"), ("slots", "model output")]

CHILD = """
import sys
from tests.engine.test_kinds import check_found
check_found(sys.argv[1])
"""


def forward(x, spec):
    return build(spec, x)


class Made(torch.utils.data.Dataset):
    def __init__(self, specs):
        self.specs = specs

    def __len__(self):
        return len(self.specs)

    def __getitem__(self, index):
        if not 0 <= index < len(self.specs):
            raise IndexError(index)
        return build(self.specs[index], X[index % 8])


def stored(path):
    folder = f"{path}/function"
    return torchcache(forward, shared_args=("spec",), persistent=True, persistent_cache_dir=folder)


def is_kept(spec, column):
    return None if isinstance(spec, tuple) else KINDS[spec][column]


def check_found(path):
    """What another process finds in a folder is what is computed here."""
    expected = [forward(X, spec) for spec in SPECS]  # numpy sets itself up first
    function = stored(path)
    stats = function.cache_instance.stats
    for spec, plain in zip(SPECS, expected, strict=True):
        before = stats().hits
        assert_same(plain, function(X, spec), spec)
        assert is_kept(spec, 1) in (None, stats().hits == before + 8), spec
    dataset = Made(SPECS)
    with contextlib.closing(CachedDataset(None, f"{path}/dataset", partial=True)) as served:
        absent = served.missing().tolist()
        assert [i for i, spec in enumerate(SPECS) if is_kept(spec, 2) is False] == [
            i for i in absent if is_kept(SPECS[i], 2) is not None
        ]
        for index, spec in enumerate(SPECS):
            if index not in absent:
                assert_same(dataset[index], served[index], spec)


def fill(path):
    expected = [forward(X, spec) for spec in SPECS]
    function = stored(path)
    for spec, plain in zip(SPECS, expected, strict=True):
        assert_same(plain, function(X, spec), spec)
    function.cache_instance.close()
    dataset = Made(SPECS)
    with contextlib.closing(CachedDataset(dataset, f"{path}/dataset")) as cached:
        for _ in range(2):
            for index, spec in enumerate(SPECS):
                assert_same(dataset[index], cached[index], spec)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_kind_is_found_as_it_was_in_another_process(tmp_path):
    fill(tmp_path)
    warm.run(CHILD, str(tmp_path), imports=("transformers.utils",))


@pytest.mark.slow
@hypothesis.settings(
    max_examples=150 if SOAK else 15, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(
    spec=st.sampled_from(list(KINDS)) | st.lists(st.sampled_from(list(AROUND)), max_size=4).map(tuple),
    batches=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=8), min_size=1, max_size=4),
)
def test_any_value_is_the_plain_one_or_not_kept(spec, batches):
    try:
        build(spec, X)
    except Exception:  # some kinds are made of tensors only
        hypothesis.reject()
    function = torchcache(forward, shared_args=("spec",))
    for batch in batches + batches[:1]:
        assert_same(forward(X[batch], spec), function(X[batch], spec))
    dataset = Made([spec])
    with contextlib.closing(CachedDataset(dataset)) as cached, contextlib.suppress(OutputError):
        for _ in range(3):
            assert_same(dataset[0], cached[0])


@pytest.mark.skipif(not hasattr(torch.nn, "Buffer"), reason="came with torch 2.5")
def test_what_torch_notes_on_a_buffer_is_no_obstacle():
    function = torchcache(lambda x: torch.nn.Buffer(x * 2))
    for _ in range(2):
        assert torch.equal(function(X), X * 2)
    assert function.cache_instance.stats().hits == 8


def test_a_node_that_computes_with_other_rows_only_is_computed_again():
    def largest(x):
        return Largest([x / x.max()], [])

    function = torchcache(largest, probe=False)
    assert_same(largest(X[:4]), function(X[:4]))
    assert_same(Largest([X[:2] / X[:4].max()], []), function(X[:2]))


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec != "parameter"], ids=str)
def test_arguments_of_every_kind_are_as_the_caller_made_them(spec):
    given = Notes()
    name = given.name

    def plain(x, value):
        note(name, x, value)
        return x + 1

    function = torchcache(plain, probe=False)
    for batch in ([0, 1, 2], [2, 3, 0, 1, 4]):
        assert torch.equal(function(X[batch], build(spec, X[batch])), X[batch] + 1)
        x, value = given.notes[-1]
        assert_same(build(spec, x), value, spec)
