"""Outputs that are no tensors: arrays, lists with an entry per item, objects. Each as it was, or not kept."""

import collections
import itertools
import os

import hypothesis
import hypothesis.strategies as st
import numpy as np
import PIL.Image
import pytest
import torch

from tests.helpers import warm
from tests.helpers.kinds import Frozen, Mapped, Plain, Point, Registered
from tests.helpers.outputs import Notes, assert_same, bypasses, hits, misses, note, warnings_in
from torchcache2 import CachedDataset, OptionError, register_value, torchcache

SOAK = bool(os.environ.get("SOAK"))
ITEMS = torch.arange(48.0).reshape(12, 4)
SHORT = {"max_examples": 200 if SOAK else 25, "deadline": None}
pytestmark = pytest.mark.cpu_only  # most arrays are made of their tensors

# What an item has, by its number: the same for a sample of a dataset and for an entry of a list.
ENTRIES = {
    "ragged": lambda i: torch.arange(i % 4 * 2.0).reshape(-1, 2) + i,
    "tensor": lambda i: torch.full((2, 3), i, dtype=torch.bfloat16),
    "transposed": lambda i: (torch.arange(6).reshape(2, 3) + i).T,
    "number": lambda i: i * 0.5,
    "large": lambda i: 2**70 + i,
    "numbers": lambda i: [i] * (i % 3),
    "many": lambda i: [{"a": [i]}] * (20 + i % 2),
    "text": lambda i: "é" * (i % 3),
    "bytes": lambda i: bytes([i]),
    "none": lambda i: None if i % 2 else True,
    "array": lambda i: np.arange(i % 4, dtype=">i2") + i,
    "columns": lambda i: np.asfortranarray(np.full((2, 3), i)),
    "scalar": lambda i: np.float32(i),
    "image": lambda i: PIL.Image.new("RGB", (i % 3 + 1, 2), (i, 0, 0)),
    "dataclass": lambda i: Plain(torch.tensor([i]), i),
    "frozen": lambda i: Frozen(i),
    "named tuple": lambda i: Point(torch.arange(i % 2), "a"),
    "mapping": lambda i: Mapped(a=np.arange(i % 2), b=i),
    "registered": lambda i: Registered(torch.arange(i % 2), 3),
}
WHOLE = {  # what belongs to the whole batch
    "rows": lambda x: x * 2,
    "wide": lambda x: (x > 7)[:, :, None],
    "array": lambda x: x.numpy() * 3,
    "swapped": lambda x: x.numpy().astype(">f8"),
    "doubles": lambda x: np.asfortranarray(x.double().numpy()),
    "read only": lambda x: np.broadcast_to(np.float32(5), (len(x), 2)),
    "dataclass": lambda x: Plain(x, [x.numpy() + 1, "a"]),
    "registered": lambda x: Registered(x, 2),
    "mapping": lambda x: Mapped(a=x, b=x.long().numpy()),
    "pair": lambda x: (3, 4),
    "layers": lambda x: [x, x + 1],
    "none": lambda x: None,
}


def around(inner):
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    )


ENTRY_SPECS = st.recursive(st.sampled_from(list(ENTRIES)), around, max_leaves=4)
OUTPUT_SPECS = st.recursive(
    st.sampled_from(list(WHOLE)).map(lambda name: ("whole", name))
    | st.builds(lambda spec, kind: ("each", spec, kind), ENTRY_SPECS, st.sampled_from(["list", "tuple"])),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3),
    max_leaves=4,
)


def entry(spec, i):
    if isinstance(spec, str):
        return ENTRIES[spec](i)
    if isinstance(spec, dict):
        return {key: entry(inner, i) for key, inner in spec.items()}
    return type(spec)(entry(inner, i) for inner in spec)


def built(spec, x):
    if isinstance(spec, dict):
        return {key: built(inner, x) for key, inner in spec.items()}
    if spec[0] == "whole":
        return WHOLE[spec[1]](x)
    entries = [entry(spec[1], int(item[0]) // 4) for item in x]
    return entries if spec[2] == "list" else tuple(entries)


def spoil(value):
    """Do to a value whatever its owner may do."""
    if isinstance(value, torch.Tensor):
        value.fill_(1)
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value.fill(1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            spoil(inner)
    elif isinstance(value, (dict, collections.UserDict)):
        for inner in value.values():
            spoil(inner)
    elif hasattr(value, "__dict__"):
        spoil(vars(value))
    if isinstance(value, (list, dict, collections.UserDict)):
        value.clear()


@hypothesis.settings(**SHORT)
@hypothesis.given(
    spec=OUTPUT_SPECS,
    batches=st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=8), min_size=1, max_size=4),
    probe=st.booleans(),
)
def test_any_output_is_that_of_the_plain_function(spec, batches, probe):
    def forward(x):
        return built(spec, x)

    function = torchcache(forward, probe=probe)
    for batch in batches * 2:
        found = function(ITEMS[batch])
        assert_same(forward(ITEMS[batch]), found)
        spoil(found)
    assert bypasses(function) == {}
    assert hits(function) >= sum(map(len, batches))


# A list with an entry for each item, or one that always has so many


def alike(x):
    """Each list may be either of the two, for some batches of 1, 2 or 3 items."""
    numbers = [int(item[0]) // 4 for item in x]
    return {
        "layers of 1": [x + 1],
        "layers of 2": (x + 1, x.numpy()),
        "layers of 3": [{"a": x}, x, x],
        "pair": (7, 8),
        "texts of 3": ["a", "b", "c"],
        "nested": [["a"], [1, 2]],
        "each": [torch.full((i % 3 + 1, 2), float(i)) for i in numbers],
        "each text": [str(i) for i in numbers],
        "each pair": [(i, i + 1) for i in numbers],
        "each layers": [[torch.full((len("ab"),), i)] * 2 for i in numbers],
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("sizes", list(itertools.permutations([1, 2, 3])), ids=str)
def test_the_size_of_a_batch_is_no_structure(sizes, probe):
    function = torchcache(alike, probe=probe)
    for first in (0, 2, 0, 1):
        for size in (*sizes, 4):
            x = ITEMS[first : first + size]
            assert_same(alike(x), function(x))
    assert bypasses(function) == {} and hits(function) > 20


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_output_that_is_a_list_of_tensors_is_settled_by_another_size(size):
    for forward in (
        lambda x: [x * 2, x * 3],
        lambda x: [item.reshape(-1, 2) for item in x],  # as many rows an item as there are layers
    ):
        function = torchcache(forward)
        for n in (size, 1, 2, 3, 4):
            assert_same(forward(ITEMS[:n]), function(ITEMS[:n]))
            assert_same(forward(ITEMS[1 : n + 1]), function(ITEMS[1 : n + 1]))
        assert hits(function) > 8 and bypasses(function) == {}


def test_a_list_that_is_as_long_as_one_batch_is_asked_about_once():
    sizes = Notes()
    name = sizes.name

    def forward(x):
        note(name, len(x))
        return x * 2, x * 3

    function = torchcache(forward, probe=False)
    for n in (2, 2, 1, 3):
        function(ITEMS[:n] + n)
    assert sizes.notes == [2, 1, 1, 3]


def two_only(x):
    if len(x) != 2:
        raise ValueError("two, please")
    return x, ["a", "b"]


NOT_KEPT = {  # a function, batches, how many items are passed through, and what is said of that
    "a list of which nothing else is known": (two_only, [[0, 1]] * 2, 4, "has 2 entries, as the batch"),
    "a list of another length": (
        lambda x: [item for item in x if item[0] != 20],
        [[0, 1, 2], [4, 5, 6]],
        3,
        "output is a list that has 2 entries for a batch of 3",
    ),
    "an entry of no known type": (
        lambda x: {"e": [{"s": {1, 2}} for _ in x]},
        [[0, 1, 2]] * 2,
        6,
        "output['e'][0]['s'] is a builtins.set",
    ),
    "texts as wide as the longest": (
        lambda x: np.array(["é" * (int(item[0]) // 4 % 3) for item in x]),
        [[0, 1, 2], [0, 3], [2, 0], [0, 1, 2]],
        10,
        "output is an array of <U2, as wide as the longest text, which cannot be cached: return a list",
    ),
}


@pytest.mark.parametrize("name", NOT_KEPT)
def test_what_is_not_kept_is_named(name, log):
    forward, batches, passed, words = NOT_KEPT[name]
    function = torchcache(forward, probe=name.startswith("texts"))
    for batch in batches:
        assert_same(forward(ITEMS[batch]), function(ITEMS[batch]))
    assert bypasses(function) == {"output": passed}
    (message,) = warnings_in(log)
    assert words in message and ("return list(output" in message or "entry" not in name)


def test_entries_that_depend_on_the_batch_are_noticed(log):
    def forward(x):
        return [item / x.max() for item in x]

    function = torchcache(forward)
    for batch in (slice(0, 4), slice(2, 7), slice(0, 4)):
        assert_same(forward(ITEMS[batch]), function(ITEMS[batch]))
    assert set(bypasses(function)) == {"batch"} and hits(function) == 0
    (message,) = warnings_in(log)
    assert ".entries of item" in message


# What people return


def speech(x):
    """Features of as many frames as each item has, as wav2vec's; tokens, and their text."""
    lengths = [int(item[0]) % 7 for item in x]
    return (
        [torch.outer(torch.arange(float(n)), item) for n, item in zip(lengths, x, strict=True)],
        [{"tokens": list(range(n)), "text": "a" * n} for n in lengths],
    )


def detections(x):
    """What torchvision's detectors return: dicts with 0 to 3 boxes each."""
    counts = [int(item[0]) // 4 % 4 for item in x]
    return [
        {
            "boxes": item[:n, None].expand(n, 4).contiguous(),
            "labels": torch.arange(n),
            "scores": torch.linspace(0, 1, n),
        }
        for n, item in zip(counts, x, strict=True)
    ]


def embedded(x):
    return x.numpy() / 3


FORWARDS = {"speech": speech, "detections": detections, "embedded": embedded}
BATCHES = [[0, 1, 2, 3], [2, 3, 4, 5, 6], [11, 0, 11], [7], list(range(12))]


def kept(name, folder, **options):
    return torchcache(FORWARDS[name], persistent=True, persistent_cache_dir=folder, **options)


def check_found(folder):
    for name, forward in FORWARDS.items():
        function = kept(name, f"{folder}/{name}")
        for batch in BATCHES:
            assert_same(forward(ITEMS[batch]), function(ITEMS[batch]))
        stats = function.cache_instance.stats()
        assert (stats.misses, stats.bypasses, stats.corrupt) == (0, {}, 0), name


@pytest.mark.slow
def test_another_process_finds_them(tmp_path):
    for name in FORWARDS:
        function = kept(name, f"{tmp_path}/{name}")
        for batch in BATCHES:
            assert_same(FORWARDS[name](ITEMS[batch]), function(ITEMS[batch]))
        assert misses(function) == 12 and bypasses(function) == {}
        function.cache_instance.close()
    script = "import sys\nfrom tests.decorator.test_outputs import check_found\ncheck_found(sys.argv[1])"
    warm.run(script, str(tmp_path), imports=("transformers.utils",))


def test_cache_dtype_rounds_entries_and_arrays_but_no_python_numbers():
    def forward(x):
        return {"a": x.numpy() / 3, "e": [(item[:2] / 3, float(item[0]) / 3, [0.1]) for item in x]}

    def rounded(x):
        plain = forward(x)
        half = [(a.half().float(), b, c) for a, b, c in plain["e"]]
        return {"a": plain["a"].astype(np.float16).astype(np.float32), "e": half}

    function = torchcache(forward, cache_dtype=torch.float16)
    for batch in ([0, 1, 2], [1, 2, 3, 4], [0, 4]):
        assert_same(rounded(ITEMS[batch]), function(ITEMS[batch]))
    plain = torchcache(forward)
    assert_same(forward(ITEMS[:5]), plain(ITEMS[:5]))
    assert hits(function) == 4
    assert function.cache_instance.stats().memory_bytes < plain.cache_instance.stats().memory_bytes


def test_an_output_that_contains_itself_is_not_kept(log):
    def forward(x):
        parent = Plain(x)
        parent.y = Plain(x, parent)
        return parent

    function = torchcache(forward)
    for _ in range(2):
        found = function(ITEMS)
        assert found.y.y is found and torch.equal(found.x, ITEMS * 2)
    assert bypasses(function) == {"output": 24}
    (message,) = warnings_in(log)
    assert "contains itself" in message


# Objects


class Late:
    """Known to this process only."""

    def __init__(self, x):
        self.x = x


def lately(x):
    return {"late": Late(x * 2), "y": x}


def lately_each(x):
    return [Late(item) for item in x]


def check_unknown(folder):
    for forward in (lately, lately_each):
        function = torchcache(forward, persistent=True, persistent_cache_dir=folder)
        for _ in range(2):
            assert_same(forward(ITEMS), function(ITEMS))
        stats = function.cache_instance.stats()
        assert (stats.hits, stats.corrupt) == (0, 0) and stats.bypasses == {"output": 24}


def test_a_class_that_is_not_registered_in_another_process_is_a_miss(tmp_path):
    register_value(Late, lambda late: late.x, Late)
    try:
        for forward in (lately, lately_each):
            function = torchcache(forward, persistent=True, persistent_cache_dir=str(tmp_path))
            for _ in range(2):
                assert_same(forward(ITEMS), function(ITEMS))
            assert hits(function) == 12
            function.cache_instance.close()
    finally:
        del Late._torchcache_value
    script = "import sys\nfrom tests.decorator.test_outputs import check_unknown\ncheck_unknown(sys.argv[1])"
    warm.run(script, str(tmp_path), imports=("transformers.utils",))


class Marked(torch.Tensor):
    """A subclass that holds nothing besides its data."""


def test_a_registered_kind_of_tensor_is_kept():
    register_value(Marked, lambda marked: marked.as_subclass(torch.Tensor), lambda x: x.as_subclass(Marked))
    try:
        function = torchcache(lambda x: [(x * 2).as_subclass(Marked), x])
        data = CachedDataset([ITEMS[0].as_subclass(Marked)], memory_size="1MB")
        for _ in range(2):
            found = function(ITEMS)[0], data[0]
            assert [type(one) for one in found] == [Marked] * 2
            assert_same([one.as_subclass(torch.Tensor) for one in found], [ITEMS * 2, ITEMS[0]])
        assert hits(function) == 12 and data.stats().hits == 1
    finally:
        del Marked._torchcache_value


def test_what_cannot_be_registered():
    for arguments, words in (
        ((Late(1), id, id), "expected a class"),
        ((Late, id, None), "one that rebuilds"),
        ((Point, id, id), "node type of pytrees already"),
        ((frozenset, list, frozenset), "takes no attributes"),
    ):
        with pytest.raises(OptionError, match=words):
            register_value(*arguments)


def test_a_class_that_is_rebuilt_as_another_is_not_kept(log):
    class Turned:
        def __init__(self, x):
            self.x = x

    register_value(Turned, lambda value: value.x, lambda x: Plain(x))
    function = torchcache(lambda x: Turned(x))
    for _ in range(2):
        assert torch.equal(function(ITEMS).x, ITEMS)
    assert set(bypasses(function)) == {"output"}
    (message,) = warnings_in(log)
    assert "cannot be taken apart and rebuilt" in message
