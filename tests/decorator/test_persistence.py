"""`persistent=True`: what one run has computed, another one finds."""

import contextlib
import copy
import gc
import json
import logging
import os
import pickle
import shutil
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from tests.helpers import warm
from tests.helpers.outputs import assert_same, warnings_in
from torchcache2 import Cache, CacheSettings, Keys, OptionError, torchcache
from torchcache2.core.rows import Rows
from torchcache2.files.codec import codec
from torchcache2.files.filesystem import FileSystem, ulid
from torchcache2.files.layout import SEGMENT
from torchcache2.files.segment import encode, write

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
MIB = 1 << 20


class _Sizes(logging.Handler):
    """Lists the sizes of computed batches. A list that forwards refer to would be part of the key."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.sizes = []

    def emit(self, record):
        self.sizes.append(record.args[0])


_SIZES = _Sizes()
logging.getLogger("computed").addHandler(_SIZES)
logging.getLogger("computed").setLevel(logging.DEBUG)


def note(x):
    logging.getLogger("computed").debug("%d", len(x))


class Net(nn.Module):
    def __init__(self, scale=1.0, seed=0, **options):
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(8, 4)
        self.scale = scale
        for name, value in options.items():
            setattr(self, f"torchcache_{name}", value)
        self.eval().requires_grad_(False)

    def forward(self, x):
        note(x)
        return self.fc(x) * self.scale


def run(path, base=Net, **options):
    """The class as a new run of a script would have it: with nothing in memory."""

    class Cached(base):
        forward = base.forward

    options = {"persistent": True, "persistent_cache_dir": path, "probe": False} | options
    return torchcache(**options)(Cached)


def counts(cached):
    stats = cached.cache_instance.stats()
    return stats.hits, stats.misses


def close(*cached):
    for one in cached:
        one.cache_instance.close()


def found(call):
    """The output of a call that computes nothing."""
    output, sizes = computed(call)
    assert sizes == []
    return output


def fill(path, *args, base=Net, x=X, options=None):
    """What a run leaves that computes one batch; its output."""
    module = run(path, base, **(options or {}))(*args)
    output = module(x)
    close(module)
    return output


def computed(call):
    """The output of a call, and the sizes of the batches that it computed."""
    _SIZES.sizes.clear()
    output = call()
    return output, _SIZES.sizes.copy()


def segments(path, module_hash="*"):
    return sorted(Path(path).glob(f"{module_hash}/*.safetensors"))


def namespaces(path):
    return sorted(file.parent for file in Path(path).glob("*/fingerprint.json"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows"


# Another run

SCRIPT = """
import json, sys
import torch
from torch import nn
from torchcache2 import torchcache

options = {"persistent": True, "persistent_cache_dir": sys.argv[1], "probe": False}
torch.manual_seed(7)
torch.set_num_threads(1)


@torchcache(**options)
class Net(nn.Module):
    def __init__(self, width, act="relu"):
        super().__init__()
        self.fc = nn.Linear(8, width)
        self.act = getattr(torch, act)
        self.eval().requires_grad_(False)

    def forward(self, x):
        print("computed", len(x), file=sys.stderr)
        return {"out": self.act(self.fc(x)), "norm": x.norm(dim=1), "name": "net"}


@torchcache(**options)
def function(x, scale=1.0):
    print("computed", len(x), file=sys.stderr)
    return x * scale, None, [x.sum(1)]


class Plain(nn.Sequential):
    def forward(self, x):
        print("computed", len(x), file=sys.stderr)
        return super().forward(x)


class Unread(nn.Module):
    def __init__(self):
        super().__init__()
        self.lock = __import__("threading").Lock()  # cannot be read: good for one process, but for the name

    def forward(self, x):
        print("computed", len(x), file=sys.stderr)
        return x + 1


x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
instance = Plain(nn.Linear(8, 3), nn.LayerNorm(3)).eval().requires_grad_(False)
named = torchcache(**options, persistent_module_hash="unread, version 1")(Unread())
cached = {
    "class": Net(4, act="tanh"),
    "function": function,
    "instance": torchcache(**options)(instance),
    "name": named,
}
outputs = {kind: call(x) for kind, call in cached.items()}
stats = {kind: call.cache_instance.stats() for kind, call in cached.items()}
print(json.dumps({
    "counts": {kind: [s.hits, s.misses, s.faults, s.corrupt] for kind, s in stats.items()},
    "names": {kind: call.cache_instance.module_hash for kind, call in cached.items()},
    "dirs": {kind: str(call.cache_instance.cache_dir) for kind, call in cached.items()},
}))
torch.save(outputs, sys.argv[2])
"""


def test_a_second_process_computes_nothing(path, tmp_path):
    # It is another file, too, and strings have other hashes.
    scripts = tmp_path / "first.py", tmp_path / "second.py"
    for script in scripts:
        script.write_text(SCRIPT)
    first = warm.run(scripts[0], path, tmp_path / "first.pt")
    assert first.err.count("computed 32\n") == 4
    second = warm.run(scripts[1], path, tmp_path / "second.pt", seed="1", warnings=["error"], whole=True)
    assert second.err == ""
    first, second = json.loads(first.out), json.loads(second.out)
    assert set(map(tuple, first["counts"].values())) == {(0, 32, 0, 0)}
    assert set(map(tuple, second["counts"].values())) == {(32, 0, 0, 0)}
    assert second["names"] == first["names"]
    assert set(second["dirs"].values()) == {str(path)}
    assert sorted(first["names"].values()) == sorted(folder.name for folder in namespaces(path))
    before, after = (torch.load(tmp_path / f"{name}.pt", weights_only=False) for name in ("first", "second"))
    assert_same(before, after)


@pytest.mark.parametrize(
    "args, lines",
    [
        ((1.0, 1), ["weights: fc.bias changed", "weights: fc.weight changed"]),
        ((3.0,), ["attribute scale: 1.0 → 3.0"]),
    ],
)
def test_another_module_is_computed_and_explained(path, args, lines):
    fill(path, 1.0)
    module = run(path)(*args)
    assert computed(lambda: module(X))[1] == [6]
    (other,) = {file.parent.name for file in path.glob("*/*")}
    explained = [f"compared with {other} in {path}:", *lines]
    assert module.cache_instance.explain().splitlines() == explained
    # That it has left rows there itself changes nothing about it.
    module.cache_instance.flush()
    assert len(segments(path)) == 2
    assert module.cache_instance.explain().splitlines() == explained
    close(module)


def test_explain_compares_with_what_was_used_last_of_the_same_class(path):
    class Other(Net):
        def forward(self, x):
            return x

    fill(path, 2.0)
    fill(path, 3.0)
    other = torchcache(persistent=True, persistent_cache_dir=path)(Other)()
    other(X)
    close(other)
    ages = {"2.0": 50, "3.0": 100, "1.0": 0}
    for file in segments(path):
        age = ages[_document(file.parent)["values"]["attribute scale"]]
        os.utime(file, (time.time() - age,) * 2)
    module = run(path)(4.0)
    module(X)
    assert "attribute scale: 2.0 → 4.0" in module.cache_instance.explain()
    close(module)


def _document(folder):
    return json.loads((folder / "fingerprint.json").read_text())


def test_explain_knows_what_earlier_runs_have_left(path):
    first = run(path)()
    assert f"is the first of Cached in this process, and in {path}\n" in first.cache_instance.explain()
    first(X)
    assert first.cache_instance.explain().endswith(f"is the first of Cached in this process, and in {path}")
    close(first)
    module = run(path)()
    module(X)
    assert module.cache_instance.explain().endswith(f"an earlier run has left rows of it in {path}")
    close(module)


@pytest.mark.parametrize("text", ["", "[]", '{"class": "CLASS", "parts": {"a": "zz"}}', "\x00" * 9])
def test_explain_of_a_strange_directory_says_that_it_is_the_first(path, text):
    fill(path)
    (file,) = path.glob("*/fingerprint.json")
    file.write_text(text.replace("CLASS", f"{__name__}.run.<locals>.Cached"))
    module = run(path)(5.0)
    module(X)
    assert "is the first of Cached in this process" in module.cache_instance.explain()
    close(module)


# What is written when


def writers():
    return {thread for thread in threading.enumerate() if thread.name.startswith("torchcache2")}


def test_a_module_that_is_dropped_leaves_its_rows_on_disk_and_nothing_in_memory(path):
    # Its class is in cycles: the garbage collector finds it.
    before = writers()
    module = run(path)()
    module(X)
    tiers = weakref.ref(module.cache_instance.engine.tiers)
    del module
    gc.collect()
    assert tiers() is None
    deadline = time.monotonic() + warm.DEADLINE
    while writers() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert writers() <= before
    assert len(segments(path)) == 1


# Memory and disk

WIDTH = 2048  # 8 KiB a row
MANY = torch.arange(600.0)[:, None] + torch.linspace(0, 0.5, WIDTH)
SMALL = {"max_memory_cache_size": 18 * MIB, "compression": "none"}  # of which 16 MiB are for rows that wait


def wide(path, **options):
    @torchcache(persistent=True, persistent_cache_dir=path, **(SMALL | {"probe": False} | options))
    def function(x):
        note(x)
        return x * 2

    return function


def epoch(function, x=MANY):
    for batch in x.split(50):
        assert torch.equal(function(batch), batch * 2)
    return function.cache_instance.stats()


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_what_does_not_fit_in_memory_is_found_on_disk(path, log, policy):
    function = wide(path, policy=policy)
    stats = epoch(function)
    assert 0 < stats.memory_rows < 300 and stats.disk_rows == 600
    assert stats.memory_bytes <= 2 * MIB
    for _ in range(2):
        stats = epoch(function)
        assert stats.misses == 600 and stats.memory_rows < 300
    assert stats.hits == 1200 and stats.disk_evictions == 0
    function.cache_instance.flush()
    assert epoch(function).misses == 600
    assert warnings_in(log) == []
    close(function)


@pytest.mark.parametrize("policy", ["keep", "lru"])
def test_rows_that_are_read_enter_memory_while_there_is_room(path, policy):
    function = wide(path)
    epoch(function)
    close(function)
    function = wide(path, policy=policy)
    function(MANY[:100])
    assert function.cache_instance.stats().memory_rows == 100
    stats = epoch(function)
    assert 100 < stats.memory_rows < 300
    assert (stats.misses, stats.evictions) == (0, 0)
    shutil.rmtree(path)
    found(lambda: function(MANY[:100]))
    close(function)


# Options


@pytest.mark.parametrize("decorate", [Net, Net(), lambda x: x], ids=["class", "instance", "function"])
def test_options_are_checked_when_something_is_decorated(decorate, tmp_path):
    file, foreign = tmp_path / "a file", tmp_path / "photos"
    file.write_text("text")
    foreign.mkdir()
    (foreign / "one.jpg").write_text("a photo")
    decorate = copy.deepcopy(decorate) if not isinstance(decorate, type) else type("Own", (decorate,), {})
    for options, message in (
        ({"persistent_cache_dir": file}, "is a file: a cache directory is a folder of its own"),
        ({"persistent_cache_dir": foreign}, r"is not a cache directory and not empty \(it has 'one.jpg'\)"),
        ({"persistent_cache_dir": tmp_path / "new", "compression": "zstd"}, r"^compression='zstd': expected"),
        ({"persistent_dir": tmp_path / "new"}, r"unknown option 'persistent_dir'"),
    ):
        with pytest.raises(OptionError, match=message):
            torchcache(**options)(decorate)
    torchcache(persistent=False, persistent_cache_dir=foreign)(decorate)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a file", "one.jpg", "photos"]


def test_nothing_is_made_before_there_are_rows(path, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for folder in (path, None):
        run(folder)()
    for options in ({"enabled": False}, {"persistent": False}):
        module = torchcache(**({"persistent": True, "persistent_cache_dir": path} | options))(Net())
        assert torch.equal(module(X), module.fc(X))
        close(module)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    module = run(path)()
    for _ in range(2):
        assert computed(lambda: module(X))[1] == [6]
    close(module)
    assert list(tmp_path.iterdir()) == []


# What comes back


class Structured(Net):
    def forward(self, x):
        note(x)
        y = self.fc(x)
        return {
            "model": BaseModelOutput(last_hidden_state=y, hidden_states=(y * 2, y.half())),
            "none": None,
            "number": 3,
            "text": "words",
            "numbers": [x.sum(1), (x > 0, x.long())],
            "strided": y.t().contiguous().t(),
        }


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3)
        self.eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def forward(self, x):
        note(x)
        return self.conv(x)


@pytest.mark.parametrize("compression", ["brotli", "blosc2", "none"])
@pytest.mark.parametrize("size", ["1GB", 0], ids=["memory", "no memory"])
@pytest.mark.parametrize("base", [Structured, Convolution])
@pytest.mark.one_in(2)
def test_structures_and_strides_come_back_as_they_were(path, compression, size, base):
    options = {"compression": compression, "max_memory_cache_size": size}
    x = X if base is Structured else torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
    output = fill(path, base=base, x=x, options=options)
    if base is Convolution:
        assert output.is_contiguous(memory_format=torch.channels_last) and not output.is_contiguous()
    module = run(path, base, **options)()
    for _ in range(2):
        again = found(lambda: module(x))
        assert_same(output, again)
        assert base is Structured or again.stride() == output.stride()
    close(module)


# Rows that are wrong


def tamper(path):
    """Give every row another value, with a checksum that fits."""
    (file,) = segments(path)
    tensors = safetensors.torch.load_file(file)
    keys = Keys(bytes.fromhex(file.parent.name), tensors["keys"].numpy())
    file.unlink()
    rows = Rows.from_pytree(tensors["output"] + 1, len(keys), device=CPU)
    write(FileSystem(), str(file.parent), ulid() + SEGMENT, encode([(keys, rows)], codec("none", 0)))


def test_verify_finds_wrong_rows_on_disk_and_deletes_them(path, log):
    options = {"compression": "none"}
    output = fill(path, options=options)
    tamper(path)
    module = run(path, **options)()
    assert torch.equal(module(X), output + 1)  # nothing tells, but
    close(module)

    module = run(path, **options, verify=1.0)()
    again, sizes = computed(lambda: module(X))
    assert torch.equal(again, output) and len(sizes) > 0
    stats = module.cache_instance.stats()
    assert (stats.verified, stats.mismatched, stats.corrupt) == (6, 6, 0)
    assert sum("differ from what the forward computes now" in record.getMessage() for record in log) == 1
    assert segments(path) == []
    again, sizes = computed(lambda: module(X))
    assert torch.equal(again, output) and sizes == [6]
    close(module)

    module = run(path, **options, verify=1.0)()
    assert torch.equal(module(X), output)
    stats = module.cache_instance.stats()
    assert (stats.hits, stats.verified, stats.mismatched) == (6, 6, 0)
    close(module)


# What else there is in a program


def test_under_compile_another_run_finds_the_rows(path):
    torch.compiler.reset()
    output = fill(path)
    for i in range(2):
        module = run(path)()
        compiled = torch.compile(module, backend="eager")
        again = found(lambda compiled=compiled: compiled(X))
        assert torch.equal(again, output)
        fresh = torch.arange(40.0).view(5, 8) - i
        assert torch.equal(compiled(fresh), module.fc(fresh) * 1.0)
        assert counts(module) == (6, 5)
        close(module)
    torch.compiler.reset()


def decorated(path):
    return torchcache(persistent=True, persistent_cache_dir=path, probe=False)(Net())


@torchcache(persistent=True, probe=False)
class Pickled(Net):
    pass


@pytest.mark.parametrize("make", [lambda path: Pickled(persistent_cache_dir=path), decorated])
def test_a_pickled_module_finds_its_rows(path, make):
    module = make(path)
    output = module(X)
    module.cache_instance.flush()
    twin = pickle.loads(pickle.dumps(module))
    assert twin.cache_instance is not module.cache_instance
    again = found(lambda: twin(X))
    assert torch.equal(again, output)
    assert twin.cache_instance.cache_dir == path
    close(module, twin)


def test_a_cache_without_a_module(path):
    keys = Keys(b"sixteen letters.", np.arange(64, dtype=np.uint8).reshape(4, 16))
    settings = CacheSettings(persistent=True, persistent_cache_dir=path)
    with Cache(keys.namespace, settings) as cache:
        cache.fetch(keys, lambda positions: positions.double() ** 2)
    assert _document(path / keys.namespace.hex())["class"] is None
    with contextlib.closing(pickle.loads(pickle.dumps(Cache(keys.namespace, settings)))) as cache:
        assert cache.fetch(keys, lambda positions: 1 / 0).tolist() == [0, 1, 4, 9]


class OnlyHere:
    def __init__(self, number):
        self.numbers = {"of this process": number}


def test_an_object_that_differs_in_each_run_is_named_once(tmp_path, log):
    for number in range(5):
        thing = OnlyHere(number)
        scaled = torchcache(lambda x, thing=thing: x * len(vars(thing)), persistent_cache_dir=tmp_path)
        scaled(torch.rand(4, 3))
        scaled.cache_instance.close()
        assert len(warnings_in(log)) == max(0, number - 2)
        for folder in filter(os.path.isdir, tmp_path.iterdir()):
            os.utime(folder, (1, 1))  # as if earlier runs had left it
    assert "in nothing but default thing of function" in warnings_in(log)[0]
    assert "ignore='thing'" in warnings_in(log)[0]


def test_clear_leaves_what_others_use_and_free_memory_what_is_on_disk(tmp_path, log):
    first, second = (torchcache(Net(), persistent_cache_dir=tmp_path) for _ in range(2))
    first(X), first.cache_instance.flush()
    second(X)
    first.cache_instance.free_memory()
    assert (first.cache_instance.stats().memory_rows, first.cache_instance.stats().disk_rows) == (0, 6)
    first.cache_instance.clear()
    assert warnings_in(log) == [f"the rows in {tmp_path} stay there, as others use them"]
    first(X)
    assert first.cache_instance.stats().misses == 6
    second.cache_instance.close()
    first.cache_instance.clear()
    first(X)
    assert first.cache_instance.stats().misses == 12
