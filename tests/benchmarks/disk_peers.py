"""What keeps rows on a disk, ours and others, each behind the same few calls.

A store is made for a folder and items. `write()` returns when the rows of all have been written, `open()`
gets ready to read them, `read(positions)` returns one tensor with some rows, `close()` lets go.
"""

import copy
import logging

import lmdb
import numpy as np
import torch
from torch import nn

from tests.benchmarks.disk_machine import BATCH
from tests.benchmarks.peers import torchcache as peer
from torchcache2 import Keys, torchcache
from torchcache2.core.rows import Rows
from torchcache2.tiers.disk.tier import DiskTier

CPU = torch.device("cpu")
NAMESPACE = b"benchmark" + bytes(7)


class Items:
    """`count` items of two numbers, the rows that `Rows` makes of them, and random keys; in batches.

    The two numbers are what torchcache 0.6.0 can tell apart: it adds up whole numbers of each input.
    """

    def __init__(self, count, width, batch=BATCH):
        self.batch = batch
        self.inputs = torch.zeros(count, 2)
        self.inputs[:, 0] = torch.arange(count)
        self.width = width
        self.rows = make_module()(width)(self.inputs)
        self.keys = np.random.default_rng(0).integers(0, 256, (count, 16), dtype=np.uint8)

    def __len__(self):
        return len(self.inputs)

    @property
    def row_bytes(self):
        return self.width * self.rows.element_size()

    def first(self, count):
        """The first of them."""
        some = copy.copy(self)
        some.inputs, some.rows, some.keys = self.inputs[:count], self.rows[:count], self.keys[:count]
        return some

    def batches(self):
        """Positions of batches, in order."""
        return np.split(np.arange(len(self)), range(self.batch, len(self), self.batch))


def make_module():
    """A new class at every call, since decorating may patch it."""

    class Rows(nn.Module):
        """A forward that costs next to nothing: a row is a multiple of the weight."""

        def __init__(self, width):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            self.weight = nn.Parameter(torch.randn(width, generator=generator), requires_grad=False)

        def forward(self, x):
            return (x[:, :1] + 1) * self.weight

    return Rows


class Ours:
    """A disk tier."""

    is_slow = False
    name = "torchcache2"

    def __init__(self, folder, items, codec="none"):
        self.folder, self.items, self.codec = folder, items, codec
        if codec != "none":
            self.name = f"torchcache2, {codec}"

    def write(self, **options):
        tier = DiskTier(self.folder, codec=self.codec, **options)
        for positions in self.items.batches():
            rows = self.items.rows[positions[0] : positions[-1] + 1]
            kept = tier.put(self._keys(positions), Rows.from_pytree(rows, len(rows), device=CPU))
            assert kept == len(rows)
        tier.close()
        assert tier.stats().faults == 0

    def open(self):
        self.tier = DiskTier(self.folder, codec=self.codec)
        # Segments are opened when something is looked for.
        assert not self.tier.get(Keys(NAMESPACE, np.zeros((1, 16), np.uint8))).parts

    def read(self, positions):
        ((found, rows),) = self.tier.get(self._keys(positions)).parts
        assert len(found) == len(positions)
        return rows.columns[0]

    def close(self):
        self.tier.close()

    def _keys(self, positions):
        return Keys(NAMESPACE, self.items.keys[positions])


class Decorated:
    """The same through the decorator: keys of items, the memory tier, and what a call costs."""

    is_slow = False
    name = "torchcache2, decorated"

    def __init__(self, folder, items):
        self.folder, self.items = folder, items

    def _decorated(self, **options):
        decorate = torchcache(
            persistent=True, persistent_cache_dir=self.folder, compression="none", **options
        )
        self.module = decorate(make_module())(self.items.width).eval()

    def write(self):
        self._decorated()
        for positions in self.items.batches():
            self.module(self.items.inputs[positions])
        self.module.cache_instance.close()

    def open(self):
        self._decorated(max_memory_cache_size=0)  # so that all comes from files
        self.module(self.items.inputs[:1])

    def read(self, positions):
        return self.module(self.items.inputs[positions])

    def close(self):
        assert self.module.cache_instance.stats().misses == 0
        self.module.cache_instance.close()


class TorchSave:
    """One `torch.save` file for each item; nothing is synced."""

    is_slow = True
    name = "torch.save, a file per item"

    def __init__(self, folder, items):
        self.folder, self.items = folder, items
        self.paths = [folder / f"{key.tobytes().hex()}.pt" for key in items.keys]

    def write(self):
        for path, row in zip(self.paths, self.items.rows, strict=True):
            torch.save(row.clone(), path)  # not a view, which would bring all rows along

    def open(self):
        pass

    def read(self, positions):
        out = torch.empty(len(positions), self.items.width)
        for target, position in zip(out, positions, strict=True):
            target.copy_(torch.load(self.paths[position], weights_only=True))
        return out

    def close(self):
        pass


class Torchcache:
    """torchcache 0.6.0 with `persistent=True`: a file for each item; nothing is synced.

    No row stays in memory. Its messages are turned off, as it has one for each row that does not stay.
    """

    is_slow = True
    name = "torchcache 0.6.0"

    def __init__(self, folder, items):
        self.folder, self.items = folder, items
        logging.getLogger("torchcache").setLevel(logging.ERROR)
        self.module = self._module()

    def _module(self):
        options = {"persistent_cache_dir": str(self.folder), "max_memory_cache_size": 0}
        return peer(persistent=True, **options)(make_module())(self.items.width).eval()

    def write(self):
        for positions in self.items.batches():
            self.module(self.items.inputs[positions])
        cache = self.module.cache_instance
        assert len(list(cache.cache_dir.iterdir())) == len(self.items)

    def open(self):
        self.module = self._module()

    def read(self, positions):
        output = self.module(self.items.inputs[positions])
        cache = self.module.cache_instance
        assert len(cache.current_indices_to_embed) == len(cache.cache) == 0  # all from files
        return output

    def close(self):
        pass


class Lmdb:
    """LMDB, a value for each row, a transaction for each batch; one sync at the end.

    Without read-ahead, as its documentation advises for random reads.
    """

    is_slow = False
    name = "LMDB"

    def __init__(self, folder, items):
        self.folder, self.items = folder, items
        self.keys = [key.tobytes() for key in items.keys]
        self.room = 4 * items.rows.nbytes + (64 << 20)

    def write(self):
        values = self.items.rows.numpy()
        with lmdb.open(str(self.folder), map_size=self.room, sync=False) as environment:
            for positions in self.items.batches():
                with environment.begin(write=True) as transaction:
                    for position in positions:
                        transaction.put(self.keys[position], values[position])
            environment.sync(True)

    def open(self):
        options = {"readonly": True, "lock": False, "readahead": False}
        self.environment = lmdb.open(str(self.folder), map_size=self.room, **options)

    def read(self, positions):
        out = np.empty((len(positions), self.items.width), np.float32)
        with self.environment.begin(buffers=True) as transaction:
            for target, position in zip(out, positions, strict=True):
                target[:] = np.frombuffer(transaction.get(self.keys[position]), np.float32)
        return torch.from_numpy(out)

    def close(self):
        self.environment.close()
