"""The time to find an item against its size, beside the caches that users would write themselves."""

import tempfile
from pathlib import Path

import torch

from tests.benchmarks.hits import BATCH, PEER, make_features
from tests.benchmarks.peers import Decorated, DictByContent, DictByIndex, JoblibItems, ModuleCache
from tests.benchmarks.peers import torchcache as peer
from tests.benchmarks.plot import draw
from tests.benchmarks.report import per_item
from tests.benchmarks.timing import interleave, progress
from torchcache2 import torchcache

OURS, JOBLIB, LIMIT = "torchcache2", "joblib.Memory", "x.sum() (one pass)"
BY_CONTENT, BY_INDEX = "dict by sha1 of bytes", "dict by index (inputs not read)"

# Input: rounds. joblib takes part in every sixth: it reads a file for each item.
CASES = {
    (16,): 48,
    (128,): 48,
    (1024,): 48,
    (3, 32, 32): 36,
    (3, 64, 64): 24,
    (3, 128, 128): 18,
    (3, 224, 224): 12,
}
EVERY = {JOBLIB: 6}
ROW_BYTES = 768 * 4


def run(report, plot):
    times, wrong, written = {}, {}, 0
    for shape, rounds in CASES.items():
        x = torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            progress(f"sizes: {shape}, filling and checking")
            caches = make_caches(folder)
            wrong[shape] = {name: check(name, cache, x) for name, cache in caches.items()}
            if ModuleCache.name in caches:
                written = caches[ModuleCache.name].bytes_on_disk()
            progress(f"sizes: {shape}")
            times[shape] = measure(caches, x, rounds)
    title = f"All-hit batches of {BATCH}, float32 → (768,) float32: µs per item, median (P90)"
    report.table(title, ("item", *times[(16,)]), time_rows(times))
    report.table(
        f"Rows that are wrong, of {BATCH}: items that were cached, in another order / the same items with "
        "one element changed",
        ("item", *wrong[(16,)]),
        [(shape, *map(describe_wrong, of_shape.values())) for shape, of_shape in wrong.items()],
    )
    report.text(
        f"`{JOBLIB}` is called for one item at a time, as batches of shuffled data do not come back. "
        "Only torchcache2 looks at the module's code and weights at every call."
    )
    if written:
        report.text(
            f"`{ModuleCache.name}` finds an item by the key that its user passes, and reads no input. "
            f"Its files of {BATCH} rows, {BATCH * ROW_BYTES / 1e6:.1f} MB, take {written / 1e6:.1f} MB: "
            "each holds the output of the whole batch."
        )
    title = f"Time to find an item, in batches of {BATCH} hits (float32 → (768,) float32)"
    draw(Path(plot), title, times, reference=LIMIT)


def make_caches(folder):
    """A cache of each kind that is installed, by name, for modules that compute the same."""
    caches = {
        OURS: Decorated(torchcache(make_features())().eval()),
        PEER: Decorated(peer()(make_features())().eval()),
        JOBLIB: JoblibItems(make_features()().eval(), folder),
        BY_CONTENT: DictByContent(make_features()().eval()),
        BY_INDEX: DictByIndex(make_features()().eval()),
    }
    if ModuleCache.is_installed():
        caches[ModuleCache.name] = ModuleCache(make_features(), Path(folder, "by key"))
    return caches


def check(name, cache, x):
    """Fill a cache; how many rows are wrong for hits in another order, and for changed items."""
    plain = make_features()()
    cache(x, list(range(BATCH)))
    order = torch.randperm(BATCH, generator=torch.Generator().manual_seed(2))
    shuffled = wrong_rows(cache(x[order], order.tolist()), plain(x[order]))
    assert computed(name, cache) == BATCH, f"{name}: cached items were not found"
    changed = x.clone()
    changed.view(BATCH, -1)[:, 3] += 1
    edited = wrong_rows(cache(changed, list(range(BATCH))), plain(changed))
    if name in (OURS, JOBLIB, BY_CONTENT):
        assert (shuffled, edited) == (0, 0), name
        assert computed(name, cache) == 2 * BATCH, name
    return shuffled, edited


def wrong_rows(output, expected):
    # A forward of one item, as for joblib, may round differently.
    return int((~torch.isclose(output, expected, rtol=1e-4, atol=1e-4)).any(1).sum())


def computed(name, cache):
    """How many items a cache did not find so far."""
    if name == OURS:
        return cache.module.cache_instance.stats().misses
    if name == PEER:  # it does not count: whatever the last call had to compute came on top of the first
        return BATCH + cache.module.cache_instance.current_indices_to_embed.numel()
    return cache.module.items


def measure(caches, x, rounds):
    indices = list(range(BATCH))
    functions = {name: lambda cache=cache: cache(x, indices) for name, cache in caches.items()}
    before = {name: computed(name, cache) for name, cache in caches.items()}
    functions[PEER]()  # it reports on its last call only, which has to be one of hits
    measured = interleave({**functions, LIMIT: x.sum}, rounds=rounds, every=EVERY)
    for name, cache in caches.items():
        assert computed(name, cache) == (BATCH if name == PEER else before[name]), name
    return measured


def describe_wrong(counts):
    return f"{counts[0]} / {counts[1]}"


def time_rows(times):
    """A row for each size: the median of each cache, and its P90."""
    return [
        (shape, *(f"{per_item(t.median, BATCH)} ({per_item(t.p90, BATCH)})" for t in of_shape.values()))
        for shape, of_shape in times.items()
    ]
