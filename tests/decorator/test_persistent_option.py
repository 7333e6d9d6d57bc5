"""When rows are kept on disk: a folder is enough, and `persistent=False` leaves it alone."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from torchcache2 import CacheSettings, torchcache

X = torch.randn(6, 8)


def kept(folder):
    return len(list(Path(folder).glob("*/*.safetensors")))


def make(overrides=None, **options):
    """A module of a class that was decorated with options, and overrides some."""

    @torchcache(probe=False, **options)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 4).requires_grad_(False)
            for name, value in (overrides or {}).items():
                setattr(self, f"torchcache_{name}", value)

        def forward(self, x):
            return self.fc(x)

    torch.manual_seed(0)
    return Net()


def misses(module):
    module(X)
    with module.cache_instance as cache:
        return cache.stats().misses


def test_a_folder_is_enough(path):
    assert [misses(make(persistent_cache_dir=path)) for _ in range(2)] == [6, 0]
    assert kept(path) == 1


# Options of the decorator, those of the module, and whether the folder is used.
CASES = [
    ({}, {}, False),
    ({"persistent": False}, {}, False),
    ({"dir": True}, {}, True),
    ({"dir": True, "persistent": True}, {}, True),
    ({"dir": True, "persistent": False}, {}, False),
    ({}, {"dir": True}, True),
    ({"persistent": False}, {"dir": True}, False),
    ({"dir": True}, {"persistent": False}, False),
    ({"dir": True}, {"dir": None}, False),
    ({"dir": True, "persistent": False}, {"persistent": True}, True),
]


@pytest.mark.parametrize(("options", "overrides", "uses"), CASES, ids=str)
def test_the_folder_of_a_decorator_or_a_module_is_used_unless_it_is_switched_off(
    path, options, overrides, uses
):
    options, overrides = (
        {("persistent_cache_dir" if k == "dir" else k): (path if v is True and k == "dir" else v)
         for k, v in some.items()}
        for some in (options, overrides)
    )  # fmt: skip
    module = make(overrides, **options)
    assert module.cache_instance.settings.is_persistent is uses
    assert module.cache_instance.cache_dir == (path if uses else None)
    assert misses(module) == 6
    assert kept(path) == uses
    assert path.exists() is uses


def test_persistent_without_a_folder_has_a_temporary_one():
    module = make({"persistent_cache_dir": None}, persistent=True, persistent_cache_dir="never made")
    assert module.cache_instance.settings.is_persistent
    assert misses(module) == 6 and not Path("never made").exists()


def test_caches_with_one_folder_share_their_tiers(path):
    plain, named = (CacheSettings(persistent=on, persistent_cache_dir=path) for on in (None, True))
    off = CacheSettings(persistent=False, persistent_cache_dir=path)
    assert plain.shares_tiers_with(named) and named.shares_tiers_with(plain)
    assert not off.shares_tiers_with(plain)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_of_settings_keep_what_was_not_said(again, path):
    assert again(CacheSettings()).replace({"persistent_cache_dir": path}).is_persistent
    assert not again(CacheSettings(persistent_cache_dir=path)).replace({"persistent": False}).is_persistent
