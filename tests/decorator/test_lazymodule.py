"""A module that is loaded at the first miss: rows are found without it, and never those of another one."""

import copy
import functools
import gc
import json
import os
import pickle
import random
import shutil
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.commands import run
from tests.helpers.outputs import Notes, assert_same, bypasses, hits, misses, note
from torchcache2 import LazyModule, OptionError, torchcache
from torchcache2.files.directory import CONTENTS

LOADS = Notes()
LOADS_NAME = LOADS.name
X = torch.arange(48.0).view(12, 4)


@pytest.fixture(autouse=True)
def loads():
    LOADS.notes.clear()
    return LOADS.notes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, scale=1.0):
        return self.dropout(self.layer(x)) * scale

    def halved(self, x):
        return self(x, 0.5)


def saved(path, seed=0):
    torch.manual_seed(seed)
    torch.save(Net().state_dict(), path)
    return str(path)


@pytest.fixture
def path(tmp_path):
    return saved(tmp_path / "net.pt")


@pytest.fixture
def later(monkeypatch):
    """Files that were written just now are old."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 60)


def plain(path):
    net = Net()
    net.load_state_dict(torch.load(path, weights_only=True))
    return net.eval().requires_grad_(False)


def lazy_net(path, scale=1.0):
    def load():
        note(LOADS_NAME, "net")
        net = Net()
        net.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            net.layer.weight.mul_(scale)
        return net

    return LazyModule(load, files=[path])


def made(path, folder=None, scale=1.0, **options):
    """A cached lazy module, as of another process: it shares nothing but the folder."""
    if folder is not None:
        options |= {"persistent": True, "persistent_cache_dir": folder}
    return torchcache(**options)(lazy_net(path, scale))


def filled(path, folder, **options):
    """The rows of `X` are in the folder."""
    encoder = made(path, folder, **options)
    encoder(X)
    encoder.cache_instance.flush()
    return encoder


def test_it_is_loaded_at_the_first_miss_and_not_before(path, loads):
    encoder = made(path)
    copy.deepcopy(encoder), pickle.dumps(lazy_of_module(path)), repr(encoder), str(encoder)
    encoder.eval().to("cpu"), encoder.state_dict(), list(encoder.parameters())
    assert encoder.cache_instance.module_hash and encoder.cache_instance.explain()
    assert not hasattr(encoder, "_unknown") and not loads and not encoder.is_loaded
    assert_same(encoder(X), plain(path)(X))
    assert loads == ["net"] and encoder.is_loaded
    encoder(X), encoder(X[3:9])
    assert (hits(encoder), misses(encoder), bypasses(encoder)) == (18, 12, {})


def test_a_run_that_finds_all_never_loads_it(path, tmp_path, loads):
    filled(path, tmp_path / "cache")
    again = made(path, tmp_path / "cache")
    for batch in (X, X[:5], X.flip(0), X[::2], X[2:11], X[[1, 5, 0]]):  # checks of found batches are due
        assert_same(again(batch), plain(path)(batch))
    assert loads == ["net"] and not again.is_loaded and misses(again) == 0
    assert_same(again(torch.cat([X, X[:3] + 100])), plain(path)(torch.cat([X, X[:3] + 100])))
    assert again.is_loaded and misses(again) == 3 and bypasses(again) == {}


def test_it_says_why_it_is_loaded(path, log):
    encoder = made(path, probe=False)
    encoder(X[:8])
    encoder.unload()
    encoder(X[4:])
    encoder.unload()
    _ = encoder.layer
    said = [record.getMessage() for record in log if "was loaded" in record.getMessage()]
    assert [line.partition(" s, as ")[2] for line in said] == [
        "8 of 8 items of a call have to be computed",
        "4 of 8 items of a call have to be computed",
        "its attribute 'layer' is read",
    ]
    assert all(line.startswith(f"Net was loaded from {path} in ") for line in said)


def test_unload_frees_it_and_the_next_miss_loads_it_again(path, loads):
    encoder = made(path)
    encoder(X[:6])
    namespace, module = encoder.cache_instance.module_hash, weakref.ref(encoder.module)
    encoder.unload()
    gc.collect()
    assert module() is None and not encoder.is_loaded
    encoder(X[:6])
    assert loads == ["net"]
    assert_same(encoder(X), plain(path)(X))
    assert loads == ["net", "net"] and encoder.cache_instance.module_hash == namespace
    assert (hits(encoder), misses(encoder), bypasses(encoder)) == (12, 12, {})


def test_the_place_of_the_files_does_not_count_and_their_content_does(path, tmp_path, loads):
    filled(path, tmp_path / "cache")
    (tmp_path / "elsewhere").mkdir()
    moved = made(str(shutil.copy(path, tmp_path / "elsewhere" / "other.pt")), tmp_path / "cache")
    moved(X)
    assert hits(moved) == 12 and loads == ["net"]
    other = made(saved(tmp_path / "elsewhere" / "other.pt", seed=1), tmp_path / "cache")
    assert_same(other(X), plain(tmp_path / "elsewhere" / "other.pt")(X))
    assert misses(other) == 12


def test_all_files_of_a_folder_count_by_name_and_content(path, tmp_path, loads):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    (folder / "sub").mkdir(parents=True)
    shutil.copy(path, folder / "sub" / "net.pt")
    (folder / "linked.pt").symlink_to(path)

    def load(where):
        note(LOADS_NAME, "net")
        return plain(os.path.join(where, "sub", "net.pt"))

    def namespace():
        lazy = LazyModule(functools.partial(load, str(folder)), files=folder)
        encoder = torchcache(persistent_cache_dir=cache)(lazy)
        assert_same(encoder(X), plain(path)(X))
        return encoder.cache_instance.module_hash

    first = namespace()
    assert namespace() == first
    (folder / "config.json").write_text("{}")
    second = namespace()
    (folder / "config.json").rename(folder / "other.json")
    assert len({first, second, namespace()}) == 3


def test_the_code_of_the_loader_and_what_it_closes_over_count(path, tmp_path):
    filled(path, tmp_path / "cache")
    other = made(path, tmp_path / "cache", scale=2.0)
    expected = nn.functional.linear(X, 2 * plain(path).layer.weight, plain(path).layer.bias)
    assert torch.equal(other(X), expected) and misses(other) == 12
    same_files = torchcache(persistent_cache_dir=tmp_path / "cache")(LazyModule(lambda: plain(path), path))
    same_files(X)
    assert misses(same_files) == 12


def read_by(call):
    """How many bytes this process reads meanwhile."""

    def count():
        return int(Path("/proc/self/io").read_text().split()[1])

    start = count()
    call()
    return count() - start


def test_the_files_are_read_once_for_all_processes(tmp_path, later, loads):
    path, size = saved(tmp_path / "net.pt"), 8_000_000
    (tmp_path / "large.bin").write_bytes(bytes(size))

    def encoder():
        lazy = LazyModule(functools.partial(plain, path), files=[path, tmp_path / "large.bin"])
        return torchcache(persistent_cache_dir=tmp_path / "cache")(lazy)

    first, second = encoder(), encoder()
    assert read_by(lambda: first(X)) > size
    first.cache_instance.flush()
    assert read_by(lambda: second(X)) < size and hits(second) == 12
    (note_file,) = (tmp_path / "cache").glob("*.note")
    remembered = [note_file, tmp_path / "cache" / CONTENTS]
    assert [len(one.read_bytes()) for one in remembered] == [32, 80]
    for one in remembered:  # whatever has happened to them
        one.write_bytes(b"\xff" * 40)
    third = encoder()
    assert read_by(lambda: third(X)) > size and hits(third) == 12
    assert [len(one.read_bytes()) for one in remembered] == [40, 120]  # it has not had to load the module
    for one in remembered:
        one.unlink()
    fourth = encoder()
    assert read_by(lambda: fourth(X)) > size and hits(fourth) == 12


def test_notes_are_the_formats_own(path, tmp_path, later):
    folder, other = tmp_path / "cache", tmp_path / "other"
    filled(path, folder).cache_instance.close()
    (note_file, *_) = folder.glob("*.note")
    left = folder / f"{note_file.name}.{'0' * 26}"  # of a writer that was killed
    left.write_bytes(b"")
    assert json.loads(run("stats", folder, "--format", "json")[0])["foreign"] == 0
    run("prune", folder, "--max-size", "1GB")
    assert not left.exists() and note_file.exists()
    shutil.copytree(folder, other)
    again = made(path, other)
    again(X)
    assert hits(again) == 12 and not again.is_loaded
    (folder / "CACHEDIR.TAG").unlink()
    made(path, folder)  # it is still a cache directory


def test_what_was_written_just_now_is_read_again(path, tmp_path):
    encoder = filled(path, tmp_path / "cache")
    status, first = os.stat(path), encoder.cache_instance.module_hash
    assert len(list((tmp_path / "cache").glob("*.note"))) == 1  # what was loaded, but not the content
    encoder.unload()
    saved(path, seed=1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert os.stat(path).st_size == status.st_size
    before = encoder.cache_instance.module_hash
    again = made(path, tmp_path / "cache")
    assert again.cache_instance.module_hash == before != first
    assert_same(again(X), plain(path)(X))
    assert hits(again) == 0


@pytest.mark.parametrize("is_loaded", [False, True])
def test_files_that_change_meanwhile_are_another_module(path, tmp_path, is_loaded, later, loads):
    encoder = made(path)
    before = plain(path)
    encoder(X[:6])
    if not is_loaded:
        encoder.unload()
        encoder(X[:6])
    saved(path, seed=1)
    after = plain(path)
    if is_loaded:  # it is in memory, and remains what it was
        assert_same(encoder(X), before(X))
        encoder.unload()
        assert_same(encoder(X), after(X))
        return
    assert_same(encoder(X[:4]), before(X[:4]))  # found, as if it had been loaded at the start
    assert_same(encoder(X), after(X))  # items of both meet in no output
    assert bypasses(encoder) in ({}, {"state": 12})
    assert_same(encoder(X), after(X))
    assert_same(encoder(X), after(X))
    assert hits(encoder) == 6 + 4 + 12


def test_files_that_change_while_they_are_loaded_are_of_this_process(path, tmp_path, later):
    def load():
        os.utime(path)
        return plain(path)

    def encoder():
        return torchcache(persistent_cache_dir=tmp_path / "cache")(LazyModule(load, files=path))

    first = encoder()
    first(X), first(X), first(X)
    assert hits(first) > 0
    first.cache_instance.flush()
    second = encoder()
    second(X)
    assert hits(second) == 0


EDITS = {
    "weight": lambda net: net.layer.bias.add_(1),
    "attribute": lambda net: setattr(net.layer, "forward", functools.partial(doubled, net.layer.weight)),
    "hook": lambda net: net.register_forward_hook(negated),
}


@pytest.mark.parametrize("edit", EDITS)
@torch.no_grad()
def test_what_is_edited_after_loading_is_noticed(path, tmp_path, edit):
    filled(path, tmp_path / "cache")
    encoder = made(path, tmp_path / "cache")
    reference = plain(path)
    EDITS[edit](encoder.module), EDITS[edit](reference)
    assert_same(encoder(X), reference(X))
    assert misses(encoder) == 12
    assert_same(encoder(X), reference(X))
    assert hits(encoder) == 12
    encoder.unload()
    encoder(X)
    assert_same(encoder(X), plain(path)(X))
    assert hits(encoder) == 36


def doubled(weight, x):
    return x @ (2 * weight).T


def negated(module, args, output):
    return -output


def test_the_mode_is_that_of_the_lazy_module(path, tmp_path):
    encoder = made(path).train()
    torch.manual_seed(0)
    first = encoder(X)
    assert not torch.equal(first, plain(path)(X)) and encoder.module.training
    encoder(X)
    assert bypasses(encoder) == {"random": 12, "training": 12} and hits(encoder) == 0
    assert_same(encoder.eval()(X), plain(path)(X))
    assert encoder(X) is not None and hits(encoder) == 12


class Random(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return x + torch.rand(len(x), 1, generator=self.generator)


class Averaged(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Random, "random"), (Averaged, "batch"), (Counting, "state")],
    ids=str,
)
def test_the_call_that_loads_a_module_stores_nothing_that_must_not_be_stored(path, kind, reason):
    encoder, reference = torchcache(LazyModule(lambda: kind(), files=path)), kind()
    for _ in range(3):
        assert_same(encoder(X), reference(X))
    assert set(bypasses(encoder)) == {reason} and hits(encoder) == 0


def test_the_generators_of_the_caller_do_not_move(path):
    def load():
        random.random(), np.random.random()
        return plain(path)

    encoder = torchcache(LazyModule(load, files=path))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    encoder(X)
    assert encoder.is_loaded and torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())


def test_modules_that_a_loader_makes_at_random_do_not_mix_their_rows(path, tmp_path, log):

    def random_net(seed):
        torch.manual_seed(seed)
        return torchcache(persistent_cache_dir=tmp_path / "cache")(LazyModule(lambda: Net(), files=path))

    first = random_net(0)
    first(X)
    first.cache_instance.flush()
    second = random_net(1)
    assert_same(second(X), first(X))  # all of the first
    assert not second.is_loaded
    batch = torch.cat([X[:6], X[6:] + 100])
    assert_same(second(batch), second.module(batch))  # none of the first
    assert any("made a different module than before" in record.getMessage() for record in log)
    assert_same(second(batch), second.module(batch))
    assert_same(second(X), second.module(X))


def test_it_works_inside_of_modules_and_functions(path, tmp_path, loads):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = lazy_net(path), lazy_net(path, 2.0)
            self.shift = nn.Parameter(torch.ones(2), requires_grad=False)

        def forward(self, x, is_second=False):
            return (self.second if is_second else self.first)(x) + self.shift

    encoder = torchcache(persistent_cache_dir=tmp_path / "cache")(Outer().eval().to("cpu"))
    assert_same(encoder(X), plain(path)(X) + 1)
    assert loads == ["net"]  # the second one is not needed
    encoder.cache_instance.flush()
    again = torchcache(persistent_cache_dir=tmp_path / "cache")(Outer().eval())
    assert_same(again(X), plain(path)(X) + 1)
    assert loads == ["net"] and hits(again) == 12
    with torch.no_grad():
        encoder.first.module.layer.bias.add_(1)
    assert_same(encoder(X), encoder.first.module(X) + 1)
    assert misses(encoder) == 24

    text_encoder = lazy_net(path)

    @torchcache(item_args=("texts",))
    def encode(texts):
        return text_encoder(torch.tensor([[float(len(text))] * 4 for text in texts]))

    encode(["a", "bb"]), encode(["bb", "a", "ccc"])
    assert (hits(encode), misses(encode)) == (2, 3)
    with torch.no_grad():
        text_encoder.module.layer.bias.add_(1)
    encode(["a"])
    assert misses(encode) == 4


def test_an_argument_may_be_lazy(path, loads):
    @torchcache(probe=False)
    def encode(x, encoder):
        return encoder(x)

    lazy = lazy_net(path)
    assert_same(encode(X, lazy), plain(path)(X))
    assert_same(encode(X[:4], lazy_net(path)), plain(path)(X[:4]))
    assert loads == ["net"] and (hits(encode), misses(encode), bypasses(encode)) == (4, 12, {})
    with torch.no_grad():
        lazy.module.layer.bias.add_(1)
    assert_same(encode(X, lazy), lazy.module(X))
    lazy.train(), encode(X, lazy)
    assert bypasses(encode) == {"training": 12}


def test_methods_of_what_is_not_loaded(path, tmp_path, loads):
    def cached():
        lazy = lazy_net(path)
        return torchcache(lazy, methods=("halved",), persistent_cache_dir=tmp_path / "cache")

    encoder = cached()
    assert not loads and encoder.cache_instance.explain()
    assert_same(encoder.halved(X), plain(path).halved(X))
    assert loads == ["net"] and (misses(encoder), bypasses(encoder)) == (12, {})
    encoder.cache_instance.flush()
    again = cached()
    assert_same(again.halved(X[:5]), plain(path).halved(X[:5]))
    assert loads == ["net"] and hits(again) == 5
    with torch.no_grad():
        again.module.layer.bias.add_(1)
    assert_same(again.halved(X), again.module.halved(X))
    assert misses(again) == 12


def test_warmup_loads_it_if_something_is_missing(path, tmp_path, loads):
    folder = tmp_path / "cache"
    assert made(path, folder).cache_instance.warmup(iter([X[:8], X[4:]])).computed == 12
    assert made(path, folder).cache_instance.warmup(iter([X])).found == 12 and loads == ["net"]


def test_attributes_and_conversions_load_it(path, loads):
    encoder = made(path)
    assert encoder.layer.in_features == 4 and loads == ["net"]
    assert_same(encoder.halved(X), plain(path).halved(X))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = encoder.nonsense
    for convert, is_move in {
        (lambda net: net.to("cpu")): True,
        (lambda net: net.float()): False,
        (lambda net: net.share_memory()): False,
        (lambda net: net.to(memory_format=torch.channels_last)): False,
        (lambda net: net.to_empty(device="meta")): False,
    }.items():
        moved = lazy_net(path)
        convert(moved)
        assert moved.is_loaded is not is_move
    loads.clear()
    encoder = made(path)
    encoder.double()
    assert loads == ["net"] and encoder(X.double()).dtype == torch.float64
    encoder.unload()
    encoder.float().to("cpu", torch.float32)
    assert encoder(X).dtype == torch.float32


def test_copies_and_pickles(path, tmp_path, loads):
    lazy = lazy_of_module(path)
    loaded = pickle.loads(pickle.dumps(lazy))
    assert not loaded.is_loaded and torch.equal(loaded(X), plain(path)(X))
    again = pickle.loads(pickle.dumps(loaded))  # it is loaded anew
    assert not again.is_loaded and torch.equal(again(X), plain(path)(X))
    with torch.no_grad():
        loaded.module.layer.bias.add_(1)
    with pytest.raises(TypeError, match="was edited"):
        pickle.dumps(loaded)
    assert torch.equal(copy.deepcopy(loaded)(X), loaded(X))


def lazy_of_module(path):
    return LazyModule(functools.partial(plain, path), files=path)


def raise_no_memory():
    raise RuntimeError("no memory for it")


def test_mistakes_are_errors_at_once(path, tmp_path):
    (tmp_path / "empty").mkdir()
    for load, files, words in (
        (lambda: None, tmp_path / "nothing.pt", r"nothing\.pt' does not exist"),
        (lambda: None, [], "files is empty"),
        (lambda: None, tmp_path / "empty", "is an empty folder"),
        (plain(path), path, "expected a function"),
        (lambda: 3, path, "returned 3, expected a module"),
    ):
        with pytest.raises(OptionError, match=words):
            torchcache(LazyModule(load, files=files))(X)
    encoder = torchcache(LazyModule(raise_no_memory, files=path))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^no memory for it$"):
            encoder(X)
