"""`CachedDataset` gives what the dataset gives: always, to whoever asks, whatever happens to what it keeps."""

import contextlib
import pickle
import tempfile
import os

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from tests.helpers.datasets import Batched, Counted, memory_of, same, sample_of
from torchcache2 import CachedDataset

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
        policy=st.sampled_from(["mru", "lru"]),
    )
    def begin(self, batched, kind, memory, disk, has_path, policy):
        self.folder = tempfile.TemporaryDirectory(prefix="test-")
        self.plain = (Batched if batched else Texts)(COUNT, kind)
        self.options = {"memory_cache_size": memory, "disk_cache_size": disk, "policy": policy}
        if has_path:
            self.options["path"] = self.folder.name + "/cache"
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

    @precondition(lambda self: self.options["memory_cache_size"] != 0)
    @rule()
    def warmup(self):
        done = self.cached.warmup(batch_size=5)
        assert done.found + done.computed == COUNT
        if self.options["memory_cache_size"] == "10MB":
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
            max_examples=1000 if SOAK else 20, stateful_step_count=30 if SOAK else 15, derandomize=not SOAK, deadline=None
        ),
    )
