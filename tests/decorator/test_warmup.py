"""`warmup` computes what is not there, once, and each rank its part."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import data

from tests.helpers.gloo import run_ranks
from tests.helpers.outputs import Notes, bypasses, frozen, hits, misses, note, warnings_in
from torchcache2 import NotCachedError, OptionError, WarmupStats, torchcache

X = torch.arange(400.0).view(100, 4)
LABELS = torch.arange(100)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, scale=None):
        return self.layer(x) if scale is None else self.layer(x) * scale


@torchcache
class CachedNet(Net):
    pass


def doubled(x):
    return x * 2


def instance():
    return frozen(torchcache(Net()))


def warmup(cached, *args, **kwargs):
    """How many items are computed and found."""
    stats = cached.cache_instance.warmup(*args, **kwargs)
    return stats.computed, stats.found


class Stream(data.IterableDataset):
    def __iter__(self):
        yield from X


class Dicts(data.Dataset):
    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return {name: column[i] for name, column in self.columns.items()}


class TwiceAsLong(data.Sampler):
    """Draws some samples twice, and others not at all."""

    def __iter__(self):
        return iter(torch.arange(200).tolist()[1:60:2] * 2)

    def __len__(self):
        return 60


@pytest.mark.parametrize("make", [instance, lambda: frozen(CachedNet()), lambda: torchcache(doubled)])
def test_modules_and_functions_find_what_was_warmed_up(make):
    cached = make()
    assert warmup(cached, data.TensorDataset(X, LABELS)) == (100, 0)
    cached(X.flip(0))
    assert (hits(cached), misses(cached)) == (100, 100)
    assert warmup(cached, data.TensorDataset(X, LABELS)) == (0, 100)


def test_what_is_there_is_not_computed_again():
    notes = Notes()
    name, sizes = notes.name, notes.notes

    class Counted(Net):
        def forward(self, x):
            note(name, len(x))
            return self.layer(x)

    cached = frozen(torchcache(probe=False)(Counted()))
    cached(X[20:60])
    cached(X[:1])
    sizes.clear()
    assert warmup(cached, X, batch_size=50) == (59, 41)
    assert sizes == [19, 40]
    assert warmup(cached, X, batch_size=50) == (0, 100) and sizes == [19, 40]


SOURCES = {
    "a dataset": lambda: data.TensorDataset(X, LABELS),
    "a tensor": lambda: X,
    "a list of tuples": lambda: [(x, 1) for x in X],
    "a numpy array": X.cpu().numpy,
    "dicts": lambda: Dicts(x=X),
    "a tuple of dicts and labels": lambda: list(zip(Dicts(x=X), LABELS, strict=True)),
    "a stream": Stream,
    "a loader": lambda: data.DataLoader(data.TensorDataset(X, LABELS), batch_size=7),
    "a shuffled loader that drops": lambda: data.DataLoader(X, batch_size=30, shuffle=True, drop_last=True),
    "a loader without batches": lambda: data.DataLoader(X.view(10, 10, 4), batch_size=None, shuffle=True),
    "a loader of a stream": lambda: data.DataLoader(Stream(), batch_size=7),
    "a loader with batches of its own": lambda: data.DataLoader(
        X, batch_sampler=[[*range(10)], [*range(10, 100)]]
    ),
    "batches": lambda: iter(X.split(9)),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_data_is_read_once(source, monkeypatch):
    cached = instance()
    assert warmup(cached, SOURCES[source]()) == (100, 0)
    cached(X)
    assert hits(cached) == 100
    # Of two ranks, each takes a part, and together they take all; batches that somebody hands out are as is.
    parts, monkeypatch = [], monkeypatch
    monkeypatch.setenv("WORLD_SIZE", "2")
    other = instance()
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        parts.append(warmup(other, SOURCES[source]()))
    if source == "batches":
        assert parts == [(100, 0), (0, 100)]
    else:
        assert [found for _, found in parts] == [0, 0] and sum(new for new, _ in parts) == 100
        assert all(new >= 10 for new, _ in parts)


def test_samples_that_a_sampler_draws_are_taken_once():
    loader = data.DataLoader(X, batch_size=4, sampler=TwiceAsLong())
    assert warmup(instance(), loader) == (30, 0)


class Prefetching(data.DataLoader):
    def __iter__(self):
        for batch in super().__iter__():
            yield batch, "more"


def test_a_loader_of_another_class_stays_what_it_is():
    loader = Prefetching(X, batch_size=9, shuffle=True, drop_last=True)
    assert warmup(instance(), loader) == (100, 0)
    assert loader.drop_last and len(loader) == 11 and len(list(loader)) == 11


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_distributed_sampler_is_taken_as_it_is(ranks, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setenv("RANK", "0")
    sampler = data.DistributedSampler(X, num_replicas=4, rank=1, shuffle=False)
    cached, loader = instance(), data.DataLoader(X, batch_size=10, sampler=sampler)
    assert warmup(cached, loader) == (25, 0)
    cached(X[1::4])
    assert hits(cached) == 25
    assert cached.cache_instance.estimate(loader).items == 25 * ranks


def test_inputs_map_a_batch_to_the_arguments():
    dataset = Dicts(image=X, scale=LABELS[:, None] * 1.0, label=LABELS)
    for inputs, call in {
        lambda batch: batch["image"]: lambda net: net(X),
        lambda batch: (batch["image"], batch["scale"]): lambda net: net(X, LABELS[:, None] * 1.0),
        lambda batch: {"x": batch["image"], "scale": batch["scale"]}: lambda net: net(
            X, scale=LABELS[:, None] * 1.0
        ),
    }.items():
        cached = instance()
        assert warmup(cached, dataset, inputs=inputs) == (100, 0)
        call(cached)
        assert hits(cached) == 100


def test_texts_are_arguments_with_an_entry_per_item():
    texts = ["a" * i for i in range(20)]
    for samples, kind in ((texts, list), ([(text, 1) for text in texts], tuple)):

        @torchcache(item_args=("texts",))
        def lengths(texts):
            return torch.tensor([len(text) for text in texts])

        assert warmup(lengths, samples, batch_size=8) == (20, 0)
        assert lengths(kind(texts)).tolist() == list(range(20)) and hits(lengths) == 20


# What cannot be warmed up


def test_a_module_that_drops_out_raises_before_it_is_called():
    net = torchcache(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Dropout()))
    before = net[1].running_mean.clone()
    with pytest.raises(
        NotCachedError, match=r"Sequential: not cached \(training\): .* call \.eval\(\) first"
    ):
        net.cache_instance.warmup(X)
    assert torch.equal(net[1].running_mean, before) and net.training
    assert warmup(net.eval(), X) == (100, 0)


def test_training_mode_that_changes_nothing_is_warned_of(log):
    net = torchcache(Net()).requires_grad_(False)
    assert warmup(net, X) == (100, 0) and net.training
    (warning,) = warnings_in(log)
    assert "training mode" in warning and ".eval()" in warning
    net(X)
    assert hits(net) == 100


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x + torch.rand(()), "random"),
        (lambda x: x.mul_(2), "input"),
        (lambda x: x.sum(), "output"),
        (lambda x: x - x.mean(0), "batch"),
    ],
)
def test_any_other_bypass_raises_too(function, reason):
    cached = torchcache(function)
    with pytest.raises(NotCachedError, match=rf"not cached \({reason}\): "):
        cached.cache_instance.warmup(X)


def test_a_first_call_that_sets_something_up_is_made_again():
    class Memo(Net):
        def __init__(self):
            super().__init__()
            self.masks = {}

        def forward(self, x):
            return self.layer(x * self.masks.setdefault(x.shape[1], 1.0))

    for module in (Memo(), nn.Sequential(nn.LazyLinear(2))):
        cached = torchcache(module.eval())
        assert warmup(cached, X) == (100, 0)
        with torch.no_grad():
            cached(X)
        assert hits(cached) == 100


def test_parameters_that_require_grad_are_no_obstacle():
    net = torchcache(Net()).eval()
    assert warmup(net, X) == (100, 0) and bypasses(net) == {}
    with torch.no_grad():
        net(X)
    assert hits(net) == 100


def test_a_closed_cache_raises_and_one_that_is_turned_off_does_nothing(monkeypatch):
    net = instance()
    net.cache_instance.close()
    with pytest.raises(NotCachedError, match="closed"):
        net.cache_instance.warmup(X)
    off = frozen(torchcache(enabled=False)(Net()))
    assert off.cache_instance.warmup(X) == WarmupStats(0, 0, 0.0, 0)
    monkeypatch.setenv("TORCHCACHE_DISABLE", "1")
    net = instance()
    assert net.cache_instance.warmup(X) == WarmupStats(0, 0, 0.0, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"data": []}, "data is empty"),
        ({"data": iter([])}, "data is empty"),
        (
            {"data": data.DataLoader(Stream(), batch_sampler=None, batch_size=1000, drop_last=True)},
            "is empty",
        ),
        ({"data": {"x": X}}, "type dict: expected a dataset"),
        ({"data": "a/folder"}, "data is of type str: expected a dataset"),
        ({"data": 5}, "data is of type int: expected a dataset"),
        (
            {"data": Dicts(x=X, label=LABELS)},
            r"\{'label': .*'x': <Tensor .*'label'; pass inputs, .* batch\['x'\]",
        ),
        ({"data": Dicts(image=X)}, r"Net\(x, scale=None\) does not take .*missing .* 'x'; pass inputs"),
        ({"data": iter([object()])}, "is <object object .*: pass inputs"),
    ],
)
def test_mistakes_say_what_to_do(arguments, text):
    net = instance()
    with pytest.raises(OptionError, match=text):
        net.cache_instance.warmup(**arguments)


def test_what_fails_in_a_dataset_is_its_own_error():
    class Failing(Dicts):
        def __getitem__(self, i):
            raise KeyError("no such file")

    net = instance()
    with pytest.raises(KeyError, match="no such file"):
        net.cache_instance.warmup(Failing())


# What is shown, and what is left behind


def test_the_first_rank_shows_a_bar_and_one_line_of_cost(capfd, monkeypatch):
    cached = frozen(torchcache(max_memory_cache_size="50kB", persistent=True)(Net()))
    stats = cached.cache_instance.warmup(data.TensorDataset(X), batch_size=10)
    assert stats == WarmupStats(100, 0, stats.seconds, 800) and stats.seconds > 0
    shown = capfd.readouterr().err
    (line,) = [line for line in shown.replace("\r", "\n").splitlines() if "an item" in line]
    assert (
        line.startswith("Net: 100 items: memory 5.1 kB (room for ")
        and "disk 3.2 kB (room for 10.0 GB); about 0:00:0" in line
    )
    assert "items/s" in line and "100/100" in shown
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    cached.cache_instance.warmup(data.TensorDataset(X))
    assert capfd.readouterr().err == ""


def test_the_total_of_a_batch_sampler_is_known(capfd):
    sampler = data.BatchSampler(data.RandomSampler(X), 9, drop_last=False)
    cached, state = instance(), torch.get_rng_state()
    assert warmup(cached, data.DataLoader(X, batch_sampler=_Buckets(sampler))) == (100, 0)
    assert torch.equal(torch.get_rng_state(), state) and "Net: 100 items: " in capfd.readouterr().err


class _Buckets(data.Sampler):
    """Makes batches of its own."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def test_random_numbers_are_afterwards_as_before():
    generator = torch.Generator()
    loader = data.DataLoader(X, batch_size=9, shuffle=True, generator=generator)
    net, other = instance(), instance()
    states = torch.get_rng_state(), generator.get_state(), np.random.get_state()[1].tobytes()
    warmup(net, loader)
    warmup(other, data.DataLoader(X, batch_size=9, shuffle=True))
    after = torch.get_rng_state(), generator.get_state(), np.random.get_state()[1].tobytes()
    assert all(map(torch.equal, states[:2], after[:2])) and states[2] == after[2]


# Two processes

RANKS = """
import sys


@torchcache(persistent_cache_dir=ARGUMENTS[0], probe=False)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        sys.audit("computed", x)
        return x * self.weight


items = torch.arange(400.0).view(100, 4)
seen = []
sys.addaudithook(lambda event, args: seen.extend(args[0][:, 0].tolist()) if event == "computed" else None)
kind, *workers = ARGUMENTS[1:]
if kind == "joined":
    join()
    os.environ.update(RANK="0", WORLD_SIZE="1")  # torch knows better
net = Net().eval()
if kind == "sampler":
    sampler = data.DistributedSampler(items, WORLD, RANK, shuffle=True)
    dataset = data.DataLoader(items, batch_size=8, sampler=sampler, num_workers=1)
else:
    dataset = data.TensorDataset(items, torch.arange(100))
stats = net.cache_instance.warmup(dataset, batch_size=16, num_workers=int(workers[0]) if workers else 0)
assert len(seen) == stats.computed and stats.found == 0
print(*sorted(int(number) // 4 for number in seen))
net.cache_instance.close()
"""


@pytest.mark.parametrize("kind", ["joined", "started", "sampler"])
def test_two_ranks_take_disjoint_halves_which_one_process_finds(kind, tmp_path):
    folder = tmp_path / "rows"
    ranks = run_ranks(RANKS, tmp_path, folder, kind, 2 if kind == "joined" else 0)
    taken = [set(map(int, rank.words)) for rank in ranks]
    assert [len(items) for items in taken] == [50, 50] and taken[0] | taken[1] == set(range(100))
    if kind != "sampler":
        assert taken[0] == set(range(0, 100, 2))
    assert "100 items, 50 on this rank" in ranks[0].err and ranks[1].err == ""
    (alone,) = run_ranks(
        RANKS.replace("stats.found == 0", "stats.found == 100"), tmp_path, folder, "one", count=1
    )
    assert alone.words == []
