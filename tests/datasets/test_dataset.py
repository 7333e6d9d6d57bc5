"""`CachedDataset` gives what the dataset gives, whatever happens to what it keeps: in one process."""

import concurrent.futures
import contextlib
import copy
import enum
import gc
import os
import pickle
import random
import shutil
import tempfile
import threading

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split

from tests.helpers.datasets import Batched, Counted, memory_of, noted, same, sample_of
from tests.helpers.storage import warnings_of
from torchcache2 import CachedDataset
from torchcache2.core.errors import NotCachedError, OutputError
from torchcache2.datasets.store import Store

SOAK = bool(os.environ.get("SOAK"))
COUNT = 24


class Texts(Counted):
    """Its samples are asked for by texts and bytes, too."""

    def __getitem__(self, index):
        if isinstance(index, (str, bytes)):
            return index, super().__getitem__(int(index))
        return super().__getitem__(index)


def _indices(number):
    """All that may stand for one sample."""
    return st.sampled_from(
        [
            number,
            number - COUNT,
            np.int64(number),
            np.uint8(number),
            torch.tensor(number),
            torch.tensor(number - COUNT, dtype=torch.int32),
            str(number),
            f"0{number}",
            str(number).encode(),
        ]
    )


INDICES = st.integers(0, COUNT - 1).flatmap(_indices)
SIZES = st.sampled_from([0, 30_000, 200_000, "10MB"])


class Machine(RuleBasedStateMachine):
    """A cached dataset, which may forget, beside the plain one."""

    def __init__(self):
        super().__init__()
        self.given = []

    @initialize(
        batched=st.booleans(),
        kind=st.sampled_from(["dict", "tensor", "ragged", "coco", "large"]),
        memory=SIZES,
        disk=st.sampled_from([None, 0, 30_000, 200_000, "10MB"]),
        has_path=st.booleans(),
        policy=st.sampled_from(["keep", "lru"]),
    )
    def begin(self, batched, kind, memory, disk, has_path, policy):
        self.folder = tempfile.TemporaryDirectory(prefix="test-")
        self.plain = (Batched if batched else Texts)(COUNT, kind)
        self.options = {"memory_size": memory, "disk_size": disk, "policy": policy}
        if has_path:
            self.options["cache_dir"] = self.folder.name + "/cache"
        self.cached = CachedDataset(self.plain, **self.options)

    def check(self, indices, samples):
        for index, sample in zip(indices, samples, strict=True):
            if not isinstance(self.plain, Texts) and isinstance(index, bytes | str):
                index = int(index)
            same(sample, self.plain[index])
        leaves = [leaf for sample in (*samples, *self.given[-20:]) for leaf in memory_of(sample)]
        places = {leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.ctypes.data for leaf in leaves}
        assert len(places) == len(leaves)
        for leaf in (leaf for sample in samples for leaf in memory_of(sample)):
            if isinstance(leaf, np.ndarray):
                leaf.flat[:] = 1
            else:
                leaf.fill_(1)
        self.given += samples

    @rule(index=INDICES)
    def one(self, index):
        self.check([index], [self.cached[index]])

    @rule(indices=st.lists(INDICES, max_size=10))
    def several(self, indices):
        self.check(indices, self.cached.__getitems__(indices))

    @rule(index=st.sampled_from([COUNT, -COUNT - 1, 10**9, 2**64, "999"]))
    def beyond(self, index):
        with pytest.raises(IndexError):
            self.cached.__getitems__([0, index])

    @rule()
    def flush(self):
        self.cached.flush()

    @rule()
    def clear(self):
        self.cached.clear()
        assert self.cached.missing().tolist() == list(range(COUNT))

    @rule()
    def reopen(self):
        self.cached.close()
        self.cached = CachedDataset(self.plain, **self.options)

    @rule()
    def close(self):
        self.cached.close()
        self.check([0], [self.cached[0]])
        self.cached = CachedDataset(self.plain, **self.options)

    @rule()
    def copies(self):
        how = pickle.dumps(self.cached)
        self.other = pickle.loads(how)

    @rule()
    def missing(self):
        assert set(self.cached.missing().tolist()) <= set(range(COUNT))

    @precondition(lambda self: self.options["memory_size"] != 0)
    @rule()
    def warmup(self):
        done = self.cached.warmup(batch_size=5)
        assert done.found + done.computed == COUNT
        # The folder has all, if there is one.
        if self.options["memory_size"] == "10MB" and self.options["disk_size"] in (
            None,
            0,
            "10MB",
        ):
            assert len(self.cached.missing()) == 0

    @rule()
    def stats(self):
        stats = self.cached.stats()
        assert (stats.corrupt, stats.faults, stats.bypasses) == (0, 0, {})

    def teardown(self):
        if hasattr(self, "cached"):
            self.cached.close()
            self.folder.cleanup()


def test_it_gives_what_the_dataset_gives():
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=1000 if SOAK else 8,
            stateful_step_count=30 if SOAK else 15,
            derandomize=not SOAK,
            deadline=None,
            phases=[Phase.generate] if not SOAK else list(Phase),
        ),
    )


# Indices


class Given(Dataset):
    """A sample is the index that the dataset was given."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return {"index": index}


def test_a_sample_does_not_depend_on_the_kind_of_int_that_asked_first():
    cached = CachedDataset(Given(), memory_size="1MB")
    for first, second in ((torch.tensor(3), 3), (np.int64(4), 4), (5, np.uint8(5)), (True, 1)):
        for index in (first, second):
            same(cached[index], {"index": int(index)})
    assert cached.stats().hits == 4


class Spelled(str):
    def __str__(self):
        return "something else"


def test_texts_are_taken_as_they_are():
    cached = CachedDataset(Given(), memory_size="1MB")
    for index in ("a", np.str_("a\0"), Spelled("b"), "\ud800", "", b"a", np.bytes_(b"a"), "b", "1", 1, b"1"):
        for _ in range(2):
            given = cached[index]["index"]
            assert given == index and len(given) == len(index) if index != 1 else given == 1
            assert type(given) in (str, bytes, int)


@pytest.mark.parametrize(
    "index", [torch.tensor([3]), torch.tensor([1, 2]), np.array([3]), 1.0, None, (1, 2), slice(0, 2), [1]]
)
def test_what_is_no_index_is_an_error(index):
    cached = CachedDataset(torch.arange(9.0), memory_size="1MB")
    assert cached[3] == cached[3]
    with pytest.raises(TypeError, match="one int, str or bytes at a time"):
        cached[index]


# Datasets that are not as usual


class Endless(Given):
    __len__ = None


class Untold(Given):
    def __len__(self):
        raise NotImplementedError


def test_a_dataset_need_not_tell_its_length():
    for source in (Endless(), Untold()):
        cached = CachedDataset(CachedDataset(source, memory_size="1MB"), memory_size="1MB")
        assert [cached[2], cached[2]] == [{"index": 2}] * 2
        with pytest.raises((TypeError, NotImplementedError)):
            len(cached)


class Drawing(Dataset):
    def __init__(self):
        self.steps = [("noise", Noise())]

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return self.steps[0][1](index)


class Noise:
    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __call__(self, x):
        return x + self.generator.random()


@pytest.mark.parametrize("name", [None, "drawing"])
def test_generators_of_the_dataset_are_watched_even_if_it_has_a_name(name, log):
    plain = Drawing()
    expected = [plain[3] for _ in range(3)]
    cached = CachedDataset(Drawing(), memory_size="1MB", name=name)
    assert [cached[3] for _ in range(3)] == expected
    assert len(warnings_of(log)) == 1 and "draws random numbers" in warnings_of(log)[0].getMessage()
    assert cached.stats().bypasses == {"random": 3}


class Refusing(Dataset):
    """Samples 1, 3, 5, … cannot be stored."""

    def __init__(self, step=2):
        self.step = step

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return {"index": index, "more": [{index}] if index % self.step else None}


def test_the_first_sample_that_cannot_be_stored_is_an_error_that_names_it():
    cached = CachedDataset(Refusing(1000), memory_size="1MB")
    with pytest.raises(OutputError, match=r"sample\['more'\]\[0\] is a builtins.set.*list\(sample\['more'\]"):
        cached[1]
    with pytest.raises(OutputError):
        cached.__getitems__([1, 2, 3])


class Boxed:
    def __init__(self, index):
        self.index = index


class Boxes(torch.utils.data.Dataset):
    def __init__(self, order):
        self.order = order

    def __len__(self):
        return len(self.order)

    def __getitem__(self, i):
        return Boxed(self.order[i])

    def shuffle(self, seed=0):
        return Boxes(self.order[::-1])

    def sort(self):
        return self

    def map(self, function):
        return list(map(function, self.order))


class Side(enum.Enum):
    LEFT = 1


def test_samples_of_a_class_are_refused_with_the_call_that_registers_it():
    line = r"torchcache2.register_value\(Boxed, vars, lambda parts: Boxed\(\*\*parts\)\)"
    with pytest.raises(OutputError, match=line):
        CachedDataset(Boxes([1, 2]), memory_size="1MB")[0]
    with pytest.raises(OutputError, match=r"return sample\.value$"):
        CachedDataset([Side.LEFT], memory_size="1MB")[0]


def test_another_dataset_that_a_method_of_the_dataset_returns_is_not_cached_with_a_warning(log):
    cached = CachedDataset(Boxes([1, 2, 3]), memory_size="1MB")
    assert cached.sort() is cached.sort() and cached.map(str) == ["1", "2", "3"] and warnings_of(log) == []
    assert cached.shuffle(seed=1).order == [3, 2, 1]
    (warning,) = warnings_of(log)
    assert "shuffle returns a dataset that is not cached" in warning.getMessage()


@pytest.mark.parametrize("has_path", [False, True])
def test_later_ones_are_returned_uncached_with_one_warning(log, path, has_path):
    options = {"cache_dir": path if has_path else None, "memory_size": "1MB"}
    cached = CachedDataset(Refusing(), **options)
    for _ in range(2):
        assert cached.__getitems__([1, 0, 3]) == [Refusing()[index] for index in (1, 0, 3)]
        assert [cached[index] for index in (5, 2)] == [Refusing()[index] for index in (5, 2)]
    assert len(warnings_of(log)) == 1 and "builtins.set" in warnings_of(log)[0].getMessage()
    assert cached.stats().bypasses == {"refused": 6} and cached.stats().misses == 2
    cached.close()
    if has_path:  # a run that begins with one of these is not told that nothing can be stored
        assert CachedDataset(Refusing(), **options)[1] == Refusing()[1]


def test_a_sample_whose_type_would_not_come_back_is_not_stored():
    shape = torch.Size([1, 2])
    cached = CachedDataset([0, shape], memory_size="1MB", name="shapes")
    same([cached[index] for index in (0, 1, 1)], [0, shape, shape])


class Hidden(Given):
    _hidden = 3

    def __init__(self):
        self._other = 4


def test_attributes_are_those_of_the_dataset():
    cached = CachedDataset(Hidden(), memory_size="1MB")
    for one in (cached, pickle.loads(pickle.dumps(cached)), copy.deepcopy(cached), copy.copy(cached)):
        assert (one._hidden, one._other, len(one), one[3]) == (3, 4, 9, {"index": 3})
        assert not hasattr(one, "absent") and not hasattr(one, "__array__") and hasattr(one, "__getitems__")
        assert isinstance(one, Dataset)
        with pytest.raises(AttributeError, match="must not change"):
            one._other = 5


# Random numbers

OWN = {"torch": torch.Generator(), "numpy": np.random.default_rng(), "python": random.Random()}


def draw(kind):
    """A number of a generator; those of `OWN` are globals that the code of a dataset refers to."""
    if kind == "torch":
        return float(torch.rand(()))
    if kind == "numpy":
        return float(np.random.random())
    if kind == "python":
        return random.random()
    if kind == "own torch":
        return float(torch.rand((), generator=OWN["torch"]))
    if kind == "own numpy":
        return float(OWN["numpy"].random())
    return OWN["python"].random()


KINDS = ["torch", "numpy", "python", "own torch", "own numpy", "own python"]


class Augmented(Dataset):
    """Each sample, or one in `every` of the later ones, has a random number; maybe one of another thread."""

    def __init__(self, kind, every=1, pool=None, seeds=False):
        self.kind, self.every, self.seeds = kind, every, seeds
        self.with_thread = pool is not None

    def __len__(self):
        return 50

    def __getitem__(self, index):
        if index % self.every:
            return float(index)
        if self.seeds:
            torch.manual_seed(index)
        if self.with_thread:
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return pool.submit(draw, self.kind).result()
        return draw(self.kind)


@contextlib.contextmanager
def seeded():
    """The states in the end are what is drawn next."""
    torch.default_generator.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    OWN["torch"].manual_seed(4)
    OWN["numpy"].bit_generator.state = np.random.default_rng(5).bit_generator.state
    OWN["python"].seed(6)
    numbers = []
    yield numbers
    numbers += [draw(kind) for kind in KINDS]


def epochs(dataset):
    with seeded() as numbers:
        numbers += [sample for _ in range(3) for sample in dataset.__getitems__(list(range(50)))]
        numbers += [dataset[index] for index in range(50)]
    return numbers


@pytest.mark.one_in(4)
@pytest.mark.parametrize("idle", [False, True], ids=["alone", "beside a thread"])
@pytest.mark.parametrize("pool", [None, True], ids=["here", "in a thread"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_draws_random_numbers_is_as_without_the_cache(log, kind, pool, idle):
    plain = Augmented(kind, pool=pool)
    plain.__getitems__ = lambda indices: [plain[index] for index in indices]
    expected, done = epochs(plain), threading.Event()
    thread = threading.Thread(target=done.wait)
    if idle:  # which could be what draws
        thread.start()
    try:
        cached = CachedDataset(Augmented(kind, pool=pool), memory_size="1MB")
        assert epochs(cached) == expected
    finally:
        done.set()
        if idle:
            thread.join()
    assert len(warnings_of(log)) == 1 and "draws random numbers" in warnings_of(log)[0].getMessage()
    assert cached.stats().bypasses == {"random": 200} and cached.stats().memory_rows == 0


@pytest.mark.parametrize("kind", ["torch", "own numpy"])
def test_a_source_that_draws_for_one_sample_only_is_as_without_the_cache(log, kind):
    plain = Augmented(kind, every=50)
    plain.__getitems__ = lambda indices: [plain[index] for index in indices]
    cached = CachedDataset(Augmented(kind, every=50), memory_size="1MB")
    assert epochs(cached) == epochs(plain)
    assert len(warnings_of(log)) == 1


def test_what_is_loaded_while_others_find_random_numbers_is_not_kept(path, monkeypatch):
    with contextlib.closing(CachedDataset([1.0, 2.0, 3.0], path)) as cached:
        store, find = cached._store, Store.find

        def found(self, keys):
            store.tally.found_random()  # as another process does
            store.levels.clear()
            return find(self, keys)

        monkeypatch.setattr(Store, "find", found)
        assert cached[1] == 2.0
        assert len(cached.missing()) == 3


def test_samples_that_seed_a_generator_are_cached_if_allowed(log):
    expected = [Augmented("torch", seeds=True)[index] for index in range(50)]
    cached = CachedDataset(Augmented("torch", seeds=True), memory_size="1MB", allow_random=True)
    for _ in range(2):
        assert [cached[index] for index in range(50)] == expected
    assert cached.stats().hits == 50 and warnings_of(log) == []
    cached = CachedDataset(Augmented("torch", seeds=True), memory_size="1MB")
    for _ in range(2):
        assert [cached[index] for index in range(50)] == expected
    assert cached.stats().hits == 0 and len(warnings_of(log)) == 1


def noise(sample):
    return sample, draw("torch")


def test_a_transform_runs_after_the_cache_each_time(log):
    cached = CachedDataset(torch.arange(50.0), memory_size="1MB", transform=noise)
    with seeded() as numbers:
        numbers += [sample for _ in range(2) for sample in cached.__getitems__(list(range(50)))]
    with seeded() as expected:
        expected += [noise(torch.tensor(float(index))) for _ in range(2) for index in range(50)]
    assert numbers == expected and cached.stats().hits == 50 and warnings_of(log) == []


def test_reading_and_warming_up_draw_nothing():
    with seeded() as untouched:
        pass
    with seeded() as numbers:
        cached = CachedDataset(Counted(50), memory_size="1MB", verify=0.5)
        cached.warmup(batch_size=7)
        cached.warmup()
        cached.__getitems__(list(range(50)))
        cached.stats(), cached.missing(), cached.flush(), cached.explain(), cached.clear(), cached.close()
    assert numbers == untouched


# Threads


@pytest.mark.parametrize("is_shared", [True, False])
def test_samples_that_are_asked_for_one_by_one_are_those_of_a_batch_and_own_their_memory(
    log, is_shared, monkeypatch
):
    if not is_shared:
        monkeypatch.delattr(os, "memfd_create")
    samples = [
        {"image": torch.full((3, 4), index), "box": np.full(2, index), "name": str(index), "none": None}
        for index in range(20)
    ]
    with contextlib.closing(CachedDataset(samples, memory_size="1MB")) as cached:
        cached.__getitems__(list(range(20)))
        for index in range(20):
            same(cached[index], samples[index])
        with torch.inference_mode():
            same(cached[3], samples[3])
        found = cached[3]
        found["image"].fill_(0).resize_(1)
        found["box"][:] = 0
        same(cached[3], samples[3])
        assert (cached.stats().misses, cached.stats().memory_hits, cached.stats().faults) == (20, 23, 0)
        cached.clear()
        same(cached[3], samples[3])
        assert cached.stats().misses == 21 and len(cached.missing()) == 19
        with pytest.raises(IndexError):
            cached[20]
    same(cached[3], samples[3])
    assert len(warnings_of(log)) == (not is_shared)


@pytest.mark.slow
def test_threads_read_one_dataset(tmp_path):
    cached = CachedDataset(Counted(60), memory_size="40kB", disk_size="1MB")
    expected = [Counted(60)[index] for index in range(60)]

    def read(seed):
        for index in np.random.default_rng(seed).integers(0, 60, 25).tolist():
            some = [index, *range(index, min(60, index + seed))]
            for one, sample in zip(some, [cached[index], *cached.__getitems__(some[1:])], strict=True):
                same(sample, expected[one])
            if index == 7:
                cached.clear()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert cached.stats().hits > 0 and cached.stats().faults == 0
    cached.close()


# Samples that changed behind the same path


class Live(Dataset):
    def __init__(self, path):
        self.path = str(path)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        with open(self.path) as file:
            return int(file.read()), index


@pytest.mark.parametrize("memory", [0, "1MB"])
def test_verify_finds_that_samples_have_changed(tmp_path, log, memory):
    file = tmp_path / "value"
    file.write_text("1")
    options = {"cache_dir": tmp_path / "cache", "memory_size": memory}
    for verify in (0.0, 1.0):
        cached = CachedDataset(Live(file), **options, verify=verify)
        assert cached.__getitems__([3, 4]) == [(1, 3), (1, 4)]
        cached.close()
    assert warnings_of(log) == []
    file.write_text("2")
    with contextlib.closing(CachedDataset(Live(file), **options, verify=1.0)) as cached:
        for _ in range(2):
            assert cached.__getitems__([5, 3]) == [(2, 5), (2, 3)]
        assert cached.stats().mismatched == 1 and len(warnings_of(log)) == 1
        assert cached[4] == (2, 4)
    with contextlib.closing(CachedDataset(Live(file), **options)) as cached:
        assert [cached[index] for index in (3, 4, 5)] == [(2, 3), (2, 4), (2, 5)]


# Disks that fail


def test_a_folder_that_is_deleted_or_cannot_be_written_loses_samples_only(tmp_path, log):
    for number, options in enumerate([{"memory_size": 0}, {"memory_size": "1MB"}]):
        folder = tmp_path / f"{number}" / "cache"
        cached = CachedDataset(Batched(20), folder, **options)
        for _ in range(3):
            for index, sample in enumerate(cached.__getitems__(list(range(20)))):
                same(sample, sample_of(index, "dict"))
            cached.flush()
            shutil.rmtree(folder.parent, ignore_errors=True)
        cached.close()


# Around other datasets, and inside of them


def ids_of(batch):
    return [sample["image_id"] for sample in batch]


@pytest.mark.slow
def test_other_datasets_may_be_around_it_and_inside(path):
    plain = Batched(30, "coco")
    some = [3, -1, 7, 7, 0]
    options = {"memory_size": "1MB"}
    pairs = [
        (Subset(plain, some), lambda: Subset(CachedDataset(plain, **options), some)),
        (Subset(plain, some), lambda: CachedDataset(Subset(plain, some), **options)),
        (ConcatDataset([plain, Subset(plain, some)]), lambda: CachedDataset(
            ConcatDataset([plain, Subset(plain, some)]), **options)),
        (ConcatDataset([plain, plain]), lambda: ConcatDataset([CachedDataset(plain, **options)] * 2)),
        (ConcatDataset([plain, plain]), lambda: CachedDataset(plain, **options) + CachedDataset(plain, path)),
        (plain, lambda: CachedDataset(CachedDataset(plain, **options), **options)),
        (plain, lambda: CachedDataset(CachedDataset(plain, path, **options), path, **options)),
        (plain, lambda: pickle.loads(pickle.dumps(CachedDataset(plain, **options)))),
    ]  # fmt: skip
    for expected, make in pairs:
        cached = make()
        assert len(cached) == len(expected)
        for _ in range(2):
            for index in range(-len(expected), len(expected)):
                same(cached[index], expected[index])
            for batch, right in zip(
                DataLoader(cached, 4, collate_fn=list), DataLoader(expected, 4, collate_fn=list), strict=True
            ):
                same(batch, right)
        if isinstance(cached, CachedDataset):
            assert cached.stats().hits > 0
        with pytest.raises(IndexError):
            cached[1000]
    first, second = random_split(CachedDataset(plain, **options), [20, 10])
    assert sorted(ids_of(first) + ids_of(second)) == list(range(30))


def test_a_loader_does_with_it_what_it_does_with_the_dataset():
    for kind, options in [
        ("coco", {"batch_size": 4, "collate_fn": ids_of}),
        ("coco", {"batch_size": None}),
        ("large", {"batch_size": 4}),
        ("tensor", {"batch_size": 4, "drop_last": True, "shuffle": True}),
        ("tensor", {"batch_sampler": [[3, 4], [], [5, 3]], "collate_fn": list}),
    ]:
        plain = Counted(10, kind)
        cached = CachedDataset(plain, memory_size="1MB")
        for _ in range(2):
            orders = []
            for source in (plain, cached):
                generator = torch.Generator().manual_seed(3)
                orders.append(list(DataLoader(source, generator=generator, **options)))
            same(*orders)
        same(list(cached), list(plain))
        same(list(reversed(cached)), list(reversed(plain)))


class Failing(Counted):
    def __getitem__(self, index):
        if index == 3:
            raise KeyError("the third")
        if index == 4:
            raise StopIteration
        return super().__getitem__(index)


def test_errors_of_the_dataset_pass(log):
    cached = CachedDataset(Failing(10), memory_size="1MB")
    for _ in range(2):
        for ask in (lambda: cached[3], lambda: cached.__getitems__([2, 3])):
            with pytest.raises(KeyError, match="the third"):
                ask()
        with pytest.raises(StopIteration):
            cached[4]
    same(cached.__getitems__([2, 5]), [Counted(10)[2], Counted(10)[5]])
    assert (cached.stats().misses, cached.stats().hits, warnings_of(log)) == (2, 0, [])


# Filling it


@pytest.mark.parametrize("options", [{"memory_size": "1MB"}, {"memory_size": 0}])
def test_warmup_goes_on_where_it_was_interrupted(path, options):
    class Interrupted(Counted):
        stops = True

        def __getitem__(self, index):
            if index == 33 and type(self).stops:
                type(self).stops = False  # a class attribute would be part of the identity, but for the name
                raise KeyboardInterrupt
            return super().__getitem__(index)

    log = path.parent / "log"
    with contextlib.closing(CachedDataset(Interrupted(50, log=log), path, name="a", **options)) as cached:
        with pytest.raises(KeyboardInterrupt):
            cached.warmup(batch_size=10)
        assert len(cached.missing()) == 20
        done = cached.warmup(batch_size=10)
        assert (done.computed, done.found) == (20, 30)
        assert cached.missing().tolist() == [] and cached.warmup().computed == 0
    assert max(noted(log).values()) == 2 and noted(log).total() == 53
    with contextlib.closing(CachedDataset(Interrupted(50, log=log), path, name="a", **options)) as cached:
        assert cached.missing().tolist() == []
        same(cached[33], sample_of(33, "dict"))
        assert cached.stats().misses == 0


def test_warmup_tells_what_is_wrong(path):
    with pytest.raises(KeyError, match="the third"):
        CachedDataset(Failing(10), memory_size="1MB").warmup()
    with pytest.raises(OutputError, match="a builtins"):
        CachedDataset([{1}, {2}], memory_size="1MB", name="sets").warmup()
    with pytest.raises(NotCachedError, match="random"):
        CachedDataset(Drawing(), memory_size="1MB").warmup()
    cached = CachedDataset([], memory_size="1MB")
    done = cached.warmup()
    assert (done.computed, done.found, cached.missing().tolist()) == (0, 0, [])
    cached.close()
    with pytest.raises(NotCachedError, match="closed"):
        cached.warmup()
    cached = CachedDataset(Refusing(), memory_size="1MB")
    assert cached.warmup(batch_size=4).computed == 10
    assert cached.missing().tolist() == [1, 3, 5, 7, 9]


@pytest.mark.parametrize("where", ["folder", "filled folder", "ranks", "bucket"])
def test_datasets_of_one_name_and_other_lengths_are_apart(path, monkeypatch, where):
    options = {"cache_dir": {"ranks": None, "bucket": f"file://{path}"}.get(where, path), "name": "scans"}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2" if where == "ranks" else "1")
    monkeypatch.setenv("TORCHCACHE_JOB", str(path))
    given = [range(100), range(1000, 1010), range(2000, 2011)]
    if where == "filled folder":
        with contextlib.closing(CachedDataset(given[0], **options)) as first:
            first.warmup()
    made = [CachedDataset(values, memory_size="1MB", **options) for values in (*given, given[1])]
    for cached, values in zip(made, (*given, given[1]), strict=True):
        assert [cached[1], *cached.__getitems__([2, 3])] == [values[1], values[2], values[3]]
        cached.flush()
    assert [cached.stats().misses for cached in made[:3]] == [0 if where == "filled folder" else 3, 3, 3]
    for cached in made:
        cached.close()


def test_ranks_share_the_work_of_a_warmup(path, monkeypatch):
    log = path.parent / "log"
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("TORCHCACHE_JOB", str(path))
    handles = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        handles.append(CachedDataset(Counted(20, log=log), path, memory_size="1MB"))
        handles[-1].warmup(batch_size=3)
    assert noted(log) == dict.fromkeys(map(str, range(20)), 1)
    for handle in handles:
        assert handle.missing().tolist() == []
        handle.close()


# Memory


@pytest.mark.slow
def test_memory_and_descriptors_go_with_the_dataset():
    CachedDataset([1], memory_size="1MB")[0]
    gc.collect()
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for disk in (0, "1MB"):
        for _ in range(10):
            cached = CachedDataset(Batched(20), memory_size="30kB", disk_size=disk)
            cached.__getitems__(list(range(20)))
            copy.deepcopy(cached)[3]
        del cached
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before and threading.active_count() == threads


# Many samples


# What users do to it


class Named(CachedDataset):
    """Somebody's own, with an attribute and a method."""

    def __init__(self, dataset, **options):
        super().__init__(dataset, memory_size="1MB", **options)
        self.extra = [5]

    def __getitem__(self, index):
        return super().__getitem__(index), self.extra


def test_attributes_of_ones_own_are_pickled():
    cached = Named(Given())
    cached.more = 7
    for one in (pickle.loads(pickle.dumps(cached)), copy.deepcopy(cached), copy.copy(cached), cached):
        assert type(one) is Named and (one.extra, one.more) == ([5], 7)
        assert one[3] == ({"index": 3}, [5])
    assert cached.stats().misses == 1


class Epochs(Dataset):
    """Its samples depend on the epoch."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return 100 * self.epoch + index

    def set_epoch(self, epoch):
        self.epoch = epoch

    def set_nothing(self, value):
        return value


@pytest.mark.parametrize("name", [None, "epochs"])
def test_a_method_that_changes_the_dataset_ends_caching(log, path, name):
    cached = CachedDataset(Epochs(), path, memory_size="1MB", name=name)
    assert [cached[3], cached[3], cached.set_nothing(4), cached[3]] == [3, 3, 4, 3]
    cached.set_epoch(0)
    assert cached[3] == 3 and cached.stats().hits == 3 and warnings_of(log) == []
    for epoch in (1, 2):
        cached.set_epoch(epoch)
        assert [cached[3], *cached.__getitems__([3, 5])] == [100 * epoch + i for i in (3, 3, 5)]
    (warning,) = warnings_of(log)
    assert "set_epoch changed the dataset" in warning.getMessage()
    assert CachedDataset(Epochs(), path, memory_size="1MB", name=name)[3] == 3


@pytest.mark.parametrize("options", [{"memory_size": "1MB"}, {"memory_size": 0, "disk_size": "1MB"}])
@pytest.mark.parametrize("mode", [lambda: torch.device("meta"), torch.inference_mode, torch.no_grad])
def test_modes_of_torch_do_not_change_samples(options, mode):
    cached = CachedDataset(Batched(9, "coco"), **options)
    with mode():
        batches = [cached.__getitems__(list(range(9))), [cached[index] for index in range(9)]]
    for batch in batches:
        for index, sample in enumerate(batch):
            same(sample, sample_of(index, "coco"))
            assert not sample["boxes"].is_inference() or batch is batches[0]
    assert cached.stats().hits == 9


class Hooked(Live):
    """Calls `hooks` after it has read a sample."""

    hooks = ()

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        for hook in type(self).hooks:
            hook()
        return sample


@pytest.mark.parametrize("memory", [0, "1MB"])
@pytest.mark.parametrize("when", ["loading", "reading"])
def test_a_sample_that_is_on_its_way_does_not_survive_a_clear(path, memory, when, monkeypatch):
    file = path.parent / "value"
    file.write_text("1")
    options = {"cache_dir": path, "memory_size": memory, "name": "live"}
    if when == "reading":
        with contextlib.closing(CachedDataset(Hooked(file), **options)) as cached:
            assert cached.__getitems__([3, 4]) == [(1, 3), (1, 4)]
    with contextlib.closing(CachedDataset(Hooked(file), **options)) as cached:
        other = copy.deepcopy(cached)

        def clear():
            file.write_text("2")
            other.clear()

        with monkeypatch.context() as patch:
            if when == "loading":
                patch.setattr(Hooked, "hooks", [clear])
            else:
                disk = cached._store.levels.tiers[-1]
                get = disk.get
                patch.setattr(disk, "get", lambda keys: [get(keys), clear()][0])
            assert cached[3] in [(1, 3), (2, 3)]
        assert [cached[3], other[3], cached[3], cached[4]] == [(2, 3), (2, 3), (2, 3), (2, 4)]
        cached.flush()
        other.close()
    with contextlib.closing(CachedDataset(Hooked(file), **options)) as cached:
        assert [cached[3], cached[4]] == [(2, 3), (2, 4)]
