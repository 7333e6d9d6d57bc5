"""Outputs compared to the last bit, and modules and functions whose hits are counted."""

import collections
import dataclasses
import enum
import inspect
import logging
import types

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torchcache2 import torchcache


def frozen(module):
    return module.eval().requires_grad_(False)


def hits(cached):
    return cached.cache_instance.stats().hits


def misses(cached):
    return cached.cache_instance.stats().misses


def bypasses(cached):
    return dict(cached.cache_instance.stats().bypasses)


def assert_same(a, b, where="value"):
    """Equal in type, every attribute, and content to the last bit: NaNs and signs of zeros, too."""
    assert type(a) is type(b), where
    if type(a).__module__.startswith("PIL."):  # which is not installed everywhere
        assert (a.mode, a.size, a.tobytes(), a.info) == (b.mode, b.size, b.tobytes(), b.info), where
        return
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape, a.requires_grad, a.device) == (b.dtype, b.shape, b.requires_grad, b.device)
        plain = [t.detach().as_subclass(torch.Tensor).resolve_conj().contiguous().view(-1) for t in (a, b)]
        assert a.numel() == 0 or torch.equal(*[t.view(torch.uint8) for t in plain]), where
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape, a.dtype.metadata) == (b.dtype, b.shape, b.dtype.metadata), where
        assert a.tobytes() == b.tobytes(), where
        if isinstance(a, np.ma.MaskedArray):
            assert_same(a.mask, b.mask, where)
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b) and getattr(a, "maxlen", None) == getattr(b, "maxlen", None), where
        for i, (one, other) in enumerate(zip(a, b, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(a, (dict, types.MappingProxyType)):
        assert_same(list(a), list(b), f"{where}.keys()")
        assert_same(list(a.values()), list(b.values()), f"{where}.values()")
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None), where
    elif isinstance(a, (float, complex)):
        assert np.array(a).tobytes() == np.array(b).tobytes(), where
    elif isinstance(a, enum.Enum):
        assert a is b, where
    elif not hasattr(a, "__dict__") and not dataclasses.is_dataclass(a):
        assert a == b, where
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name), f"{where}.{field.name}")
    if hasattr(a, "__dict__") and not isinstance(a, (np.ndarray, enum.Enum)):
        assert_same(dict(sorted(vars(a).items())), dict(sorted(vars(b).items())), f"vars({where})")


class Notes(logging.Handler):
    """Lists what forwards log. A list that they append to themselves would be their state."""

    def __init__(self):
        super().__init__(logging.DEBUG)
        self.name = f"notes {id(self)}"
        self.notes = []
        logging.getLogger(self.name).addHandler(self)
        logging.getLogger(self.name).setLevel(logging.DEBUG)
        logging.getLogger(self.name).propagate = False

    def emit(self, record):
        self.notes.append(record.args if len(record.args) > 1 else record.args[0])


def note(name, *things):
    logging.getLogger(name).debug("", *things)


def cached(forward, **options):
    """A cached function that lists the sizes of the batches that it computed."""
    sizes = Notes()
    name = sizes.name

    def counting(*args, **kwargs):
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        note(name, len(tensors[0]))
        return forward(*args, **kwargs)

    counting.__signature__ = inspect.signature(forward)
    function = torchcache(**{"probe": False} | options)(counting)  # test_probe counts its forwards
    function.sizes = sizes.notes
    return function


def namespace(thing):
    """The namespace of a module or function, which is decorated for it."""
    return torchcache(thing).cache_instance.module_hash


def warnings_in(log):
    """The texts of warnings among the records of a log."""
    return [record.getMessage() for record in log if record.levelno >= logging.WARNING]
