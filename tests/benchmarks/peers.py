"""The caches that a user would reach for instead, each behind one call: `cache(x, indices)`.

`x` is a batch, and `indices` are the numbers of its items in the dataset, which only `DictByIndex` and
`ModuleCache` look at. None of them holds what `DictByContent` and `JoblibItems` leave out: weights, other
arguments, a budget.
"""

import contextlib
import hashlib
import io
import logging
from importlib.util import find_spec
from pathlib import Path

import joblib
import torch


def _import_torchcache():
    # It configures the root logger when it is imported, and closes the handlers that it finds there. The
    # test runner's are to survive that.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        from torchcache import torchcache
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return torchcache


torchcache = _import_torchcache()


class Counted:
    """A module, and how many items it has computed."""

    def __init__(self, module):
        self.module = module
        self.items = 0

    def __call__(self, x):
        self.items += len(x)
        return self.module(x)


class DictByContent:
    """A dict of rows as users write it by hand: the key is a digest of the item's bytes.

    sha1 is the fastest digest of `hashlib` where the processor has instructions for it: 1.5 times as fast
    as blake2b on large items.
    """

    def __init__(self, module):
        self.module = Counted(module)
        self.rows = {}

    def __call__(self, x, indices):
        keys = [hashlib.sha1(item.numpy().tobytes()).digest() for item in x]
        return _from_rows(self.rows, keys, self.module, x)


class DictByIndex:
    """The floor: a dict of rows by number in the dataset. It never looks at the items."""

    def __init__(self, module):
        self.module = Counted(module)
        self.rows = {}

    def __call__(self, x, indices):
        return _from_rows(self.rows, indices, self.module, x)


def _from_rows(rows, keys, module, x):
    missing = [position for position, key in enumerate(keys) if key not in rows]
    if missing:
        for position, row in zip(missing, module(x[missing]), strict=True):
            rows[keys[position]] = row.clone()  # not a view that keeps the whole batch alive
    return torch.stack([rows[key] for key in keys])


class ModuleCache:
    """torch-module-cache, whose users give each item a key: here its number in the dataset.

    With its level MEMORY it writes a file for each item as well. It computes a whole batch if an item is new.
    """

    name = "torch-module-cache 0.1.4"

    def __init__(self, module_class, folder):
        from torch_module_cache import CacheLevel, cache_module

        class Features(module_class):
            items = 0

            def forward(self, x):
                Features.items += len(x)
                return super().forward(x)

        self.folder = Path(folder)
        decorate = cache_module(cache_path=str(folder), cache_level=CacheLevel.MEMORY)
        self.module = decorate(Features)().eval()

    @staticmethod
    def is_installed():
        return find_spec("torch_module_cache") is not None

    def __call__(self, x, indices):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints that it makes the module
            return self.module(x, cache_key=indices)

    @property
    def items(self):
        """How many it has computed."""
        return type(self.module).items

    def bytes_on_disk(self):
        return sum(path.stat().st_size for path in self.folder.rglob("*.pt"))


class JoblibItems:
    """`joblib.Memory` in a folder, called for one item at a time.

    For whole batches it would be faster, but batches of shuffled data never come back, so nothing would
    be found. The module is left out of the key: joblib would pickle all of its weights for each item.
    """

    def __init__(self, module, folder):
        self.module = Counted(module)
        self.embed = joblib.Memory(folder, verbose=0).cache(_embed, ignore=["module"])

    def __call__(self, x, indices):
        return torch.stack([torch.from_numpy(self.embed(item.numpy(), self.module)) for item in x])


def _embed(item, module):
    return module(torch.from_numpy(item)[None])[0].numpy()


class Decorated:
    """A module that torchcache2 or torchcache 0.6.0 has cached."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x, indices):
        return self.module(x)
