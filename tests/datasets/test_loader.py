"""`CacheLoader` gives what the function gives, whatever happens to what it keeps: in one process."""

import contextlib
import os
import pickle
import tempfile

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.helpers.datasets import memory_of, same, sample_of
from tests.helpers.redis import RedisServer
from tests.helpers.storage import warnings_of
from torchcache2 import CachedDataset, CacheLoader
from torchcache2.core.errors import OptionError, OutputError
from torchcache2.datasets.identity import identify_prefix

SOAK = bool(os.environ.get("SOAK"))
KEYS = [0, 1, -1, 2**63 - 1, -(2**63), 2**64, -(2**200), "", "1", "é", "\ud800", "x" * 999, b"", b"1", b"\0"]
LOCAL = {
    "memory": {"memory_size": "10MB"},
    "both": {"memory_size": "10MB", "cache_dir": True},
    "folder": {"memory_size": 0, "cache_dir": True},
    "scratch": {"memory_size": "33kB", "disk_size": "10MB"},
}


@pytest.fixture(params=LOCAL if SOAK else ["memory", "folder"])
def options(request, path):
    """Options of a loader, in places where values may be."""
    found = {"backend": "local", "key_prefix": "test", **LOCAL[request.param]}
    return found | ({"cache_dir": path} if "cache_dir" in found else {})


class Function:
    """Something to load values with, which notes what it was asked for."""

    def __init__(self, value=lambda key: ("value of", key)):
        self.asked, self.value = [], value

    def __call__(self, key):
        self.asked.append(key)
        return self.value(key)


def test_a_key_is_loaded_once(options):
    load = Function()
    with CacheLoader(**options) as loader:
        for _ in range(3):
            for key in KEYS:
                same(loader.get(key, load), ("value of", key))
        same(load.asked, KEYS)
        assert loader.num_keys() == len(KEYS)
        stats = loader.stats()
        assert (stats.misses, stats.hits, stats.corrupt, stats.faults) == (len(KEYS), 2 * len(KEYS), 0, 0)


def test_many_keys_are_loaded_once_in_their_order(options):
    load = Function(lambda key: sample_of(hash(key) % 1000, "dict"))
    with CacheLoader(**options) as loader:
        wanted = ["b", 1, "b", "1", 1, b"b", 1]
        for turn in range(2):
            values = loader.get_many(wanted, load)
            for key, value in zip(wanted, values, strict=True):
                same(value, load.value(key))
            assert load.asked == ["b", 1, "1", b"b"], turn
            leaves = [leaf for value in values for leaf in memory_of(value)]
            places = {leaf.data_ptr() if torch.is_tensor(leaf) else leaf.ctypes.data for leaf in leaves}
            assert len(places) == len(leaves)  # an edit in place changes one of them
        assert loader.get_many([], load) == []
        assert loader.stats().misses + loader.stats().hits == 14


def test_tuples_are_keys(options):
    keys = [(), (1,), ("1",), (b"1",), (1, 2), ((1, 2),), (1, (2,)), ("a", "b"), ("ab",), "ab", 1]
    load = Function()
    with CacheLoader(**options) as loader:
        for key in keys:
            same(loader.get(key, load), ("value of", key))
        assert loader.get_many(keys, load) == [("value of", key) for key in keys]
        assert loader.get((np.int64(1), torch.tensor(2)), load) == ("value of", (1, 2))
        same(load.asked, keys)


def test_missing_keys_are_loaded_together(options):
    asked = []

    def load_many(keys):
        asked.append(keys)
        table = torch.arange(10.0).expand(len(keys), 10)  # values that share memory
        return [{"key": key, "row": row} for key, row in zip(keys, table, strict=True)]

    with CacheLoader(**options) as loader:
        loader.get(3, lambda key: {"key": 3, "row": torch.arange(10.0)})
        for wanted in ([5, 3, (1, "a"), 5], [3, 5], ["new", 5], [(1, "a"), 6, 7]):
            values = loader.get_many(wanted, load_many=load_many)
            assert [value["key"] for value in values] == wanted
            values[0]["row"] += 1
            assert all(torch.equal(value["row"], torch.arange(10.0)) for value in values[1:])
        assert asked == [[5, (1, "a")], ["new"], [6, 7]] and loader.num_keys() == 6
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            loader.get_many([8, 9], load_many=lambda keys: [1])
        for functions in ({}, {"load_fn": str, "load_many": list}):
            with pytest.raises(TypeError, match="one of load_fn, which takes a key, and load_many"):
                loader.get_many([1], **functions)


@pytest.mark.parametrize(
    "key",
    [None, 1.0, (1, 0.5), [1], torch.tensor([1]), {"a": 1}, object()],
    ids=lambda key: type(key).__name__,
)
def test_other_keys_are_errors(key):
    load = Function()
    with CacheLoader("local", "test", memory_size="1MB") as loader:
        with pytest.raises(TypeError, match="CacheLoader is one int, str or bytes, or a tuple"):
            loader.get(key, load)
        with pytest.raises(TypeError):
            loader.get_many([1, key], load)
        assert load.asked == []


def test_none_is_a_value(options):
    load = Function(lambda key: None)
    with CacheLoader(**options) as loader:
        assert loader.get("key", load) is None and loader.get("key", load) is None
        assert load.asked == ["key"] and loader.num_keys() == 1


def test_what_is_raised_passes_through_and_nothing_is_kept(options):
    class OopsError(Exception):
        pass

    def raising(key):
        if key == 2:
            raise OopsError(key)
        return key

    load = Function(raising)
    with CacheLoader(**options) as loader:
        for _ in range(2):
            with pytest.raises(OopsError, match="2"):
                loader.get_many([1, 2, 3], load)
        assert load.asked == [1, 2, 1, 2] and loader.num_keys() == 0
        for stop in (KeyboardInterrupt, StopIteration):
            with pytest.raises(stop):
                loader.get(1, Function(lambda key, stop=stop: exec("raise stop", {"stop": stop})))
        assert loader.get_many([1, 3], load) == [1, 3] and loader.num_keys() == 2


def test_what_cannot_be_stored_is_an_error_at_first_and_then_a_warning(options, log):
    odd = Function(lambda key: {"fine": 1, "odd": {1, 2}} if key % 2 else key)
    with CacheLoader(**options) as loader:
        with pytest.raises(OutputError, match="set"):
            loader.get(1, odd)
        assert loader.get(2, odd) == 2
        for _ in range(2):
            values = loader.get_many([1, 3, 1, 2], odd)
            assert values == [odd.value(1), odd.value(3), odd.value(1), 2]
            assert values[0] is not values[2]
        assert odd.asked.count(2) == 1 and loader.num_keys() == 1
        (record,) = warnings_of(log)
        assert "some samples cannot be cached" in record.getMessage()
        assert loader.stats().bypasses == {"refused": 4}


def test_prefix_and_version_say_which_values_are_meant(path):
    given = [
        {"key_prefix": "a"},
        {"key_prefix": "a", "version": 1},
        {"key_prefix": "a", "version": "1"},
        {"key_prefix": "a1"},
    ]
    for turn in range(2):
        for number, some in enumerate(given):
            load = Function(lambda key, number=number: number)
            with CacheLoader("local", **some, cache_dir=path, memory_size="1MB") as loader:
                assert loader.get(1, load) == number and loader.num_keys() == 1
            assert len(load.asked) == (turn == 0)
    dataset = CachedDataset([7, 8], path, name="a", memory_size=0)
    assert (dataset[1], len(dataset.missing())) == (8, 1)
    dataset.close()


@pytest.mark.parametrize(
    ("prefix", "version", "namespace"),
    [
        ("a", None, "8447cecd2e0a862108307745c833d078"),
        ("a", 1, "f2564818d2620c9b97f99babbcae74db"),
        ("a", "1", "042e8e9a6d96c735860cf2402d585774"),
        ("é", 2, "fb90420f51edb9c2d9b2f883dfb6da3a"),
    ],
)
def test_namespaces_are_those_of_earlier_versions(prefix, version, namespace):
    assert identify_prefix(prefix, version).namespace.hex() == namespace


class OfLoader(torch.nn.Module):
    """Something that is cached, and has a loader."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def __getitem__(self, index):
        return self.loader.get(index, str)

    def __len__(self):
        return 3


def test_a_loader_of_a_dataset_stands_for_its_prefix_and_version(path):
    found = []
    for prefix, version in [("a", 1), ("a", 1), ("a", 2), ("b", 1)]:
        with (
            CacheLoader("local", prefix, version=version, memory_size="1MB") as loader,
            contextlib.closing(CachedDataset(OfLoader(loader), path)) as data,
        ):
            assert data[1] == "1"
            found.append(repr(data))
    assert found[0] == found[1] and len(set(found)) == 3


class Scaled:
    """Loads by its attributes, and counts how often, in several ways."""

    def __init__(self):
        self.scale, self.table, self.calls, self.asked, self.file = 2, [1], 0, [], None

    def load(self, key):
        self.calls += 1
        self.asked.append(key)
        self.file = self.file or open(os.devnull)  # noqa: SIM115
        return key * self.scale * self.table[0] * FACTORS["global"]


FACTORS = {"global": 1}


@pytest.mark.parametrize("change", ["scale", "table", "global"])
def test_a_function_without_a_prefix_is_known_as_it_is_now(change, path, monkeypatch):
    monkeypatch.setitem(FACTORS, "global", 1)
    for _ in range(2):  # again, in the same folder
        one = Scaled()
        with CacheLoader("local", cache_dir=path, memory_size="1MB") as loader:
            assert [loader.get(key, one.load) for key in (3, 4, 3, 4)] == [6, 8, 6, 8]
            assert one.calls == len(one.asked) == (2 if one.file else 0)
        if one.file:
            one.file.close()
    with CacheLoader("local", cache_dir=path, memory_size="1MB") as loader:
        assert loader.get(3, one.load) == 6
        if change == "scale":
            one.scale = 20
        elif change == "table":
            one.table[0] = 10
        else:
            monkeypatch.setitem(FACTORS, "global", 10)
        assert loader.get(3, one.load) == loader.get(3, one.load) == 60 and one.calls == 1
    one.file.close()


def test_clear_forgets_this_prefix(options):
    load = Function()
    with CacheLoader(**options) as loader, CacheLoader(**options | {"key_prefix": "other"}) as other:
        loader.get(1, load), other.get(1, load)
        loader.clear()
        assert (loader.num_keys(), other.num_keys()) == (0, 1)
        loader.get(1, load), other.get(1, load)
        assert len(load.asked) == 3


def test_what_is_cleared_while_it_is_loaded_is_not_kept(options):
    with CacheLoader(**options) as loader:

        def load(key):
            loader.clear()
            return key

        assert loader.get(1, load) == 1 and loader.num_keys() == 0


@pytest.mark.parametrize("off", ["closed", "environment", "sizes"])
def test_a_loader_that_keeps_nothing_loads(off, monkeypatch):
    if off == "environment":
        monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    load, loader = Function(), CacheLoader("local", "test", memory_size=0 if off == "sizes" else "1MB")
    if off == "closed":
        loader.get(1, load)
        loader.close()
        loader.close()
    assert [loader.get(1, load), loader.get_many([1, 1], load)] == [load.value(1), [load.value(1)] * 2]
    assert len(load.asked) == 3 + (off == "closed") and loader.num_keys() == 0
    loader.flush(), loader.clear()
    assert loader.stats().memory_rows == 0
    assert repr(loader) == "<CacheLoader 'test' in memory>"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backend": "memcached"}, "backend='memcached': expected 'redis' or 'local'"),
        ({"key_prefix": 7}, "key_prefix=7: expected a text"),
        ({"version": 1.5}, "version=1.5: expected a text or an int"),
        ({"writer_buffer_size": 0}, "writer_buffer_size=0: expected a number of samples from 1 on"),
        ({"writer_buffer_size": True}, "writer_buffer_size=True"),
        ({"cluster_mode": 1}, "cluster_mode=1: expected True or False"),
        ({"capacity_per_node": "much"}, "capacity_per_node='much': expected bytes"),
        (
            {"capacity_per_node": 1000},
            "capacity_per_node=1000 is for backend='redis' only: give memory_size",
        ),
        ({"hosts": "redis://:secret@h"}, "hosts are Redis servers: pass backend='redis' as well"),
        ({"policy": "fifo"}, "policy='fifo': expected 'keep' or 'lru'"),
        ({"compression": "zip"}, "compression='zip'"),
        ({"cache_dir": "redis"}, "cache_dir is a folder. To keep samples on a server, pass backend='redis'"),
        (
            {"cache_dir": "redis://:secret@host"},
            "cache_dir is the URL of a Redis.*backend='redis', hosts=",
        ),
        ({"cache_dir": 7}, "cache_dir=7: expected None, the path of a folder, or the URL"),
        ({"memory_size": "much"}, "memory_size='much'"),
        ({"prefix": "a"}, r"CacheLoader has no option 'prefix': did you mean key_prefix\?"),
        ({"ttl": 3}, "has no option 'ttl': the options are "),
        ({"path": "a"}, "CacheLoader has no option 'path': it is cache_dir"),
        (
            {"backend": "redis", "hosts": "redis://h", "cache_dir": "a"},
            "cache_dir and backend='redis': .* not in both",
        ),
        ({"backend": "redis", "hosts": "h", "disk_size": 9}, "hosts has a text that is not the URL"),
        ({"backend": "redis", "hosts": []}, "hosts is empty"),
        ({"backend": "redis", "hosts": [{"host": "h"}], "disk_size": 9}, "disk_size and backend"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_options_that_cannot_be_meant(options, text):
    for face in (CacheLoader, lambda **given: CachedDataset([1], **given)):
        if face is not CacheLoader and set(options) & {"key_prefix", "prefix"}:
            continue
        expected = text.replace("CacheLoader", "(CacheLoader|CachedDataset)")
        named = {"key_prefix": "test"} if face is CacheLoader else {}
        with pytest.raises(OptionError, match=expected) as caught:
            face(**{"backend": "local", **named, **options})
        assert "secret" not in str(caught.value)


def test_a_copy_finds_the_same(options):
    load = Function()
    with CacheLoader(**options) as loader:
        loader.get(1, load)
        loader.flush()
        with pickle.loads(pickle.dumps(loader)) as other:
            assert other.get(1, load) == load.value(1)
            assert other.stats().hits == loader.stats().hits == 1
        assert len(load.asked) == 1


VALUES = st.tuples(st.sampled_from(["dict", "tensor", "ragged", "coco", "large"]), st.integers(0, 30))


class Machine(RuleBasedStateMachine):
    """A loader, which may forget, beside a dict."""

    is_spoilt = False

    @initialize(
        memory=st.sampled_from([0, 30_000, 200_000, "10MB"]),
        disk=st.sampled_from([None, 0, 30_000, 200_000, "10MB"]),
        has_path=st.booleans(),
        policy=st.sampled_from(["keep", "lru"]),
    )
    def begin(self, memory, disk, has_path, policy):
        self.folder = contextlib.ExitStack()
        folder = self.folder.enter_context(tempfile.TemporaryDirectory(prefix="test-"))
        self.options = {"memory_size": memory, "disk_size": disk, "policy": policy}
        self.options["backend"] = "local"
        if has_path:
            self.options["cache_dir"] = folder + "/cache"
        self.known = {}
        self.open()

    def open(self):
        self.loader = CacheLoader(key_prefix="p", **self.options)

    @rule(wanted=st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=8))
    def many(self, wanted):
        new = {}

        def load(key):
            assert key not in new or self.loader._store is None  # both sizes are 0
            new[key] = dict(reversed(wanted))[key]
            kind, number = self.known.setdefault(key, new[key])  # it may be forgotten, but not another one
            return sample_of(number, kind)

        keys = [key for key, _ in wanted]
        values = self.loader.get_many(keys, load)
        for key, value in zip(keys, values, strict=True):
            kind, number = self.known[key]
            same(value, sample_of(number, kind))
            for leaf in memory_of(value):
                leaf[...] = 1

    @rule(key=st.sampled_from(KEYS))
    def fail(self, key):
        def load(key):
            raise ZeroDivisionError

        try:
            value = self.loader.get(key, load)
        except ZeroDivisionError:
            return
        kind, number = self.known[key]
        same(value, sample_of(number, kind))

    @rule()
    def count(self):
        assert self.loader.num_keys() <= len(self.known)

    @rule()
    def flush(self):
        self.loader.flush()

    @rule()
    def clear(self):
        self.loader.clear()
        assert self.loader.num_keys() == 0
        self.known = {}

    @rule()
    def reopen(self):
        self.loader.close()
        self.open()

    @rule()
    def copied(self):
        with pickle.loads(pickle.dumps(self.loader)) as other:
            assert other.num_keys() <= len(self.known)

    def teardown(self):
        if hasattr(self, "loader"):
            stats = self.loader.stats()
            assert (stats.corrupt > 0) <= self.is_spoilt and (stats.faults, stats.bypasses) == (0, {})
            self.loader.close()
            self.folder.close()


class RemoteMachine(Machine):
    """The same on two servers, which lose values, and have garbage in their place."""

    @initialize(
        memory=st.sampled_from([None, 30_000, "10MB"]),
        codec=st.sampled_from(["none", "brotli"]),
        buffer=st.sampled_from([1, 2, 20]),
    )
    def begin(self, memory, codec, buffer):
        self.folder = contextlib.ExitStack()
        self.clients = [self.folder.enter_context(contextlib.closing(one.client())) for one in self.servers]
        self.lose()
        hosts = [server.url for server in self.servers]
        self.options = {"hosts": hosts, "compression": codec, "memory_size": memory}
        self.options["writer_buffer_size"] = buffer
        self.known = {}
        self.open()

    @rule()
    def lose(self):
        for client in self.clients:
            client.flushall()

    @rule(garbage=st.sampled_from([b"", b"\0" * 99]), cut=st.integers(0, 9))
    def spoil(self, garbage, cut):
        for client in self.clients:
            for name in client.scan_iter():
                self.is_spoilt = True
                client.set(name, garbage or client.get(name)[cut:-1])


def run_machine(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=1000 if SOAK else 8,
            stateful_step_count=20,
            phases=[Phase.generate, Phase.shrink] if SOAK else [Phase.generate],
            derandomize=not SOAK,
        ),
    )


def test_it_is_a_dict_that_may_forget():
    run_machine(Machine)


def test_it_is_a_dict_that_may_forget_on_servers():
    with RedisServer() as one, RedisServer() as other:
        RemoteMachine.servers = one, other
        run_machine(RemoteMachine)
