"""`CachedDataset(map=)`: what a function makes of samples is kept, and is never that of another function."""

import contextlib
import dataclasses
import functools
import json
import pickle
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from tests.helpers import ranks, warm
from tests.helpers.datasets import note, noted, same
from tests.helpers.storage import warnings_of
from torchcache2 import CachedDataset, LazyModule, NotCachedError, OptionError, torchcache

COUNT = 20


class Samples(Dataset):
    def __init__(self, log=None):
        self.log = None if log is None else str(log)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        if self.log is not None:
            note(self.log, index)
        return torch.tensor([1.0, 2.0, 3.0]) * index, index


class Drawn(Samples):
    def __getitem__(self, index):
        return super().__getitem__(index)[0] + index, torch.rand(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = 1.0
        self.layer.load_state_dict({"weight": torch.arange(6.0).view(2, 3), "bias": torch.zeros(2)})
        self.eval().requires_grad_(False)

    def forward(self, batch):
        return self.layer(batch[0]) * self.scale

    def described(self, batch):
        return {"x": self(batch).numpy(), "label": batch[1], "more": (self(batch).half(), None, 3.5)}


@dataclasses.dataclass
class Output:
    x: torch.Tensor
    names: list


class Callable:
    scale = 2.0

    def __call__(self, batch):
        return batch[0] * self.scale


NET = Net()


@torchcache
def cached_by_itself(x):
    return NET.layer(x)


def names(batch):
    return [f"name {i}" for i in batch[1].tolist()]


MAPS = {
    "module": NET,
    "method": NET.described,
    "function": lambda batch: (NET(batch), batch[1]),
    "partial": functools.partial(lambda scale, batch: NET(batch) * scale, 2.0),
    "callable": Callable(),
    "texts": names,
    "dicts": lambda batch: [{"i": int(i), "ragged": torch.ones(int(i))} for i in batch[1]],
    "dataclass": lambda batch: Output(NET(batch), names(batch)),
    "empty": lambda batch: batch[0][:, :0],
    "cached": lambda batch: cached_by_itself(batch[0]),
}


def plain(function, samples=None, size=4):
    """What the batches of the samples are, mapped."""
    with torch.no_grad():
        return [function(batch) for batch in DataLoader(samples or Samples(), size)]


@pytest.mark.parametrize("name", [*MAPS])
def test_what_a_map_returns_is_kept_and_given_back(name, path, log):
    function, wanted, items = MAPS[name], plain(MAPS[name]), []
    for _ in range(2):
        with contextlib.closing(CachedDataset(Samples(), path, map=function)) as data:
            loader = data.loader(4)
            for _ in range(3):
                same(list(loader), wanted)
            items.append([data[i] for i in (0, 13)])
            stats = data.stats()
            assert len(data.missing()) == 0
    assert stats.misses == 0 and stats.hits == 3 * COUNT + 2
    with contextlib.closing(CachedDataset(None, path)) as served:
        same(list(served.loader(4)), wanted)
        items.append([served[i] for i in (0, 13)])
    with contextlib.closing(CachedDataset(Samples(), memory_size=0, map=function)) as uncached:
        same(list(uncached.loader(4)), wanted)
        items.append([uncached[i] for i in (0, 13)])
    for some in items[1:]:
        same(some, items[0])
    assert warnings_of(log) == []


def test_a_lazy_module_is_loaded_for_misses_only(path, tmp_path):
    torch.save(NET.state_dict(), tmp_path / "weights.pt")
    loads = tmp_path / "loads"

    def load():
        note(loads, "load")
        net = Net()
        net.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
        return net

    for _ in range(2):
        net = LazyModule(load, tmp_path / "weights.pt")
        with contextlib.closing(CachedDataset(Samples(), path, map=net)) as data:
            same(list(data.loader(4)), plain(NET))
    assert noted(loads) == {"load": 1}


CHANGES = {
    "weights": lambda net: net.layer.weight.mul_(2),
    "attribute": lambda net: setattr(net, "scale", 3.0),
    "loaded": lambda net: net.load_state_dict(
        {"layer.weight": torch.ones(2, 3), "layer.bias": torch.ones(2)}
    ),
    "mode": lambda net: torch.set_float32_matmul_precision("medium"),
}


@pytest.mark.parametrize("memory", [0, "10MB"])
@pytest.mark.parametrize("change", [*CHANGES])
def test_a_map_that_changes_in_mid_epoch_is_noticed(change, memory, path):
    """Also for batches whose rows were read ahead."""
    net, precision = Net(), torch.get_float32_matmul_precision()
    with contextlib.closing(CachedDataset(Samples(), path, map=net, memory_size=memory)) as data:
        loader = data.loader(2)
        for _ in range(3):
            list(loader)
        try:
            hits = data.stats().hits
            for i, (batch, found) in enumerate(zip(DataLoader(Samples(), 2), loader, strict=True)):
                with torch.no_grad():
                    same(found, net(batch))
                    if i == 2:
                        CHANGES[change](net)
                assert data.stats().hits == hits + 2 * min(i + 1, 3)
        finally:
            torch.set_float32_matmul_precision(precision)


def test_rows_of_other_weights_collate_fns_and_samples_are_not_found(path):
    def stacked(samples):
        return default_collate(samples)

    other = Net()
    other.layer.weight[0, 0] += 1

    class Others(Samples):
        def __getitem__(self, index):
            return torch.ones(3) * index, index

    cases = [
        ({"map": NET}, {}),
        ({"map": other}, {}),
        ({"map": NET, "collate_fn": stacked}, {}),
        ({"map": NET}, 1),
    ]
    for turn in range(2):
        for options, others in cases:
            samples = Others() if others else Samples()
            with contextlib.closing(CachedDataset(samples, path, **options)) as data:
                same(list(data.loader(4)), plain(options["map"], samples))
                assert data.stats().misses == (COUNT if turn == 0 else 0)


def norm():
    return nn.BatchNorm1d(3)


@pytest.mark.parametrize("make", [norm, lambda: nn.Dropout(0.5), lambda: lambda x: x - x.mean(0)])
def test_what_mixes_items_or_is_random_is_not_kept(make, log):
    found, wanted, ours = make(), make(), []
    collate = lambda samples: torch.stack([x for x, _ in samples])  # noqa: E731
    with contextlib.closing(CachedDataset(Samples(), map=found, collate_fn=collate)) as data:
        loader = data.loader(4)
        for function, batches in ((found, loader), (wanted, DataLoader(Samples(), 4, collate_fn=collate))):
            torch.manual_seed(0)
            with torch.no_grad():
                made = [
                    batch if function is found else function(batch) for _ in range(3) for batch in batches
                ]
            ours.append((made, torch.get_rng_state(), getattr(function, "running_mean", None)))
        same(*ours)
        assert data.stats().hits == 0
    assert any("not cached" in record.getMessage() for record in warnings_of(log))


def test_all_is_checked_with_verify(tmp_path):
    with contextlib.closing(CachedDataset(Samples(tmp_path / "log"), map=NET, verify=1.0)) as data:
        for _ in range(3):
            same(list(data.loader(4)), plain(NET))
        assert set(noted(tmp_path / "log").values()) == {3}
        assert (data.stats().verified, data.stats().mismatched) == (2 * COUNT, 0)


def test_a_part_of_a_map_that_cannot_be_read_is_for_this_process_only(path):
    numbers = iter([1, 2])

    def function(batch):
        return batch[0] * 2 if numbers else batch[0]

    with pytest.raises(OptionError, match=r"a map= with numbers, .*: keep such objects out"):
        CachedDataset(Samples(), path, map=function)
    with contextlib.closing(CachedDataset(Samples(), map=function)) as data:
        same([*data.loader(4), *data.loader(4)], plain(function) * 2)
        assert data.stats().misses == COUNT


@pytest.mark.parametrize("workers", [1, pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_worker_finds_rows_and_runs_no_map(workers):
    options = {"num_workers": 1, "multiprocessing_context": "spawn" if workers == "spawn" else "fork"}
    with contextlib.closing(CachedDataset(Samples(), map=NET)) as data:
        wanted = [data[i] for i in range(10)]
        same(list(DataLoader(data, None, sampler=range(10), **options)), wanted)
        assert (data.stats().hits, data.stats().misses) == (10, 10)
        with pytest.raises(NotCachedError, match=r"nothing is kept for sample 10"):
            list(DataLoader(data, None, sampler=[9, 10], **options))
        same(torch.cat(list(data.loader(4, **options))), torch.cat(plain(NET)))


SCALE = 1.0


def scaled(samples):
    return default_collate(samples)[0] * SCALE


@contextlib.contextmanager
def other(what, net):
    """A change of a map's weights, of its collate_fn, or of torch's modes."""
    global SCALE
    modes = torch.autocast("cpu", torch.bfloat16, enabled=what == "mode")
    with modes:
        if what == "weights":
            net.weight.data.mul_(2)
        SCALE = 3.0 if what == "collate_fn" else 1.0
        try:
            yield
        finally:
            SCALE = 1.0
            if what == "weights":
                net.weight.data.div_(2)


@pytest.mark.parametrize("what", ["weights", "collate_fn", "mode"])
@pytest.mark.parametrize("made", ["inserted", "warmed up", "asked for"])
def test_after_a_change_rows_are_found_and_kept_under_new_names(what, made, path):
    net = nn.Linear(3, 2, bias=False).requires_grad_(False)
    net.weight.data.copy_(torch.arange(6.0).view(2, 3))

    def wanted():
        return [net(batch) for batch in DataLoader(Samples(), 4, collate_fn=scaled)]

    with contextlib.closing(
        CachedDataset(Samples(), path, map=lambda batch: net(batch), collate_fn=scaled)
    ) as data:
        data.warmup()
        assert len(data.missing()) == 0
        before = wanted()
        with other(what, net):
            assert len(data.missing()) == COUNT
            after = wanted()
            same(data[5], after[1][1])
            if made == "inserted":
                for number, rows in enumerate(after):
                    data.insert(range(4 * number, 4 * number + 4), rows)
            elif made == "warmed up":
                assert data.warmup().computed == COUNT - 1
            else:
                same(list(data.loader(4)), after)
            assert len(data.missing()) == 0
            same(list(DataLoader(data, 4, num_workers=1)), after)
            same([pickle.loads(pickle.dumps(data))[i] for i in (0, 7)], [after[0][0], after[1][3]])
        same([data[i] for i in range(4)], list(before[0]))
        same(list(data.loader(4)), before)
        with other(what, net):
            data.seal()
            same(list(data.loader(4)), after)
            same([data[i] for i in range(4)], list(after[0]))


@pytest.mark.parametrize("what", ["map", "collate_fn", "seed", "view", "sealed"])
def test_what_refers_to_a_mapped_dataset_goes_by_its_map(what, path):
    def drawn(batch, generators):
        return torch.stack([torch.rand(2, generator=one) for one in generators]) + batch[:, :2]

    def made(is_other):
        net = Net()
        net.scale = 2.0 if is_other and what in ("map", "sealed") else 1.0
        function = drawn if what == "seed" else lambda batch: net.layer(batch) * net.scale
        collate = scaled if is_other and what == "collate_fn" else lambda some: default_collate(some)[0] + 1
        options = {"views": 2} if what == "view" else {"seed": int(is_other and what == "seed")}
        data = CachedDataset(
            Drawn() if what == "view" else Samples(), map=function, collate_fn=collate, **options
        )
        if what == "view":
            data.set_view(is_other)
        if what == "sealed":
            data.warmup()
            data.seal()
        return data

    for is_other in (False, True):
        data = made(is_other)
        wanted = [data[i] for i in range(COUNT)]
        for hits in (0, COUNT):
            with contextlib.closing(CachedDataset(made(is_other), path)) as outer:
                same([outer[i] for i in range(COUNT)], wanted)
                assert outer.stats().hits == hits


def test_a_copy_never_gives_samples_for_what_a_map_makes(monkeypatch):
    data = CachedDataset(Samples(), map=NET)
    wanted, copy = data[1], pickle.loads(pickle.dumps(data))
    same(copy[1], wanted)
    same(list(copy.loader(1, sampler=[1])), [wanted[None]])
    with pytest.raises(NotCachedError, match="nothing is kept for sample 2"):
        copy[2]
    copy.close()
    with pytest.raises(NotCachedError):
        copy[1]
    with monkeypatch.context() as patch, pytest.raises(NotCachedError):
        patch.setenv("TORCHCACHE_DISABLE", "1")
        pickle.loads(pickle.dumps(data))[1]
    data.close()


def test_a_closed_dataset_has_released_its_memory():
    for _ in range(2):
        with contextlib.closing(CachedDataset(Samples(), map=NET)) as data:
            assert len(data.missing()) == COUNT
            list(data.loader(4))
            assert len(data.missing()) == 0


def test_indices_of_a_map_are_ints():
    with contextlib.closing(CachedDataset(Samples(), map=NET)) as data:
        data[1]
        for index in ("1", b"1", 2**70):
            with pytest.raises(TypeError, match="with map=, indices are ints"):
                data[index]
            with pytest.raises(TypeError, match="with map=, indices are ints"):
                list(data.loader(sampler=[index]))


PREAMBLE = """
import os, signal
from torch.utils.data import Dataset
from torchcache2 import CachedDataset
from tests.helpers.datasets import note

FOLDER = os.environ["FOLDER"]


class Samples(Dataset):
    def __len__(self):
        return len(ITEMS)

    def __getitem__(self, index):
        note(FOLDER + "/loaded", index)
        return ITEMS[index], index


NET = Backbone()


def embed(batch):
    for index in batch[1].tolist():
        note(FOLDER + "/computed", index)
    return NET(batch[0]), batch[1]


def features(**options):
    return CachedDataset(Samples(), FOLDER + "/cache", map=embed, **options)


def check(batches):
    seen = []
    for x, indices in batches:
        assert torch.equal(x, expected(ITEMS[indices]))
        seen += indices.tolist()
    return seen


"""


def start(script, folder, *args, count=1, **env):
    script = PREAMBLE + warm.dedented(script)
    return ranks.start(script, str(folder), *args, ranks=count, FOLDER=str(folder), **env)


def test_a_second_process_computes_only_the_batch_that_it_checks(tmp_path):
    script = """
    data = features()
    loader = data.loader(16, shuffle=True, generator=torch.Generator().manual_seed(int(sys.argv[1])))
    for _ in range(2):
        assert sorted(check(loader)) == list(range(192))
    print(json.dumps([data.stats().hits, data.stats().misses]))
    """
    for seed, misses in (("1", 192), ("2", 0)):
        before = [len(noted_list(tmp_path / name)) for name in ("computed", "loaded")]
        (found,) = ranks.reports(start(script, tmp_path, seed))
        assert found == [384 - misses, misses]
    after = [len(noted_list(tmp_path / name)) for name in ("computed", "loaded")]
    assert [now - then for now, then in zip(after, before, strict=True)] == [16, 16]


def noted_list(path):
    return list(noted(path).elements())


@pytest.mark.parametrize("has_generator", ["", "1"])
def test_an_epoch_that_was_killed_goes_on_in_another_process(tmp_path, has_generator):
    script = """
    path, generator = FOLDER + "/state.pt", torch.Generator().manual_seed(3) if sys.argv[1] else None
    torch.manual_seed(5)
    loader = features().loader(16, shuffle=True, generator=generator, num_workers=1)
    if os.path.exists(path):
        state, seen = torch.load(path, weights_only=True)
        loader.load_state_dict(state)
        torch.manual_seed(6)
        rest = check(loader)
        assert sorted(seen + rest) == list(range(192)), (seen, rest)
        print(len(rest))
    else:
        list(loader)
        seen = []
        for i, batch in enumerate(loader):
            seen += check([batch])
            if i == 4:
                loader.dataset.flush()
                torch.save((loader.state_dict(), seen), path)
            if i == 6:
                os.kill(os.getpid(), signal.SIGKILL)
    """
    (killed,) = start(script, tmp_path, has_generator)
    killed.done(-signal.SIGKILL)
    before = len(noted_list(tmp_path / "computed"))
    (rest,) = ranks.reports(start(script, tmp_path, has_generator))
    assert rest == 192 - 5 * 16
    assert len(noted_list(tmp_path / "computed")) - before <= 2 * 16  # the batch that is checked


@pytest.mark.parametrize("shares", ["", "1"])
def test_ranks_compute_no_item_twice_and_take_over_from_one_that_is_killed(tmp_path, shares):
    script = """
    SECONDS = 0.002
    data = features()
    options = {} if sys.argv[2] else {"rank": 0, "world_size": 1}
    loader = data.loader(16, shuffle=True, generator=torch.Generator().manual_seed(0), **options)
    for i, batch in enumerate(loader):
        check([batch])
        if sys.argv[1] and RANK == 1 and i == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    seen = check(loader)
    print(json.dumps(seen))
    """
    both = ranks.reports(start(script, tmp_path / "both", "", shares, count=2))
    assert {*both[0], *both[1]} == {*range(192)}
    counts = noted(tmp_path / "both" / "computed")
    assert len(counts) == 192
    # Parts of the first batch, and the first found ones, are computed again.
    assert sum(counts.values()) <= 192 + 2 * 4 * 16
    first, second = start(script, tmp_path / "killed", "1", shares, count=2)
    second.done(-signal.SIGKILL)
    assert len(json.loads(first.done().out)) == (96 if shares else 192)
