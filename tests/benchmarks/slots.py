"""`SharedCache` beside stocaching, and beside indexing a tensor that torch shares.

stocaching pins numpy below 2, but works with 2: ``pip install --no-deps stocaching==0.2.1``. It is left out
if it is not installed.
"""

import contextlib
import io
import math

import torch

from tests.benchmarks.report import at_least, per_item
from tests.benchmarks.timing import interleave, progress, ratio
from torchcache2 import SharedCache

SLOTS, CALLS, ROUNDS = 256, 2048, 40
SHAPES = [(3, 32, 32), (3, 224, 224)]
OURS, STOCACHING, TORCH = "torchcache2", "stocaching 0.2.1", "share_memory_()"


def run(report):
    rows, targets = [], []
    for shape in SHAPES:
        progress(f"slots: {shape}")
        gib = 2 * SLOTS * (math.prod(shape) + 1) / 2**30
        caches, plain = {OURS: SharedCache(gib, SLOTS, shape)}, torch.zeros(SLOTS, *shape).byte()
        plain.share_memory_()
        peer = _stocaching()
        if peer is not None:
            with contextlib.redirect_stdout(io.StringIO()):
                caches[STOCACHING] = peer.SharedCache(max(1, math.ceil(gib)), SLOTS, shape)
        values = torch.randint(0, 255, (SLOTS, *shape), dtype=torch.uint8)
        order = torch.randperm(CALLS).remainder(SLOTS).tolist()
        for what, calls in {
            "set_slot": {name: _setting(cache, values, order) for name, cache in caches.items()}
            | {TORCH: _writing(plain, values, order)},
            "get_slot": {name: _getting(cache, order) for name, cache in caches.items()}
            | {TORCH: _indexing(plain, order)},
        }.items():
            times = interleave(calls, rounds=ROUNDS)
            for name, found in times.items():
                medians = per_item(found.median, CALLS), per_item(found.p90, CALLS)
                over = f"{found.median / times[OURS].median:.2f}×"
                rows.append((what, f"{shape}", name, *medians, over))
            if peer is not None:
                over, cold = ratio(times[STOCACHING], times[OURS])
                if what == "get_slot":
                    targets.append(at_least(f"get_slot of {shape}: over stocaching", over, 1, cold=cold))
        for cache in caches.values():
            assert torch.equal(cache.array, values)
    report.table(
        f"{CALLS:,} calls in random order over {SLOTS} slots of uint8 that are set: `set_slot` overwrites",
        ("", "sample", "", "µs, median", "µs, P90", "over torchcache2"),
        rows,
    )
    if targets:
        report.targets(targets)
    else:
        report.text("stocaching is not installed: `pip install --no-deps stocaching==0.2.1`.")


def _stocaching():
    try:
        import stocaching
    except ImportError:
        return None
    return stocaching


def _setting(cache, values, order):
    def call():
        for index in order:
            cache.set_slot(index, values[index], allow_overwrite=True)

    return call


def _getting(cache, order):
    def call():
        for index in order:
            cache.get_slot(index)

    return call


def _writing(array, values, order):
    def call():
        for index in order:
            array[index] = values[index]

    return call


def _indexing(array, order):
    def call():
        for index in order:
            array[index]

    return call
