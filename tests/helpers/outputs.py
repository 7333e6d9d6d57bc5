"""Outputs compared to the last bit, and modules and functions whose hits are counted."""

import inspect
import logging

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


def warnings_of(log):
    """The texts of warnings in the fixture `log`."""
    return [record.getMessage() for record in log if record.levelno >= logging.WARNING]


def bytes_of(tensor):
    return tensor.detach().resolve_conj().contiguous().view(-1).view(torch.uint8)


def assert_same(left, right):
    """Equal to the last bit, NaNs and signs of zeros included."""
    left_leaves, left_spec = pytree.tree_flatten(left)
    right_leaves, right_spec = pytree.tree_flatten(right)
    assert type(left) is type(right) and left_spec == right_spec
    for a, b in zip(left_leaves, right_leaves, strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape)
            assert torch.equal(bytes_of(a), bytes_of(b))
            assert a.requires_grad == b.requires_grad
        else:
            assert a == b or (a != a and b != b)


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
