"""Cases in which ranks in step share rows and work. test_collective.py runs them."""

import collections
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, get_worker_info

from tests.helpers.outputs import assert_same
from tests.helpers.steps import ITEMS, SOAK, Backbone, case, expected, raises, run_cases
from torchcache2 import RankError

dist = torch.distributed


def once(ranks, nodes, count=96, **options):
    ranks.nodes(nodes)
    net = ranks.cached(Backbone(), **options)
    sampler = DistributedSampler(range(count), ranks.count, ranks.rank)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for indices in torch.tensor(list(sampler)).split(8):
            ranks.check(net, ITEMS[indices])
    stats = net.cache_instance.stats()
    times = ranks.times_computed()
    assert len(times) == count and set(times.values()) == {1}, times
    counts = collections.Counter(
        hits=stats.hits, misses=stats.misses, received=stats.received, sent=stats.sent
    )
    counts = ranks.total(counts)
    assert (counts["misses"], counts["hits"]) == (count, 2 * count)
    assert counts["received"] == counts["sent"] and (counts["sent"] > 0) == (nodes > 1)
    assert stats.faults == 0 and stats.bypasses == {} and stats.exchange_seconds > 0
    return net


@case(more=3)
def each_item_is_computed_once_on_any_number_of_nodes(ranks):
    for nodes in (2, 1, ranks.count) if SOAK else (2,):
        ranks.again()
        once(ranks, nodes)
        ranks.computed.clear()


@case()
def each_item_is_computed_once_with_private_memory(ranks):
    once(ranks, ranks.count, count=48, policy="lru")


@case(ranks=2)
def rows_of_a_rounded_dtype(ranks):
    ranks.nodes(2)
    net = ranks.cached(Backbone(0.3), cache_dtype=torch.float16)
    mine, others = ITEMS[ranks.rank :: 2], ITEMS[1 - ranks.rank :: 2]
    for batch in (mine, others, ITEMS, ITEMS):
        assert_same(net(batch), expected(batch, 0.3).half().float())
    assert set(ranks.times_computed().values()) == {1}


def ragged(x):
    return {"e": [{"t": item[: int(item[0]) % 3] + 1, "s": "a" * int(item[0])} for item in x], "a": x.numpy()}


@case(ranks=2)
def lists_with_an_entry_for_each_item(ranks):
    ranks.nodes(2)
    function = ranks.cached(ragged)
    mine, others = ITEMS[ranks.rank : 12 : 2], ITEMS[1 - ranks.rank : 12 : 2]
    for batch in (mine, others, ITEMS[:14], ITEMS[:14], ITEMS[3:9]):
        found = function(batch)
        assert_same(ragged(batch), found)
        found["e"].clear()
    stats = function.cache_instance.stats()
    assert ranks.total(stats.sent) > 12 and stats.bypasses == {} and stats.hits >= 6 + 12 + 14 + 6


@case()
def identical_batches_are_split_over_nodes(ranks):
    ranks.nodes(ranks.count)
    net = ranks.cached(Backbone())
    for step, batch in enumerate(ITEMS[: 19 * (2 * ranks.count)].split(19)):
        before = sum(map(len, ranks.computed))
        ranks.check(net, batch)
        shares = ranks.all(sum(map(len, ranks.computed)) - before)
        assert sum(shares) == 19, shares  # the first calls of a kind compute whole batches
        assert step < ranks.count or max(shares) - min(shares) <= 1, shares
    ranks.check(net, ITEMS[: 38 * ranks.count])
    assert set(ranks.times_computed().values()) == {1}


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLOATS += [getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)]


class Images(nn.Module):
    def forward(self, x):
        wide = x[:, None, :, None].expand(-1, 2, -1, 4) * 2
        return wide.to(memory_format=torch.channels_last), x.t().contiguous().t(), x[:, 1:]


@case(ranks=2)
def outputs_that_are_laid_out_otherwise(ranks):
    ranks.nodes(2)
    net = ranks.cached(Images())
    for turn in range(3):
        batch = ITEMS[(ranks.rank + turn) % 2 :: 2]
        assert_same(net(batch), Images()(batch))
    assert net.cache_instance.stats().bypasses == {}


@case()
def each_rank_has_another_width_in_a_step(ranks):
    ranks.nodes(ranks.count)

    def doubled(x):
        return {"twice": x * 2, "sum": x.sum(dim=1).to(torch.float64 if x.shape[1] % 2 else torch.int32)}

    cached = ranks.cached(doubled)
    for turn in range(5):
        batch = ITEMS[:8, :1].repeat(1, 2 + (ranks.rank + turn) % ranks.count)
        assert_same(cached(batch), doubled(batch))
    stats = cached.cache_instance.stats()
    received = 8 * (ranks.count - 1)
    assert (stats.misses, stats.hits, stats.received) == (8, 32, received), stats


@case()
def ranks_that_pass_calls_by(ranks):
    ranks.nodes(ranks.count)
    net = ranks.cached(nn.Sequential(Backbone(), nn.Dropout(0.5)).eval())
    for step in range(4):
        net.train(ranks.rank == 1 and step in (1, 2))
        batch = ITEMS[8 * step :][:8]
        if ranks.rank == 2 and step in (2, 3):
            batch = batch.clone().requires_grad_()
        output = net(batch)
        assert net.training or torch.equal(output, expected(batch))
        assert output.requires_grad == batch.requires_grad
    net.eval()
    ranks.computed.clear()
    ranks.check(net, ITEMS[:32])  # what was passed by has been computed by the others
    assert ranks.total(sum(map(len, ranks.computed))) == 0
    assert sum(net.cache_instance.stats().bypasses.values()) == (0, 16, 16, 0)[ranks.rank]


@case()
def weights_that_change_in_all_ranks_at_once(ranks):
    ranks.nodes(2)
    net = ranks.cached(Backbone())
    for scale in (2.0, 3.0, 2.0):
        with torch.no_grad():
            net.scale.fill_(scale)
        ranks.computed.clear()
        ranks.check(net, ITEMS[ranks.rank :: ranks.count], scale)
        ranks.check(net, ITEMS, scale)
    assert ranks.warnings == []


@case(ranks=3)
def a_cache_that_one_rank_closes(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())
    ranks.check(net, ITEMS[ranks.rank :: 3])
    if ranks.rank == 2:
        net.cache_instance.close()
    for _ in range(2):
        ranks.computed.clear()
        ranks.check(net, ITEMS)
    assert sum(map(len, ranks.computed)) == (len(ITEMS) if ranks.rank == 2 else 0)


@case(ranks=3)
def rows_that_are_wrong_are_dropped_by_all(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone(), verify=1.0)
    if ranks.rank == 1:  # its rows are computed from other items than their keys say
        ranks.on_compute = lambda x, output: output.add_(1)
    net(ITEMS[ranks.rank :: 3].clone())
    ranks.on_compute = lambda x, output: None
    net(ITEMS.clone())  # each rank looks at its own rows
    mismatched = ranks.all(net.cache_instance.stats().mismatched)
    assert sum(count > 0 for count in mismatched) >= 1, mismatched
    ranks.check(net, ITEMS.clone())  # all drop what was found to be wrong
    mismatched = ranks.all(net.cache_instance.stats().mismatched)
    ranks.check(net, ITEMS.clone())
    assert ranks.all(net.cache_instance.stats().mismatched) == mismatched


@case(ranks=3)
def a_forward_that_is_random_in_one_rank(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())
    ranks.check(net, ITEMS[ranks.rank :: 3][:2])
    if ranks.rank == 1:
        ranks.on_compute = lambda x, output: torch.rand(1)
    for turn in range(3):
        ranks.check(net, ITEMS[(ranks.rank + turn) % 3 :: 3])
    ranks.check(net, ITEMS)
    bypasses = ranks.all(dict(net.cache_instance.stats().bypasses))
    assert bypasses[1].keys() == {"random"}, bypasses


@case(ranks=3)
def outputs_that_depend_on_the_batch(ranks):
    ranks.nodes(3)

    def centred(x):
        return x - x.mean(dim=0)

    cached = ranks.cached(centred, probe=True)
    for turn in range(4):
        batch = ITEMS[(ranks.rank + turn) % 3 :: 3][: 8 + ranks.rank]
        assert_same(cached(batch), centred(batch))
    assert cached.cache_instance.stats().hits == 0
    assert cached.cache_instance.stats().bypasses.keys() == {"batch"}


@case(ranks=3)
def the_probe_of_the_first_calls(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone(), probe=True)
    for turn in range(4):
        for part in ITEMS[(ranks.rank + turn) % 3 :: 3].split(16):
            ranks.check(net, part)
    stats = net.cache_instance.stats()
    assert stats.bypasses == {} and ranks.total(stats.misses) == len(ITEMS), stats


class Outer(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * 2


@case(ranks=3)
def a_cache_inside_of_another_one(ranks):
    ranks.nodes(3)
    inner = ranks.cached(Backbone())
    net = ranks.cached(Outer(inner))
    for turn in range(4):
        batch = ITEMS[(ranks.rank * turn) % 3 :: 3]
        assert_same(net(batch), expected(batch) * 2)
        ranks.check(inner, batch)
    assert_same(net(ITEMS), expected(ITEMS) * 2)


@case()
def two_modules_in_turn_and_a_function(ranks):
    ranks.nodes(2)
    first, second = ranks.cached(Backbone()), ranks.cached(nn.Sequential(Backbone(3.0)))

    def halved(x, by):
        return x / by

    third = ranks.cached(halved, shared_args=["by"])
    for turn in range(3):
        batch = ITEMS[(ranks.rank + turn) % ranks.count :: ranks.count]
        ranks.check(first, batch)
        ranks.check(second, batch, 3.0)
        assert_same(third(batch, by=2.0), batch / 2)
    misses = [net.cache_instance.stats().misses for net in (first, second, third)]
    assert misses == [len(ITEMS) // ranks.count] * 3


@case()
def groups_of_some_ranks(ranks):
    ranks.nodes(ranks.count)
    groups = [dist.new_group(list(range(first, ranks.count, 2))) for first in range(2)]  # maybe of one rank
    net = ranks.cached(Backbone(), process_group=lambda: groups[ranks.rank % 2])
    for step in range(2 + ranks.rank % 2):  # another group makes another number of calls
        for part in ITEMS[step * 48 :][:48].split(12 + ranks.rank % 2):
            ranks.check(net, part)
    times = ranks.times_computed()
    assert [times[item] for item in ITEMS[:, 0].tolist()] == [2] * 96 + [1] * 48 + [0] * 48


class Named(Backbone):
    def __init__(self, group):
        super().__init__()
        self.torchcache_process_group = group


@case()
def groups_that_a_module_names(ranks):
    ranks.nodes(2)
    named = dist.new_group()
    for module in (Named(named), nn.Sequential(Backbone())):  # the second one names none: it has all ranks
        net = ranks.cached(module, process_group=None)
        ranks.check(net, ITEMS[ranks.rank :: ranks.count])
        ranks.check(net, ITEMS)
        assert set(ranks.times_computed().values()) == {1} and net.cache_instance.stats().received > 0
        ranks.computed.clear()


@case(ranks=3)
def a_folder_that_one_rank_has(ranks):
    ranks.nodes(3)
    folders = [f"{os.environ['TESTS_JOB']} rows {rank}" for rank in range(3)]
    options = {"persistent_cache_dir": folders[ranks.rank], "persistent_module_hash": "folder"}
    net = ranks.cached(Backbone(), **options)
    if ranks.rank == 1:
        with net.cache_instance.alone():
            ranks.check(net, ITEMS)
    net.cache_instance.close()
    ranks.all(0)
    ranks.computed.clear()
    ranks.nodes(6)  # where memory is empty
    net = ranks.cached(Backbone(), **options)
    for turn in range(4):
        ranks.check(net, ITEMS[(ranks.rank + turn) % 3 :: 3])
    stats = net.cache_instance.stats()
    assert sum(map(len, ranks.computed)) == stats.misses == 0
    assert (stats.disk_rows, stats.received > 0) == (len(ITEMS) if ranks.rank == 1 else 0, ranks.rank != 1)


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 190

    def __getitem__(self, index):
        return ITEMS[index]


@case(ranks=3)
def a_warmup(ranks):
    ranks.nodes(3)
    net = ranks.cached(Backbone())
    stats = net.cache_instance.warmup(Squares(), batch_size=16)
    assert ranks.times_computed() == dict.fromkeys(ITEMS[:190, 0].tolist(), 1), ranks.times_computed()
    assert ranks.total(stats.computed) == 190
    ranks.computed.clear()
    ranks.check(net, ITEMS[:190])
    ranks.check(net, ITEMS[:190])
    assert ranks.total(sum(map(len, ranks.computed))) == 0


class Loaded(Squares):
    """Samples that worker processes make with the cached module."""

    def __init__(self, net):
        self.net = net

    def __getitem__(self, index):
        assert get_worker_info() is not None
        return self.net(ITEMS[index : index + 1])[0]


@case(ranks=2)
def workers_of_loaders_call_alone(ranks):
    ranks.nodes(2)
    net = ranks.cached(Backbone())
    ranks.check(net, ITEMS[ranks.rank :: 2])
    loader = DataLoader(Loaded(net), 10, num_workers=1, sampler=range(10 + 20 * ranks.rank))
    outputs = torch.cat(list(loader))
    assert_same(outputs, expected(ITEMS[: len(outputs)]))
    ranks.check(net, ITEMS)


@case(ranks=2)
def calls_of_different_modules(ranks):
    ranks.nodes(2)
    first, second = ranks.cached(Backbone()), ranks.cached(nn.Sequential(Backbone(3.0)))
    ranks.check(first, ITEMS[:4])
    with raises(RankError, "out of step", "Backbone", "Sequential", within=2.0):
        (second if ranks.rank else first)(ITEMS[4:8])
    ranks.check(second, ITEMS[ranks.rank :][:4], 3.0)  # and go on


@case()
def calls_of_all_kinds(ranks):
    """What ranks call is drawn at random, and outputs are always those without the cache."""
    ranks.nodes(2)
    mine, common = torch.Generator().manual_seed(ranks.rank), torch.Generator().manual_seed(-1)

    def draw(count, generator=mine):
        return int(torch.randint(count, (), generator=generator))

    options = [{}, {"max_memory_cache_size": 20_000}, {"policy": "lru", "max_memory_cache_size": 4000}]
    nets = [ranks.cached(Backbone(2.0 + i), verify=0.1, **more) for i, more in enumerate(options)]
    for _ in range(300 if SOAK else 15):
        number = draw(3, common)
        size = [0, 1, 5, 20, 60][draw(5)]
        batch = ITEMS[(torch.rand(size, generator=mine) ** 2 * 100).long()]
        if draw(8) == 0:
            batch = batch.clone().requires_grad_()
        if draw(10) == 0:
            nets[number].cache_instance.clear()
        output = nets[number](batch)
        assert (
            torch.equal(output, expected(batch, 2.0 + number)) and output.requires_grad == batch.requires_grad
        )
    for net in nets:
        stats = net.cache_instance.stats()
        assert (stats.faults, stats.mismatched) == (0, 0), stats


run_cases()
