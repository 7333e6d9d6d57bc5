"""Arguments with one entry per item: every kind of entry and each way to pass them, against the plain one."""

import collections
import copy
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from transformers import BatchEncoding

from tests.helpers import warm
from tests.helpers.outputs import warnings_in
from torchcache2 import torchcache

X = torch.arange(24.0).reshape(6, 4)
TEXTS = ["a", "bb", "ccc", "dd", "e", "ffffff"]
ORDERS = ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 2], [3, 0, 4], [2, 2, 1], [0, 1, 2, 3, 4, 5])


def chosen(values, order):
    return [values[place] for place in order]


def numbers(entries):
    """What tells entries apart; one number for each."""
    return torch.tensor([float(sum(map(ord, repr(entry)))) for entry in entries])


def stats(function):
    return function.cache_instance.stats()


def assert_like_plain(plain, calls, **options):
    """Calls through a cache equal those of the plain function, exceptions too; the cached function."""
    function = torchcache(**options)(plain)
    for args, kwargs in calls:
        (expected, error), (output, raised) = (
            outcome(f, *copy.deepcopy(args), **copy.deepcopy(kwargs)) for f in (plain, function)
        )
        assert type(raised) is type(error)
        assert error is not None or torch.equal(output, expected)
    return function


def outcome(function, *args, **kwargs):
    try:
        return function(*args, **kwargs), None
    except Exception as error:
        return None, error


# Entries of every kind.


def picture(mode, colour, size=(4, 4), **info):
    image = Image.new(mode, size, colour)
    image.info.update(info)
    return image


def palette(*colour, **info):
    image = picture("P", 1, **info)
    image.putpalette([0] * len(colour) + list(colour) * 255, "RGBA" if len(colour) == 4 else "RGB")
    return image


def encoded(kind, number):
    """An image that is read from its file when it is needed."""
    file = io.BytesIO()
    sizes = {"sizes": [(8, 8)]} if kind == "ICO" else {}  # else a file of Pillow 12 has no image so small
    Image.fromarray((np.arange(64).reshape(8, 8) + number).astype("u1")).save(file, kind, **sizes)
    file.seek(0)
    return Image.open(file)


def pixels(e):
    shrunk = [np.asarray(image.convert("RGBA").resize((2, 2))) for image in e]
    return torch.tensor([array.astype("f4").ravel().tolist() for array in shrunk])


def from_array(e):
    return torch.tensor([[float(sum(map(ord, repr(v)))), e.dtype.itemsize] for v in e.tolist()])


IMAGES = [
    *(picture("RGB", (1, 2, 3)), picture("L", 5), picture("L", 5, (2, 8)), picture("1", 1)),
    *(picture("RGBA", (1, 2, 3, 4)), picture("LA", (5, 6)), picture("CMYK", (5, 6, 7, 8))),
    palette(9, 9, 9, 3),
    *(palette(9, 9, 9, 200), palette(9, 9, 9, transparency=0), palette(9, 9, 9, transparency=1)),
]
NESTED = [{"a": [1, {"b": None}]}, {"a": [1, {"b": 0}]}, ("a", ("b",)), {1, 2}, frozenset([3]), [[]], []]
ENTRIES = {
    "texts": (numbers, ["a", "", "\ud800", "é", "a" * 100, "\0", "A"]),
    "mixed": (numbers, [None, 1, 1.0, True, "1", b"1", (1,), [1], float("nan"), -0.0, 0.0, 1j, 2**70]),
    "nested": (numbers, NESTED),
    "a tuple": (numbers, tuple(TEXTS)),
    "images": (pixels, IMAGES),
    "deep images": (
        lambda e: torch.tensor([float(np.asarray(image).astype("f8").sum()) for image in e]),
        [picture("I;16", 500), picture("I", 70_000), picture("F", 1.5), picture("I;16", 501)],
    ),
    "arrays of several shapes": (
        lambda e: torch.tensor([float(array.sum()) + array.size for array in e]),
        [np.arange(3), np.arange(3.0), np.zeros((2, 2)), np.zeros(4), np.float32(3)],
    ),
    "tensors of several lengths": (
        lambda e: torch.tensor([float(tensor.sum()) + len(tensor) for tensor in e]),
        [torch.arange(length) for length in (1, 3, 2, 0)],
    ),
    "an array of items": (lambda e: torch.from_numpy(e * 2), np.arange(24.0).reshape(4, 3, 2)),
    "a strided array": (
        lambda e: torch.from_numpy(e * 2),
        np.arange(24.0).reshape(4, 3, 2)[:, ::-1].transpose(0, 2, 1),
    ),
    "records": (
        lambda e: torch.tensor([[float(row["a"]), float(row["b"])] for row in e]),
        np.array([(1, 2.0), (3, 4.0), (5, 6.0)], dtype=[("a", "i4"), ("b", "f4")]),
    ),
}
DTYPES = ("f4", "f2", "i1", "u2", "bool", "c8", ">i4", "datetime64[s]", "timedelta64[D]", "U3", "S3", "O")
ENTRIES |= {dtype: (from_array, np.array([1, 0]).astype(dtype)) for dtype in DTYPES}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("options", [{}, {"miss_batch": "pad", "probe": False}, {"verify": 1.0}], ids=str)
@pytest.mark.one_in(3)
def test_entries_of_every_kind_are_items(name, options):
    forward, entries = ENTRIES[name]

    def plain(e):
        return forward(e)

    function, count = torchcache(item_args=("e",), **options)(plain), len(entries)
    orders = ([0, 1], [1, 0], range(count), range(count)[::-1], [count - 1], [0, 0, count - 1, 0], [])
    for order in orders:
        if isinstance(entries, np.ndarray):
            part = entries[np.array(order, dtype=int)]
        else:
            part = type(entries)(chosen(entries, order))
        output, expected = function(part), plain(part)
        assert output.dtype == expected.dtype and torch.equal(output, expected)
    assert (stats(function).misses, stats(function).bypasses) == (count, {})


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "TIFF", "BMP", "ICO", "WEBP"])
def test_images_of_files_that_nobody_has_read_yet(kind):
    def plain(e):
        return pixels(e)

    function = torchcache(item_args=("e",))(plain)
    for order in ([0, 1, 2], [2, 0, 1, 1]):
        output, expected = (f([encoded(kind, number) for number in order]) for f in (function, plain))
        assert torch.equal(output, expected)
    assert (stats(function).misses, stats(function).bypasses) == (3, {})


def test_images_with_several_frames_are_passed_through():
    def frames(last):
        file = io.BytesIO()
        first, *others = (Image.new("L", (2, 2), value) for value in (1, 2, last))
        first.save(file, "TIFF", save_all=True, append_images=others)
        return Image.open(file)

    def plain(e):
        sums = []
        for image in e:
            image.seek(2)
            sums.append(float(np.asarray(image).sum()))
            image.seek(0)
        return torch.tensor(sums)

    function = torchcache(item_args=("e",))(plain)
    for last in (3, 4):
        assert torch.equal(function([frames(last)]), plain([frames(last)]))
    assert stats(function).bypasses == {"argument": 2}


# Values that look alike are items of their own.

ALIKE = {
    "fields of records": [np.ones(1, [(name, "f4"), (other, "f4")]) for name, other in ("ab", "ba")],
    "types of records": [np.ones(1, [("a", kind)]) for kind in ("f4", "f8")],
    "sizes of texts": [np.array(["a", "b"], kind) for kind in ("U1", "U5")],
    "units of time": [np.array([1, 2], f"timedelta64[{unit}]") for unit in ("s", "m")],
    "lists and tuples": [["a", "b"], ("a", "b")],
    "palettes": [[palette(9, 9, 9, 3)], [palette(9, 9, 9, 4)]],
    "what a file says": [[picture("P", 1, transparency=place)] for place in (0, 1)],
    "memory formats": [
        [torch.ones(1, 3, 2, 2).to(memory_format=kind)]
        for kind in (torch.contiguous_format, torch.channels_last)
    ],
}


@pytest.mark.parametrize("name", ALIKE)
def test_values_that_look_alike_are_not_the_same(name):
    values = ALIKE[name]
    function = torchcache(item_args=("e",), probe=False)(lambda e: torch.zeros(len(e)))
    for value in values:
        function(value)
    assert stats(function).misses == sum(map(len, values))


AS_ENTRIES = {
    "paths": list,
    "texts": lambda paths: [*map(str, paths)],
    "array": lambda paths: np.array([*map(str, paths)]),
    "table": lambda paths: pd.Series([*map(str, paths)]),
    "dicts": lambda paths: [{"image": path, "caption": "a cat."} for path in paths],
}


@pytest.mark.parametrize("kind", AS_ENTRIES)
def test_an_entry_that_names_a_file_counts_by_its_content(kind, tmp_path):
    paths, copies = ([tmp_path / place / f"{n}.txt" for n in range(3)] for place in ("first", "other"))
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        path.write_text(f"text {number}")
    shutil.copytree(tmp_path / "first", tmp_path / "other")

    @torchcache(item_args="entries")
    def lengths(entries):
        names = [one["image"] if isinstance(one, dict) else one for one in entries]
        return torch.tensor([Path(name).stat().st_size for name in names])

    for names in (paths, paths, copies):
        assert lengths(AS_ENTRIES[kind](names)).tolist() == [6, 6, 6]
    assert stats(lengths).misses == 3
    paths[1].write_text("some more text")
    assert lengths(AS_ENTRIES[kind](paths)).tolist() == [6, 14, 6]
    assert stats(lengths).misses == 4


def test_what_a_text_says_besides_a_files_content_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ["a/__init__.py", "bb/__init__.py", "a/one.npy", "a/one.csv"]  # empty files say nothing
    for text in texts:
        Path(text).parent.mkdir(exist_ok=True)
        Path(text).write_text("" if text.endswith("py") and "npy" not in text else "same")
    lengths = torchcache(item_args="texts")(lambda texts: torch.tensor([len(text) for text in texts]))
    assert lengths(texts).tolist() == [*map(len, texts)] and stats(lengths).misses == 4


def test_a_file_that_all_items_share_counts_by_its_content(tmp_path):
    path = tmp_path / "scales.safetensors"
    path.write_text("2")

    @torchcache
    def scaled(x, scales=str(path)):
        return x * float(Path(scales).read_text())

    assert torch.equal(scaled(X), X * 2) and torch.equal(scaled(X, path), X * 2)
    path.write_text("3")  # the size stays
    assert torch.equal(scaled(X), X * 3) and torch.equal(scaled(X, path), X * 3)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        scaled(X)


@pytest.mark.parametrize("as_path", [str, Path, os.fsencode], ids=["text", "path", "bytes"])
def test_a_path_counts_with_what_is_there(as_path, tmp_path, monkeypatch):
    @torchcache
    def scaled(x, folder):
        return x * sum(float(path.read_text()) for path in Path(os.fsdecode(folder)).rglob("*.txt"))

    state = tmp_path.stat()
    for number, place in enumerate(("a", "b")):
        (tmp_path / place / "data/inner").mkdir(parents=True)
        (path := tmp_path / place / "data/inner/one.txt").write_text(f"{number + 2}")
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # both have one size and time
    for place, factor in (("a", 2), ("b", 3), ("a", 2)):
        monkeypatch.chdir(tmp_path / place)
        for folder in ("./data", tmp_path / place / "data"):
            assert torch.equal(scaled(X, as_path(folder)), X * factor)
    assert stats(scaled).hits == 2 * len(X)
    (tmp_path / "a/data/inner/one.txt").write_text("15")
    (tmp_path / "a/data/two.txt").write_text("5")
    assert torch.equal(scaled(X, as_path("./data")), X * 20)
    for number in range(1000):
        (tmp_path / f"a/data/{number}").touch()
    assert torch.equal(scaled(X, as_path("./data")), X * 20)
    assert stats(scaled).bypasses == {"argument": len(X)}


def test_texts_that_name_nothing_are_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.d").mkdir()
    texts = ["", ".", "/", "and/or", "a.b", "folder.d", "a dog.", "Mr. Smith", "x" * 9000 + ".py", "a\0.py"]
    texts += ["\ud800.py"]

    @torchcache(item_args="texts")
    def lengths(texts):
        return torch.tensor([[len(text)] for text in texts])

    for _ in range(2):
        assert lengths(texts).flatten().tolist() == [*map(len, texts)]
    assert stats(lengths).misses == len(texts)


def test_shared_tensors_count_with_their_memory_format():
    def plain(e, weight):
        return nn.functional.conv2d(torch.ones(len(e), 3, 4, 4), weight)

    function = torchcache(item_args=("e",), shared_args=("weight",))(plain)
    weight = torch.rand(2, 3, 2, 2)
    for form in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        given = weight.to(memory_format=form)
        assert function(["a", "b"], given).stride() == plain(["a", "b"], given).stride()


class Prompts(list):
    language = "en"


SUBCLASSES = {
    "a list with attributes": lambda texts: Prompts(texts),
    "a deque": collections.deque,
    "a set": lambda texts: dict.fromkeys(texts).keys(),
    "an iterator": iter,
    "a dict": lambda texts: dict.fromkeys(texts, 1),
    "a masked array": lambda texts: np.ma.masked_array(range(len(texts)), mask=[True] + [False] * 2),
    "an array without dimensions": lambda texts: np.array("a"),
}


@pytest.mark.parametrize("name", SUBCLASSES)
def test_what_is_no_plain_sequence_is_passed_through(name, log):
    make, seen = SUBCLASSES[name], []

    def forward(prompts):
        seen.append(type(prompts))
        return torch.tensor(
            [len(str(part)) for part in np.atleast_1d(prompts)]
            if name.startswith("an arr")
            else [len(str(part)) for part in prompts]
        )

    function = torchcache(item_args=("prompts",))(forward)
    for _ in range(2):
        value = make(TEXTS[:3])
        kind = type(value)
        output = function(value)
        assert torch.equal(output, forward(make(TEXTS[:3])))
        assert seen[-2] is kind
    assert list(stats(function).bypasses) == ["argument"]
    (message,) = warnings_in(log)
    assert "item_args expects a list, tuple, array or column with one entry per item" in message


# Ways to pass them.


def both(x, y):
    return x * numbers(y)[:, None]


WAYS = {
    "by name": (lambda y, x: both(x, y), lambda o: ((), {"x": X[o], "y": chosen(TEXTS, o)}), "y"),
    "by position": (lambda y, x: both(x, y), lambda o: ((chosen(TEXTS, o), X[o]), {}), "y"),
    "among others": (lambda **kw: both(**kw), lambda o: ((), {"x": X[o], "y": chosen(TEXTS, o)}), "y"),
    "alone": (lambda **kw: numbers(kw["y"]), lambda o: ((), {"y": chosen(TEXTS, o)}), "y"),
    "two": (
        lambda y, z: numbers(y) - 2 * numbers(z),
        lambda o: ((chosen(TEXTS, o), chosen(TEXTS[::-1], o)), {}),
        "yz",
    ),
    "none": (
        lambda y, z=None: numbers(y) - (numbers(z) if z else 0),
        lambda o: ((chosen(TEXTS, o),), {"z": None}),
        "yz",
    ),
    "with a whole-batch tensor": (
        lambda y, m: numbers(y)[:, None] * m,
        lambda o: ((chosen(TEXTS, o), torch.ones(3)), {}),
        "y",
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_however_entries_are_passed_items_are_computed_once(name):
    plain, call, names = WAYS[name]
    shared = ("m",) if "tensor" in name else ()
    function = assert_like_plain(plain, map(call, ORDERS), item_args=tuple(names), shared_args=shared)
    assert (stats(function).misses, stats(function).bypasses) == (6, {})


UNNAMED = {
    "a list": (both, lambda o: ((X[o], chosen(TEXTS, o)), {})),
    "an array": (both, lambda o: ((X[o], np.array(TEXTS)[o]), {})),
    "among others": (lambda x, **kw: both(x, kw["y"]), lambda o: ((X[o],), {"y": chosen(TEXTS, o)})),
    "in a dict": (lambda b: both(**b), lambda o: (({"x": X[o], "y": chosen(TEXTS, o)},), {})),
    "in a mapping": (
        lambda b: both(**b),
        lambda o: ((collections.UserDict(x=X[o], y=chosen(TEXTS, o)),), {}),
    ),
    "in a tuple": (lambda b: both(*b), lambda o: (((X[o], chosen(TEXTS, o)),), {})),
    "not read": (lambda b: b["x"] * 2, lambda o: (({"x": X[o], "y": chosen(TEXTS, o)},), {})),
}


@pytest.mark.parametrize("name", UNNAMED)
@pytest.mark.parametrize("probe", [True, False])
def test_lists_as_long_as_the_batch_that_nobody_has_named(name, probe):
    plain, call = UNNAMED[name]
    function = assert_like_plain(plain, map(call, ORDERS), probe=probe)
    assert stats(function).bypasses == {}
    assert stats(function).hits >= 6  # the last call is the first one again


def test_defaults_as_long_as_the_batch_belong_to_the_call():
    def plain(x, mean=(0.5, 0.5, 0.5), std=[1.0, 2.0, 3.0], functions=(torch.relu, torch.sigmoid)):  # noqa: B006
        return functions[1]((x[:, :3] - torch.tensor(mean)) / torch.tensor(std))

    calls = [((X[order],), {}) for order in ([0, 1, 2], [2, 1, 0], [0, 1], [3, 4, 5], [0, 1, 2])]
    function = assert_like_plain(plain, calls)
    assert stats(function).bypasses == {} and stats(function).hits >= 3


def test_calls_that_raise_without_the_cache_raise_the_same_with_it():
    def plain(y, z=("a",)):
        return numbers(y) + numbers(z)

    calls = [(("abc",), {}), ((None,), {}), ((["a"], ["b", "c"]), {}), ((["a", "b", "c"], ["b", "c"]), {})]
    function = assert_like_plain(plain, calls * 2, item_args=("y", "z"))
    assert stats(function).misses == 1  # one text is one item


def test_one_path_is_one_item_and_of_anything_else_a_list_is_asked_for(tmp_path, log):
    (tmp_path / "a.txt").write_text("a")
    function = torchcache(item_args="path")(lambda path: torch.tensor([len(str(path))]))
    for path in (tmp_path / "a.txt", tmp_path / "a.txt", 5):
        assert function(path).shape == (1,)
    assert (stats(function).misses, stats(function).bypasses) == (1, {"argument": 1})
    assert warnings_in(log)[0].endswith("with one entry per item. Pass a list of one to have one item")


def test_containers_that_hold_themselves_or_too_many_others_are_passed_through():
    inside, deep = [], []
    inside.append(inside)
    for _ in range(3000):
        deep = [deep]
    function = torchcache(item_args=("e",))(lambda e, x=None: torch.ones(len(e)))
    for value in (inside, deep):
        assert torch.equal(function([value, 1]), torch.ones(2))
        assert torch.equal(function(["a", "b"], value), torch.ones(2))
    assert list(stats(function).bypasses) == ["argument"]


def test_what_a_probe_learns_of_texts_holds_for_other_texts(capsys):
    def plain(**batch):
        print(len(batch["y"]))  # a list of sizes would be its state
        return numbers(batch["y"])

    function = torchcache(item_args=("y",))(plain)
    for number in range(4):
        function(y=[f"{number} {letter}" for letter in "abcd"])
    sizes = capsys.readouterr().out.split()
    assert sizes[:3] == ["4", "1", "1"] and sizes.count("4") == 4 and sizes.count("1") <= 6


def tokenized(texts):
    ids = torch.tensor([[ord(text[0]), len(text)] for text in texts])
    return BatchEncoding({"input_ids": ids, "texts": list(texts)})


def test_a_tokenizers_output_is_a_batch():
    def plain(batch):
        return batch["input_ids"] * numbers(batch.texts)[:, None]

    calls = [((tokenized(chosen(TEXTS, order)),), {}) for order in ORDERS]
    function = assert_like_plain(plain, calls)
    assert stats(function).bypasses == {} and stats(function).hits >= 6


# What the forward does to its arguments.


def test_a_list_that_the_forward_changes_is_changed_as_without_a_cache():
    def plain(y):
        if "ccc" in y:
            y[y.index("ccc")] = "zz"
        return numbers(y)

    function = torchcache(item_args=("y",))(plain)
    for order in ([0, 1], [1, 4], [0, 3, 5, 2], [2, 3], [0, 1, 2]):
        given, expected = chosen(TEXTS, order), chosen(TEXTS, order)
        assert torch.equal(function(given), plain(expected))
        assert given == expected
    assert stats(function).hits > 0 and stats(function).bypasses == {"input": 9}


def test_an_entry_that_the_forward_changes_is_changed_once():
    def plain(y):
        return torch.tensor([float(e.pop("n") if "once" in e else e["n"]) for e in y])

    def entries(order):
        return [{"n": place} | ({"once": True} if place == 5 else {}) for place in order]

    function = torchcache(item_args=("y",))(plain)
    for order in ([0, 1], [1, 4], [0, 3, 1, 2], [2, 3, 5]):  # the last in part found, the rest changed
        given, expected = entries(order), entries(order)
        assert torch.equal(function(given), plain(expected))
        assert given == expected
    assert stats(function).bypasses == {"input": 3}


def padded(prompts):
    width = max(map(len, prompts))
    return torch.tensor([list(prompt.ljust(width).encode()) for prompt in prompts])


@pytest.mark.parametrize("batches", [["aa", "bb", "cc", "dd"], ["a", "b", "cc", "dd"]])
def test_padding_to_the_longest_is_found_out_once(batches, log):
    function = torchcache(item_args=("prompts",))(lambda prompts: padded(prompts))
    for prompts in (batches, ["eeee", "f", "gg", "hhhh"], ["aa", "eeee"], ["f"], ["gg", "f"], batches) * 2:
        assert torch.equal(function(list(prompts)), padded(prompts))
    assert list(stats(function).bypasses) == ["batch"]
    (message,) = warnings_in(log)
    assert "in a batch of 1 and of 4" in message


# What may be decorated.


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 3).requires_grad_(False)

    def forward(self, y):
        return self.head(numbers(y)[:, None])


def test_modules_without_a_tensor_among_their_arguments():
    plain = Encoder()
    instance = torchcache(item_args=("y",))(copy.deepcopy(plain))
    twin = copy.deepcopy(instance)
    compiled = torchcache(item_args=("y",))(copy.deepcopy(plain))
    compiled.head = torch.compile(compiled.head, backend="eager")

    @torchcache(item_args=("y",))
    class Cached(Encoder):
        pass

    subclass = Cached()
    subclass.load_state_dict(plain.state_dict())
    for order in ORDERS:
        texts = chosen(TEXTS, order)
        for module in (instance, subclass, twin, compiled):
            torch.testing.assert_close(module(texts), plain(texts))
            torch.testing.assert_close(module(y=texts), plain(texts))
    for module in (instance, subclass, compiled):
        assert (stats(module).misses, stats(module).bypasses) == (6, {})
    assert (stats(twin).misses, stats(twin).bypasses) == (0, {})  # of one content with the instance


SCRIPT = """
import sys
import torch
from torchcache2 import torchcache

@torchcache(item_args=("prompts", "images"), persistent=True, persistent_cache_dir=sys.argv[1])
def encode(prompts, images):
    return torch.tensor([[float(len(p)), float(i.size[0])] for p, i in zip(prompts, images)])

if __name__ == "__main__":
    from PIL import Image
    prompts = ["a", "\\ud800", "", {"b": {1, "c", None}}, "a"]
    images = [Image.new("P", (width, 3)) for width in (1, 2, 3, 4, 1)]
    encode(prompts, images)
    stats = encode.cache_instance.stats()
    print(stats.hits, stats.misses, dict(stats.bypasses))
"""


def test_another_process_finds_all(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    printed = []
    for seed in ("1", "random"):
        run = warm.run(tmp_path / "script.py", "rows", cwd=tmp_path, seed=seed)
        assert run.err == ""
        printed.append(run.out.strip())
    assert printed == ["1 4 {}", "5 0 {}"]


def test_what_a_tokenizers_last_call_has_left_is_no_part_of_the_namespace():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")

    @torchcache(item_args=("prompts",))
    def encode(prompts):
        return tokenizer(prompts, padding="max_length", max_length=4, return_tensors="pt")["input_ids"]

    def namespace():
        encode.cache_instance.refresh()
        return encode.cache_instance.module_hash

    before = namespace()
    tokenizer(["a a a", "a"], padding="longest", truncation=True, max_length=2)
    assert namespace() == before
    encode(["a", "a"])
    assert namespace() == before
    tokenizer.add_tokens(["b"])
    assert namespace() != before


TOKENIZER_EDITS = {
    "tokens": lambda words, libs: words.add_tokens(["b"]),
    "truncation": lambda words, libs: words.enable_truncation(2),
    "padding": lambda words, libs: words.enable_padding(length=5, pad_id=7),
    "padding's side": lambda words, libs: words.enable_padding(length=4, direction="left"),
    "normalizer": lambda words, libs: setattr(words, "normalizer", libs.normalizers.Lowercase()),
    "pre-tokenizer": lambda words, libs: setattr(words, "pre_tokenizer", libs.pre_tokenizers.Punctuation()),
    "its option": lambda words, libs: setattr(words.normalizer, "content", "b"),
    "special tokens": lambda words, libs: setattr(
        words,
        "post_processor",
        libs.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 0)]),
    ),
}


@pytest.mark.parametrize("held", ["closure", "attribute", "transformers"])
@pytest.mark.parametrize("name", TOKENIZER_EDITS)
def test_an_edit_of_a_tokenizer_is_noticed_at_the_next_call(name, held):
    libs = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = libs.Tokenizer(libs.models.WordLevel({"a": 0, "?": 1, "A": 2, "c": 3}, unk_token="?"))
    words.normalizer = libs.normalizers.Replace("d", "c")
    words.pre_tokenizer = libs.pre_tokenizers.WhitespaceSplit()
    words.enable_padding(length=4)
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")
    inner = fast.backend_tokenizer

    def ids(prompts):
        return torch.tensor([entry.ids for entry in words.encode_batch(prompts)])

    def fast_ids(prompts):
        return torch.tensor(fast(prompts, padding="max_length", truncation=True, max_length=4)["input_ids"])

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = words

        def forward(self, prompts):
            return torch.tensor([entry.ids for entry in self.words.encode_batch(prompts)])

    is_fast = held == "transformers"
    if is_fast and name in ("truncation", "padding", "padding's side"):
        return  # each call sets these
    plain = {"closure": ids, "attribute": Encoder().forward, "transformers": fast_ids}[held]
    encode = torchcache(Encoder() if held == "attribute" else plain, item_args=("prompts",))
    texts = ["a b d", "A, a c", "b? a a"]
    for _ in range(3):
        before = encode(texts)
    assert torch.equal(before, plain(texts)) and stats(encode).hits == 6 and stats(encode).bypasses == {}
    TOKENIZER_EDITS[name](inner if is_fast else words, libs)
    assert not torch.equal(plain(texts), before) and torch.equal(encode(texts), plain(texts))
    assert torch.equal(encode(texts), plain(texts)) and stats(encode).hits == 9
