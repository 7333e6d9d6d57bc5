"""`code_version`: a text stands for source code and versions; all values still count."""

import functools

import pytest
import torch
import yaml

from torchcache2 import torchcache
from torchcache2.datasets.identity import identify
from torchcache2.identity.sourcecode import Packages

BEFORE = """
import torch
from torch import nn

SCALE = 2.0

def helper(x):
    return x * SCALE

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, 2)
        self.act = torch.relu
        self.eps = 1.0

    def forward(self, x):
        return self.act(helper(self.linear(x))) + self.eps

def made(rate):
    def model(x):
        return helper(x) * rate
    return model

torch.manual_seed(0)
model = Net()
function = made(3.0)
"""
CODE = {  # what is edited: other imports, another function and a base class between, comments
    "import torch\n": "import functools\nimport torch\nfrom torch.nn.functional import relu\nimport yaml\n",
    "def helper(x):\n    return x * SCALE\n": """
@functools.lru_cache
def size(text):
    return len(yaml.safe_load(text))

def helper(x, *, name=None):
    import json
    return relu(x) * size(json.dumps(name)) if name else x * SCALE  # another comment

def other(x):
    return helper(x)

class Base(nn.Module):
    def shift(self, x):
        return x + self.eps
""",
    "class Net(nn.Module)": "class Net(Base)",
    "self.act(helper(self.linear(x))) + self.eps": "self.shift(self.act(other(self.linear(x))))",
    "return helper(x) * rate": "return other(x) * rate",
}
AFTER = functools.reduce(lambda text, edit: text.replace(*edit, 1), CODE.items(), BEFORE)
EDITS = {  # of values, not of code
    "a weight": "model.linear.weight.data.add_(1)",
    "an attribute": "model.eps = 2.0",
    "an attribute that is a function": "model.act = torch.tanh",
    "a global": "SCALE = 3.0",
    "a submodule": "model.linear = torch.nn.Sequential(model.linear)",
    "a closure": "function = made(4.0)",
}


def namespaces(load, path, text, **options):
    path.write_text(text)
    module = load(path)
    caches = [torchcache(**options)(target).cache_instance for target in (module.model, module.function)]
    return {cache.module_hash for cache in caches}


def test_an_edit_of_code_changes_nothing(load, tmp_path):
    path, options = tmp_path / "model.py", {"code_version": "3"}
    before = namespaces(load, path, BEFORE, **options)
    assert before == namespaces(load, path, AFTER, **options)
    assert before.isdisjoint(namespaces(load, path, BEFORE, code_version="4"))
    assert before.isdisjoint(namespaces(load, path, BEFORE))
    assert namespaces(load, path, BEFORE).isdisjoint(namespaces(load, path, AFTER))


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_a_value_counts(edit, load, tmp_path):
    path, options = tmp_path / "model.py", {"code_version": "3"}
    before = namespaces(load, path, BEFORE, **options)
    after = namespaces(load, path, f"{BEFORE}\n{EDITS[edit]}\n", **options)
    assert len(before - after) == (2 if edit == "a global" else 1)


LAZY = """
import torch
from torch import nn
from torchcache2 import LazyModule

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x)

def load():
    net = Net(3, 2)
    net.load_state_dict(torch.load(path, weights_only=True))
    return net

def made(file):
    global path
    path = file
    return LazyModule(load, files=file)
"""


@pytest.mark.usefixtures("without_grad")
def test_code_of_a_lazy_module_does_not_count(load, tmp_path):
    path, x = tmp_path / "net.pt", torch.rand(4, 3)
    torch.save(torch.nn.Linear(3, 2).state_dict(), path)
    options = {"code_version": "1", "persistent_cache_dir": tmp_path / "cache", "ignore": "path"}
    first = torchcache(**options)(load("lazy", LAZY).made(path))
    first(x)
    first.cache_instance.flush()
    again = torchcache(**options)(load("lazy", LAZY.replace("(x)", "(x + 0)")).made(path))
    again(x)
    assert not again.is_loaded
    assert again.module is not None and torch.equal(again(x), first(x))
    assert again.cache_instance.stats().misses == 0


def test_others_of_one_code_version_are_others():
    def doubled(x):
        return x * 2

    def halved(x):
        return x / 2

    functions = [doubled, halved, lambda x: x * 2, lambda x: x * 3]
    found = {torchcache(code_version=1)(one).cache_instance.module_hash for one in functions}
    assert len(found) == 4


def test_code_of_a_dataset_does_not_count(load):
    def of(text, by, **options):
        text = f"class Data:\n  def __getitem__(self, i):\n    {text}\n    return i * self.by\n"
        dataset = load("data", text).Data()
        dataset.by = by
        return identify(dataset, **options).namespace

    first = of("pass", 2, code_version="1")
    assert of("print(i)  # another", 2, code_version="1") == first
    assert first not in (of("pass", 3, code_version="1"), of("pass", 2, code_version="2"), of("pass", 2))


def test_an_upgrade_changes_nothing(monkeypatch):
    def dumped(x):
        return torch.tensor([[len(yaml.dump(one.tolist()))] for one in x])

    def namespaces():
        return [
            torchcache(**options)(dumped).cache_instance.module_hash for options in ({"code_version": 3}, {})
        ]

    before = namespaces()
    monkeypatch.setattr(Packages, "digest", lambda *args: "another")
    assert [one == other for one, other in zip(before, namespaces(), strict=True)] == [True, False]
