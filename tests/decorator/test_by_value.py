"""Ray and Spark pickle classes and functions of ``__main__`` by value, with their code.

Ray's own cloudpickle keeps the names of files, so that other processes read the text there. The newest one of
the package index puts ``<dynamic-code>`` in their place.
"""

import dill
import pytest
import torch

from tests.helpers import warm
from torchcache2 import torchcache

# What a user writes; NUMBER stands for what an edit changes.
USED = """
import torch
from torch import nn
from torchcache2 import cache_of, torchcache

SCALE = 2.0

def scaled(x):
    return (lambda y: y * SCALE)(x) + NUMBER

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        nn.init.ones_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        return scaled(self.layer(x))

    def features(self, x):
        return x

@torchcache
class Inherited(Plain):
    pass

@torchcache
class Own(nn.Flatten):
    def forward(self, x):
        return scaled(super().forward(x))

class Derived(Own):
    def forward(self, x):
        return super().forward(x) + 1

class Encoder:
    @torchcache
    def forward(self, x):
        return scaled(x)

@torchcache
def function(x):
    return scaled(x)

MAKERS = {
    "inherited": Inherited,
    "own": Own,
    "derived": Derived,
    "method": Encoder,
    "function": lambda: function,
    "instance": lambda: torchcache(Plain()),
}

def used(name):
    target = MAKERS[name]()
    if isinstance(target, nn.Module):
        target.eval().requires_grad_(False)
    x = torch.arange(20.0).reshape(5, 4)
    outputs = [(target.forward if name == "method" else target)(x) for _ in range(2)]
    stats = cache_of(target).stats()
    assert (stats.misses, stats.hits, stats.bypasses) == (5, 5, {})
    assert torch.equal(*outputs)
    return cache_of(target).module_hash, outputs[0].sum().item()
"""
# It pickles `used` by value, and prints what that returns here.
PICKLE = """
import sys
import CLOUDPICKLE as cloudpickle
with open(sys.argv[1], "wb") as file:
    cloudpickle.dump((used, list(MAKERS)), file)
print({name: used(name) for name in MAKERS})
"""
# The same, but this process alone has the text, as that of a notebook's cells.
IN_CELLS = """
import linecache
text = open("cells.txt").read()
linecache.cache["<cell>"] = len(text), None, text.splitlines(keepends=True), "<cell>"
exec(compile(text, "<cell>", "exec"))
"""
LOAD = """
import pickle
import sys
with open(sys.argv[1], "rb") as file:
    used, names = pickle.load(file)
print({name: used(name) for name in names})
"""


def here_and_elsewhere(folder, number, *, in_cells):
    """What is used in the process that has pickled it, and in two that have loaded it."""
    folder.mkdir()
    text = USED.replace("NUMBER", number)
    (folder / "cells.txt").write_text(text)
    script = folder / "script.py"
    pickle = PICKLE.replace("CLOUDPICKLE", "cloudpickle" if in_cells else "ray.cloudpickle")
    script.write_text((IN_CELLS if in_cells else text) + pickle)
    data = folder / "pickle"
    processes = [warm.run(script, data, cwd=folder)]
    processes += [warm.run(LOAD, data, seed=seed) for seed in ("1", "random")]
    assert all(one.err == "" for one in processes)  # nothing warns that it holds for one process only
    here, *elsewhere = [eval(one.out) for one in processes]
    assert elsewhere[0] == elsewhere[1]
    sums = [{name: total for name, (_, total) in one.items()} for one in (here, *elsewhere)]
    assert sums[0] == sums[1] == sums[2]
    return here, elsewhere[0]


def test_dill_follows_a_function_to_a_cached_one():
    cached = torchcache(lambda x: x * 2)

    def used(x):
        return cached(x) + 1

    loaded = dill.loads(dill.dumps(used, recurse=True))  # as Hugging Face's datasets do
    assert loaded(torch.ones(2, 3)).equal(torch.full((2, 3), 3.0))


@pytest.mark.slow
@pytest.mark.parametrize("in_cells", [False, True], ids=["script", "notebook"])
def test_what_is_pickled_by_value_is_cached_under_the_same_keys_in_all_processes_that_load_it(
    tmp_path, in_cells
):
    here, elsewhere = here_and_elsewhere(tmp_path / "2", "2", in_cells=in_cells)
    # Where there is no text, the instructions count.
    assert [here[name] == elsewhere[name] for name in here] == [not in_cells] * len(here)
    if in_cells:
        _, edited = here_and_elsewhere(tmp_path / "3", "3", in_cells=True)
        assert len({key for one in (elsewhere, edited) for key, _ in one.values()}) == 2 * len(elsewhere)
