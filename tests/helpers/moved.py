"""What names torchcache2 in its code or state: namespaces and pickles of it, for another process.

`tests/identity/test_moved.py` runs this file with the package as it is, and with its files under other names:
``moved.py OWN OTHERS`` prints the namespaces, writes pickles to one folder, or loads those of another.
"""

import copy
import functools
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

import torchcache2
from torchcache2 import Cache, CacheSettings, InputError, Keys, torchcache

SETTINGS = CacheSettings(policy="lru")
cached = torchcache(cache_dtype=torch.float64)
X = torch.arange(12.0).reshape(4, 3)


@torchcache
def doubled(x):
    return 2 * x


class Plain(nn.Module):
    def __init__(self, held=None):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)
        self.held = held

    def forward(self, x):
        return self.layer(x)


@torchcache
class Decorated(Plain):
    pass


def names_the_decorator(x):
    return x if torchcache is None else x + 1


def names_through_the_package(x):
    return x if torchcache2.torchcache is None else x + 1


def names_settings(x):
    return x + len(CacheSettings(policy="lru").policy)


def names_keys_and_cache(x):
    return x if isinstance(x, (Keys, Cache)) else x + 1


def names_an_error(x):
    try:
        return x + 1
    except InputError:
        return x


def names_an_object(x):
    return x + (SETTINGS.policy == "lru")


def names_a_decorator_with_options(x):
    return x if cached is None else x + 1


def names_a_decorated_function(x):
    return doubled(x) + 1


def closure(value):
    def inner(x):
        return x if value is None else x + 1

    return inner


def taken(value):
    """A call whose argument is of a class of the package: its context is a part of the items' keys."""
    function = torchcache(lambda x, option: x)
    function(X, value)
    return function.cache_instance._calls[-1].context.hex()


def frozen(module):
    return module.eval().requires_grad_(False)


def child():
    return frozen(torchcache(nn.Sequential(nn.Linear(3, 3), nn.Tanh())))


def seen():
    """A decorated module, which has been called."""
    torch.manual_seed(0)
    module = child()
    module(X)
    return module


MAKERS = {
    "decorator": lambda: names_the_decorator,
    "package": lambda: names_through_the_package,
    "settings": lambda: names_settings,
    "keys and cache": lambda: names_keys_and_cache,
    "error": lambda: names_an_error,
    "object": lambda: names_an_object,
    "decorator with options": lambda: names_a_decorator_with_options,
    "decorated function": lambda: names_a_decorated_function,
    "settings as attribute": lambda: Plain(SETTINGS),
    "keys as attribute": lambda: Plain(Keys(bytes(16), np.zeros((2, 16), np.uint8))),
    "statistics as attribute": lambda: Plain(seen().cache_instance.stats().__class__()),
    "cache as attribute": lambda: Plain(seen().cache_instance),
    "class of a cache": lambda: Plain(type(seen().cache_instance)),
    "method of a cache": lambda: Plain(seen().cache_instance.refresh),
    "fingerprint": lambda: Plain(frozen(torchcache(Plain())).cache_instance.fingerprint),
    "error as attribute": lambda: Plain([InputError("none"), InputError]),
    "submodule": lambda: Plain(sys.modules[CacheSettings.__init__.__globals__["__name__"]]),
    "decorator as attribute": lambda: Plain([torchcache, functools.partial(torchcache, policy="lru")]),
    "wrapper as attribute": lambda: Plain([doubled, Decorated.forward, Decorated.__init__]),
    "decorated child": lambda: nn.Sequential(seen(), nn.Tanh()),
    "child of a decorated class": lambda: nn.Sequential(Decorated(), nn.Tanh()),
    "decorated class": lambda: Decorated(),
    "decorated class, held": lambda: Plain(Decorated),
    "copy": lambda: copy.deepcopy(Decorated()),
    "closure": lambda: closure(CacheSettings),
    "closure of a decorated module": lambda: closure(seen()),
}
ARGUMENTS = {"settings": lambda: SETTINGS}
PICKLED = {
    "settings": lambda: SETTINGS,
    "keys": lambda: Keys(bytes(16), np.zeros((2, 16), np.uint8)),
    "statistics": lambda: seen().cache_instance.stats(),
    "error": lambda: InputError("none"),
    "public names": lambda: [getattr(torchcache2, name) for name in torchcache2.__all__],
    "cache": lambda: Cache(bytes(16), SETTINGS),
    "cache of a module": lambda: seen().cache_instance,
    "decorated instance": seen,
    "around a decorated instance": lambda: nn.Sequential(seen()),
    "instance of a decorated class": lambda: frozen(Decorated()),
    "decorated function": lambda: doubled,
    "decorated class": lambda: Decorated,
}


def namespace(thing):
    """The namespace of a module or function now; of a decorated one its own."""
    if not hasattr(type(thing), "cache_instance"):
        thing = torchcache(thing)
    return thing.cache_instance.module_hash


def names_in(data):
    """Modules and names that a pickle refers to."""
    found = []

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            found.append(f"{module}.{name}")
            return super().find_class(module, name)

    with open(data, "rb") as file:
        Reader(file).load()
    return [name for name in found if name.startswith("torchcache2")]


def main(own, others):
    for name, make in PICKLED.items():
        (Path(own) / name).write_bytes(pickle.dumps(make()))
    loaded = {}
    for file in sorted(Path(others).iterdir()):
        with open(file, "rb") as opened:
            thing = pickle.load(opened)
        if isinstance(thing, nn.Module):
            assert torch.equal(thing(X), PICKLED[file.name]()(X))
        loaded[file.name] = names_in(file)
    found = {name: namespace(make()) for name, make in MAKERS.items()}
    found |= {f"argument {name}": taken(make()) for name, make in ARGUMENTS.items()}
    print(json.dumps({"namespaces": found, "loaded": loaded}))


if __name__ == "__main__":
    main(*sys.argv[1:])
