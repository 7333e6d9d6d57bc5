"""What a dataset's namespace stands for: what changes it, what does not, and how the difference reads."""

import copy
import functools
import importlib.util
import io
import itertools
import json
import multiprocessing
import pathlib
import pickle
import random
import re
import socket
import sqlite3
import sys
import threading
import tracemalloc
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from tests.helpers import sources, warm
from tests.helpers.sources import (
    Compose,
    Counted,
    Options,
    Resize,
    Scale,
    Slots,
    Source,
    Split,
    Table,
    Wrapper,
    image_paths,
)
from torchcache2 import CachedDataset
from torchcache2.cli.commands import run as run_command
from torchcache2.cli.report import namespace
from torchcache2.core.errors import OptionError
from torchcache2.datasets.identity import document, identify
from torchcache2.engine.explain import compared
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import FileSystem
from torchcache2.identity.fingerprint import differences, from_document

LONG = image_paths()


def edited(values, index, value):
    return [*values[:index], value, *values[index + 1 :]]


def in_chain(make):
    return lambda: ConcatDataset([Subset(make(), [0, 1]), Subset(Source(), [0])])


# Two datasets that differ, and the lines that say so.
DIFFERENT = {
    "an argument of the transform": (
        lambda: Source(None, Resize(224)),
        lambda: Source(None, Resize(256)),
        ["attribute transform.size: 224 → 256"],
    ),
    "an argument of a transform in a list": (
        lambda: Source(None, Compose(Resize(1), Resize(224))),
        lambda: Source(None, Compose(Resize(1), Resize(256))),
        ["attribute transform.transforms[1].size: 224 → 256"],
    ),
    "an argument of a module": (
        lambda: Source(None, Scale(1.0)),
        lambda: Source(None, Scale(-1.0)),
        ["attribute transform.factor: 1.0 → -1.0"],
    ),
    "the dataset's dataset": (
        in_chain(lambda: Source(None, Resize(224))),
        in_chain(lambda: Source(None, Resize(256))),
        ["attribute datasets[0].dataset.transform.size: 224 → 256"],
    ),
    "behind a wrapper that has all attributes": (
        lambda: Wrapper(Source(None, Resize(224))),
        lambda: Wrapper(Source(None, Resize(256))),
        ["attribute dataset.transform.size: 224 → 256"],
    ),
    "behind slots": (
        lambda: Slots(Source(1)),
        lambda: Slots(Source(2)),
        None,
    ),
    "a field": (
        lambda: Table([1], Options(3)),
        lambda: Table([1], Options(4)),
        ["attribute options.size: 3 → 4"],
    ),
    "indices": (
        lambda: Subset(Source(), [0, 1]),
        lambda: Subset(Source(), [1, 0]),
        ["attribute indices: [0, 1] → [1, 0]"],
    ),
    "an enum": (lambda: Source(Split.TRAIN), lambda: Source(Split.TEST), None),
    "int and bool": (lambda: Source(1), lambda: Source(True), ["attribute held: 1 → True"]),
    "int and float": (lambda: Source(1), lambda: Source(1.0), ["attribute held: 1 → 1.0"]),
    "list and tuple": (lambda: Source([1]), lambda: Source((1,)), ["attribute held: [1] → (1,)"]),
    "a path of many": (
        lambda: Source(LONG),
        lambda: Source(edited(LONG, 1000, ("other.jpg", 6))),
        ["attribute held changed"],
    ),
    "a class of many": (
        lambda: Source(LONG),
        lambda: Source(edited(LONG, 1999, (LONG[1999][0], True))),
        ["attribute held changed"],
    ),
    "the order of many": (lambda: Source(LONG), lambda: Source(LONG[::-1]), ["attribute held changed"]),
    "a number in many": (
        lambda: Source([[i, {"a": [1.0, i]}] for i in range(2000)]),
        lambda: Source([[i, {"a": [1.0, i if i != 77 else -0.0]}] for i in range(2000)]),
        ["attribute held changed"],
    ),
    "length": (
        lambda: Counted(LONG),
        lambda: Counted(LONG[:-1]),
        ["attribute held changed", "length: 2000 → 1999"],
    ),
    "a number in a tensor": (
        lambda: TensorDataset(torch.zeros(1000)),
        lambda: TensorDataset(torch.zeros(1000).index_fill(0, torch.tensor(500), 1.0)),
        ["data tensors[0] changed"],
    ),
    "a zero's sign in a tensor": (
        lambda: TensorDataset(torch.tensor([0.0])),
        lambda: TensorDataset(torch.tensor([-0.0])),
        ["data tensors[0] changed"],
    ),
    "the shape of a tensor": (
        lambda: TensorDataset(torch.zeros(4, 1)),
        lambda: TensorDataset(torch.zeros(4, 1, 1)),
        ["data tensors[0]: float32 (4, 1) → float32 (4, 1, 1)"],
    ),
    "the dtype of a tensor": (
        lambda: TensorDataset(torch.zeros(4)),
        lambda: TensorDataset(torch.zeros(4, dtype=torch.int32)),
        ["data tensors[0]: float32 (4,) → int32 (4,)"],
    ),
    "a number in an array": (
        lambda: Source(np.zeros((100, 3))),
        lambda: Source(np.where(np.arange(300).reshape(100, 3) == 150, 1.0, 0.0)),
        ["attribute held changed"],
    ),
    "the dtype of an array": (
        lambda: Source(np.zeros(3, "f4")),
        lambda: Source(np.zeros(3, "i4")),
        ["attribute held changed"],
    ),
    "the strides of the same memory": (
        lambda: Source(np.arange(9).reshape(3, 3)),
        lambda: Source(np.arange(9).reshape(3, 3).T),
        ["attribute held changed"],
    ),
    "a path": (
        lambda: Source(pathlib.PurePosixPath("a")),
        lambda: Source(pathlib.PurePosixPath("b")),
        ["attribute held: a → b"],
    ),
    "a function": (lambda: Source(None, len), lambda: Source(None, max), None),
    "a closure": (
        lambda: Source(None, functools.partial(Resize, 1)),
        lambda: Source(None, functools.partial(Resize, 2)),
        ["attribute transform changed"],
    ),
    "a class": (lambda: Source([1]), lambda: Counted([1]), None),
    "a dataset that is a module": (
        lambda: Subset(Both(1), [0]),
        lambda: Subset(Both(2), [0]),
        ["attribute dataset.size: 1 → 2"],
    ),
    "another attribute": (
        Source,
        lambda: with_attribute(Source()),
        ["attribute more is new: 1", "dataset changed"],
    ),
    "a dataset in a list of objects": (
        lambda: Source([Options(i) for i in range(100)]),
        lambda: Source([Options(i if i != 99 else 0) for i in range(100)]),
        ["attribute held changed"],
    ),
    "a field of a configuration that is read": (
        lambda: Configured(2, 0.1),
        lambda: Configured(3, 0.1),
        ["attribute cfg.size: 2 → 3"],
    ),
    "a configuration that is passed on": (
        lambda: Passing(2, 0.1),
        lambda: Passing(2, 0.2),
        ["attribute cfg.lr: 0.1 → 0.2"],
    ),
    "an object of which torch's own code reads more than ours": (
        lambda: Rooted(Listed([1, 2]), [0]),
        lambda: Rooted(Listed([1, 3]), [0]),
        ["attribute dataset.items: [1, 2] → [1, 3]"],
    ),
    "inside of CachedDataset": (
        lambda: Subset(cached(Source(1)), [0]),
        lambda: Subset(cached(Source(2)), [0]),
        ["attribute dataset[0].held: 1 → 2"],
    ),
    "what a CachedDataset inside does after its cache": (
        lambda: Subset(cached(Source(1), transform=Resize(1)), [0]),
        lambda: Subset(cached(Source(1), transform=Resize(2)), [0]),
        ["attribute dataset[1].size: 1 → 2"],
    ),
}


class Configured(Dataset):
    def __init__(self, size, lr):
        self.cfg = Namespace(size=size, lr=lr)

    def __getitem__(self, index):
        return torch.zeros(self.cfg.size)


class Passing(Configured):
    def __getitem__(self, index):
        return torch.zeros(len(str(self.cfg)))


class Listed:
    def __init__(self, items):
        self.root, self.items = "here", items

    def __getitem__(self, index):
        return self.items[index]


class Rooted(Subset):
    def where(self):
        return self.dataset.root


class Both(torch.nn.Module, Dataset):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def __getitem__(self, index):
        return self.size


def with_attribute(dataset):
    vars(dataset)["more"] = 1
    return dataset


def cached(dataset, **options):
    return CachedDataset(dataset, memory_size=0, **options)


def lines(before, now):
    return differences(before.fingerprint, now.fingerprint)


@pytest.mark.parametrize("name", DIFFERENT)
def test_datasets_that_differ_have_other_namespaces_and_the_lines_name_what_differs(name):
    left, right, wanted = DIFFERENT[name]
    left, right = identify(left()), identify(right())
    assert left.unread == right.unread == []
    assert left.namespace != right.namespace
    assert wanted is None or lines(left, right) == wanted
    assert lines(left, right)


@pytest.mark.parametrize(
    ("options", "finds"),
    [
        ({"ignore": "cfg.lr"}, lambda left, right: left == right),
        ({"ignore": ("cfg.s*", "cfg.lr")}, lambda left, right: left == right),
        ({"ignore": "cfg.size"}, lambda left, right: left != right),
    ],
)
def test_what_is_ignored_does_not_count(options, finds, tmp_path):
    left, right = (CachedDataset(Passing(2, lr), tmp_path / "cache", **options) for lr in (0.1, 0.2))
    assert finds(left._recipe.identity.namespace, right._recipe.identity.namespace)
    assert "left out by ignore: cfg." in left.explain()
    assert identify(Passing(2, 0.1)).namespace != left._recipe.identity.namespace


def test_a_name_that_matches_nothing_is_told(log):
    identify(Passing(2, 0.1), ignore="cfg.rate")
    assert "matches nothing" in log[-1].getMessage()


def used():
    """A dataset that has been used, and whose parts are those of one that has not."""
    dataset = TensorDataset(torch.arange(10.0))
    for workers in (0, 1):
        for _ in DataLoader(
            dataset, num_workers=workers, multiprocessing_context="fork" if workers else None
        ):
            pass
    return dataset


SAME = {
    "a field of a configuration that is not read": (
        lambda: Configured(2, 0.1),
        lambda: Configured(2, 0.2),
    ),
    "used": (used, lambda: TensorDataset(torch.arange(10.0))),
    "list that another list has been": (lambda: Source(LONG), lambda: Source(image_paths())),
    "list met twice": (lambda: Source([LONG, LONG]), lambda: Source([LONG, image_paths()])),
    "memory map": (lambda: Source(mapped()), lambda: Source(mapped())),
    "pickled": (lambda: Table(LONG, Options()), lambda: pickle.loads(pickle.dumps(Table(LONG, Options())))),
    "copied": (lambda: shared(), lambda: copy.deepcopy(shared())),
    "generator of the same seed": (lambda: Source(generators(3)), lambda: Source(generators(3))),
    "lock that is held": (lambda: Source(threading.Lock()), lambda: Source(held_lock())),
    "view": (lambda: Source(torch.arange(6.0)[::2]), lambda: Source(torch.tensor([0.0, 2.0, 4.0]))),
    "array of other strides": (lambda: Source(np.arange(6)[::2]), lambda: Source(np.array([0, 2, 4]))),
}

shared = sources.shared_base


def mapped():
    return np.memmap(__file__, np.uint8, "r")


def generators(seed):
    return [
        torch.Generator().manual_seed(seed),
        np.random.default_rng(seed),
        np.random.RandomState(seed),
        random.Random(seed),
    ]


def held_lock():
    lock = threading.Lock()
    lock.acquire()
    return lock


@pytest.mark.parametrize("name", SAME)
def test_datasets_that_are_the_same_have_the_same_namespace(name):
    left, right = (identify(make()) for make in SAME[name])
    assert lines(left, right) == []
    assert left.namespace == right.namespace


@pytest.mark.parametrize("name", sources.MAKERS)
def test_reading_a_dataset_changes_nothing_and_reads_no_sample(name):
    dataset = sources.MAKERS[name]()
    before = {name: id(value) for name, value in getattr(dataset, "__dict__", {}).items()}
    first = identify(dataset)
    assert first.fingerprint == identify(dataset).fingerprint
    assert {name: id(value) for name, value in getattr(dataset, "__dict__", {}).items()} == before
    assert first.unread == []


@pytest.fixture(scope="module")
def processes():
    """What two processes say, with other hash seeds: one, and one that has inherited nothing of a script."""
    script = Path(sources.__file__)
    running = [warm.start(script, seed="1"), warm.start(script, "forkserver", forks=True)]
    return [json.loads(process.done(timeout=300).out) for process in running]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", sources.MAKERS)
def test_another_process_finds_the_namespace(name, processes):
    first, spawned = (found[name] for found in processes)
    assert first == spawned
    assert first[1] == []


CODE = """
from torch.utils.data import Dataset

FACTOR = 2

def helper(x):
    return x + 1

class Twice:
    def __call__(self, x):
        return helper(x) * FACTOR

class Images(Dataset):
    transform = Twice()

    def __init__(self, count=3):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.transform(index)

    def __getitems__(self, indices):
        return [self[index] for index in indices]
"""


def images(folder, number, old="", new=""):
    """The identity of a dataset whose file has this code, with a text in it replaced by another."""
    assert old in CODE
    path = folder / str(number) / "own_images.py"
    path.parent.mkdir()
    path.write_text(CODE.replace(old, new) if old else CODE)
    spec = importlib.util.spec_from_file_location("own_images", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_images"] = module
    try:
        spec.loader.exec_module(module)
        return identify(module.Images())
    finally:
        del sys.modules["own_images"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        (
            "self.transform(index)",
            "self.transform(index + 1)",
            "source of function Images.__getitem__ changed",
        ),
        ("for index in indices", "for index in indices[:]", "source of function Images.__getitems__ changed"),
        ("helper(x) * FACTOR", "FACTOR * helper(x)", "source of function Twice.__call__ changed"),
        ("x + 1", "x + 2", "source of function helper changed"),
        ("FACTOR = 2", "FACTOR = 3", "global FACTOR of function Twice.__call__: 2 → 3"),
        ("count=3", "count=4", None),
        ("Images(Dataset)", "Images(Dataset[int])", None),
    ],
)
def test_an_edit_of_the_code_changes_the_namespace(tmp_path, old, new, line):
    before, same = images(tmp_path, 1), images(tmp_path, 2)
    assert before == same and before.unread == []
    now = images(tmp_path, 3, old, new)
    if new == "Images(Dataset[int])":  # only a type
        assert now.namespace == before.namespace
    else:
        assert now.namespace != before.namespace
        assert line is None or lines(before, now) == [line]


def counting():
    yield 1


@pytest.mark.parametrize(
    "make",
    [
        lambda: open(__file__),  # noqa: SIM115
        lambda: open(__file__, "rb"),  # noqa: SIM115
        lambda: io.BytesIO(b"1"),
        socket.socket,
        counting,
        lambda: iter([1]),
        lambda: map(len, []),
        lambda: sqlite3.connect(":memory:"),
        lambda: multiprocessing.get_context("fork").Value("i", 3),
    ],
)
@pytest.mark.parametrize("where", ["held", "dataset.held", "held[1].words"])
def test_what_cannot_be_read_is_named_and_the_namespace_is_for_this_process(make, where):
    value = make()
    if where == "held":
        dataset = Source(value)
    elif where == "dataset.held":
        dataset = Subset(Source(value), [0])
    else:
        dataset = Source([0, Options(words=value)])
    try:
        found = identify(dataset)
        assert found.unread and all(path.startswith((where, "Synchronized")) for path in found.unread)
        assert found.namespace != identify(dataset).namespace
        named = identify(dataset, name="mine")
        assert named.unread == []
        other = Subset(Source(), [0]) if where == "dataset.held" else Source()
        assert named.namespace == identify(other, name="mine").namespace
    finally:
        if hasattr(value, "close"):
            value.close()


def test_more_objects_than_can_be_read_are_named(monkeypatch):
    monkeypatch.setattr("torchcache2.datasets.identity._DatasetWalk.most_objects", 1000)
    assert identify(Source([Options(i) for i in range(300)])).unread == []
    (path,) = identify(Source([Options(i) for i in range(600)])).unread
    assert path.startswith("held[") and path.endswith(" (more than 1000 objects)")


def test_generators_are_listed_and_count_by_their_state():
    held = [*generators(3), random.SystemRandom()]
    found = identify(Subset(Source(held), [0]))
    assert len(found.generators) == 4
    assert all(left is right for left, right in zip(found.generators, held, strict=False))
    assert found.unread == []
    assert identify(Subset(Source(held), [0])).namespace == found.namespace
    for generator, other in zip(held, generators(4), strict=False):
        assert identify(Source(generator)).namespace != identify(Source(other)).namespace


def test_a_version_counts_beside_the_dataset_and_beside_a_name():
    dataset = Source(1)
    namespaces = [
        identify(dataset, name=name, version=version).namespace
        for name, version in itertools.product([None, "a", "b"], [None, 1, 2, "1", ""])
    ]
    assert len(set(namespaces)) == 15
    old, new = identify(dataset, version=1), identify(dataset, version="b")
    assert lines(old, new) == ["version: 1 → 'b'"]
    assert lines(identify(dataset), new) == ["version is new: 'b'"]
    assert lines(identify(dataset, name="a"), identify(dataset, name="b")) == ["name: 'a' → 'b'"]


def test_a_named_dataset_is_not_read():
    class Unreadable:
        def __getattribute__(self, name):
            raise AssertionError(name)

    found = identify(Unreadable(), name="mine", version=3)
    assert found.fingerprint.parts.keys() == {"format", "name", "version"}
    assert found.namespace.hex() == "b1b6b0d429ead436b79222299dfb8e02"


@pytest.mark.parametrize("options", [{"name": ""}, {"name": 3}, {"version": 1.0}, {"version": True}])
def test_a_name_or_version_of_another_type_is_an_error(options):
    with pytest.raises(OptionError, match=re.escape(f"{next(iter(options))}=")):
        identify(Source(), **options)


class Plain:
    pass


held = Plain()


class Held(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.before = lambda: held.size
        self.size = 0


@pytest.mark.parametrize("inside", [Held, Plain])
def test_a_global_object_and_an_attribute_on_the_same_path_both_count(inside):
    found = []
    for held.size, own in itertools.product([1, 2], [1, 2]):
        value = inside()
        value.size = own
        value.other = lambda: held.size
        found.append(identify(Source(value)))
    assert len({one.namespace for one in found}) == 4
    assert lines(found[0], found[1]) == ["attribute held.size: 1 → 2"]
    shown = lines(found[0], found[2])
    assert shown and all(line.startswith("global held.size of function") for line in shown)
    assert all(line.endswith(": 1 → 2") for line in shown)


def test_a_dataset_that_others_share_is_read_once():
    found = identify(shared())
    assert [part for part in found.fingerprint.parts if part.endswith(".held")] == [
        "attribute datasets[0].dataset.held"
    ]
    base = Source(image_paths())
    apart = ConcatDataset([Subset(base, range(5)), Subset(Source(image_paths(1999)), [7, 8])])
    assert identify(apart).namespace != found.namespace


def test_a_dataset_that_refers_to_itself():
    def make(held):
        dataset = Source({"parent": None})
        dataset.held["parent"] = [dataset, held]
        return identify(dataset)

    assert make(1).namespace == make(1).namespace != make(2).namespace


def test_a_large_array_is_read_without_a_copy():
    array = np.zeros(32 << 20, np.uint8)
    dataset = Source(array)
    tracemalloc.start()
    try:
        identify(dataset)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_many_objects_do_not_make_many_parts():
    found = identify(Source([[Options(i) for i in range(60)] for _ in range(60)] * 2))
    assert len(found.fingerprint.parts) < 100


# explain() and fingerprint.json


def described(folder, dataset, created="2020", **options):
    """Leave a dataset in a folder as an earlier run would; its identity."""
    identity = identify(dataset, **options)
    text = document(identity, dataset, options.get("name"), options.get("version"))
    text["dataset"]["length"] = 10
    directory = CacheDirectory(str(folder), FileSystem())
    directory.create()
    directory.prepare(identity.namespace, text | ({"created": created} if created else {}))
    (folder / identity.namespace.hex() / "01ARZ3NDEKTSV4RRFFQ69G5FAV.safetensors").touch()
    return identity, text, directory


def test_a_dataset_is_compared_with_the_one_before_it_or_with_that_of_an_earlier_run(tmp_path):
    now = identify(Source(None, Resize(256))).fingerprint
    before, text, directory = described(tmp_path, Source(None, Resize(224)))

    def explained(now=now, directory=directory, bypass=None, kind=text["class"]):
        return compared("Source", kind, now, None, bypass, directory, "2021")

    line = "attribute transform.size: 224 → 256"
    assert explained() == f"compared with {before.namespace.hex()} in {directory.path}:\n{line}"
    assert explained(bypass="closed") == "not cached: closed"
    cached = CachedDataset(Source(None, Resize(224)), memory_size="1MB")
    assert "there is no folder to compare with" in cached.explain()
    cached.close()
    first = f"namespace {now.namespace.hex()} is the first of Source in this process"
    assert explained(kind="other.Class") == f"{first}, and in {directory.path}"
    same = before.fingerprint
    assert explained(now=same).endswith(f"an earlier run has left rows of it in {directory.path}")


def test_the_document_is_json_and_has_what_the_format_says(tmp_path):
    identity, text, _ = described(tmp_path, Source(Split.TRAIN), name="coco", version=3)
    assert json.loads(json.dumps(text)) == text
    assert text.keys() == {"class", "library", "torch", "created", "parts", "values", "dataset"}
    assert text["dataset"] == {"length": 10, "name": "coco", "version": "3"}
    assert text["class"] == f"{Source.__module__}.Source"
    assert from_document(identity.namespace.hex(), text) == identity.fingerprint


@pytest.mark.parametrize(
    ("options", "title"),
    [
        ({}, "tests.helpers.sources.Source (10, 0 % filled)"),
        ({"name": "coco"}, "tests.helpers.sources.Source coco (10, 0 % filled)"),
    ],
)
def test_the_commands_name_a_dataset(tmp_path, capsys, options, title):
    described(tmp_path, Source(), **options)
    listed = []
    for more in ([], ["--format", "json"]):
        with pytest.raises(SystemExit, match=r"^0$"):
            run_command(["ls", str(tmp_path), *more])
        listed.append(capsys.readouterr().out)
    assert listed[0].splitlines()[1].split("\t")[1] == title
    (one,) = json.loads(listed[1])
    assert one["class"] == "tests.helpers.sources.Source"
    assert one["dataset"] == {"length": 10, "name": options.get("name"), "version": None, "filled": 0.0}


@pytest.mark.parametrize(
    "stated", [3, [], {}, {"length": "7", "name": 3}, {"length": -1}, {"length": True}, {"name": {}}]
)
def test_the_commands_do_not_break_on_what_somebody_has_edited(tmp_path, stated):
    identity, text, directory = described(tmp_path, Source())
    path = Path(directory.folder(identity.namespace)) / "fingerprint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dataset": stated}))
    (one,) = (namespace(directory, contents) for contents in directory.scan())
    assert one.title == text["class"]
    nothing = {"length": None, "name": None, "version": None, "filled": None}
    assert one.to_json()["dataset"] == (nothing if isinstance(stated, dict) else None)


def test_a_dataset_without_a_length_has_a_namespace():
    class Endless(Dataset):
        def __len__(self):
            raise NotImplementedError

        def __getitem__(self, index):
            return index

    assert "length" not in identify(Endless()).fingerprint.parts


@pytest.mark.parametrize("helper", ["scale_within", "folder_within.scale"])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_what_a_dataset_imports_as_it_runs_counts_imported_or_not(is_loaded, helper, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "class Data:\n    def __len__(self):\n        return 2\n    def __getitem__(self, index):\n"
    text += f"        import {helper} as helper\n        return helper.scaled(index)\n"
    (tmp_path / "data_within.py").write_text(text)
    found = []
    for factor in (2, 2, 3):
        path = tmp_path / f"{helper.replace('.', '/')}.py"  # of a package without a file
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"N = {factor}\ndef scaled(x):\n    return x * N\n")
        importlib.invalidate_caches()
        for name in (helper, helper.partition(".")[0], "data_within"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        if is_loaded:
            importlib.import_module(helper)
        found.append(identify(importlib.import_module("data_within").Data()).namespace)
        sys.modules.pop(helper, None)
    assert found[0] == found[1] != found[2]
    importlib.import_module(helper).N = 2
    assert identify(importlib.import_module("data_within").Data()).namespace == found[0]
