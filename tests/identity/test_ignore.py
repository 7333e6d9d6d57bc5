"""`ignore`: what the user leaves out of the key, by path."""

import re
import types

import pytest
import torch
from torch import nn

from tests.helpers.outputs import hits
from torchcache2 import cache_of, torchcache

X = torch.arange(1.0, 13.0).view(4, 3)
SEEN = {}
COUNT = 0


@pytest.fixture(autouse=True)
def _without_grad():
    SEEN.clear()
    with torch.no_grad():
        yield


class Tokenizer:
    def __init__(self):
        self.memo = {"": 0.0}
        self.scale = 2.0
        self.calls = 0

    def __call__(self, text):
        self.calls = self.calls + 1
        if text not in self.memo:
            self.memo[text] = self.scale * len(text)
        return self.memo[text]


class Encoder(nn.Module):
    def __init__(self, tokenizer=None):
        super().__init__()
        self.tokenizer = tokenizer or Tokenizer()
        self.lora_A = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.config = {"lr": 0.1, "scale": 1.0}

    def forward(self, x, texts):
        self.seen += len(x)
        factors = torch.tensor([self.tokenizer(text) for text in texts])
        return x * factors[:, None] * self.config["scale"] + self.config["lr"] * 0 + 0 * self.seen


def texts(log):
    return "\n".join(record.getMessage() for record in log)


def calls(module):
    outputs = [module(X, texts) for texts in (list("abcd"), ["a", "b", "c", "éé"], list("abcd"))]
    assert torch.equal(outputs[1][3], X[3] * 4.0)
    return module.cache_instance


def test_what_is_ignored_is_neither_state_nor_part_of_the_key_nor_walked_again():
    cache = calls(
        torchcache(item_args=("texts",), ignore=("tokenizer.memo", "tokenizer.calls", "seen"))(Encoder())
    )
    assert cache.stats().bypasses == {} and cache.stats().hits == 7 and cache.keeper.walks == 1


def test_the_warning_names_paths_that_can_be_ignored(log):
    plain = torchcache(item_args=("texts",))(Encoder())
    calls(plain)
    assert hits(plain) == 0
    (paths,) = re.findall(r"ignore=(\(.*?\)) leaves", texts(log))
    assert set(eval(paths)) == {"seen", "tokenizer.memo", "tokenizer.calls"}
    assert calls(torchcache(item_args=("texts",), ignore=eval(paths))(Encoder())).stats().hits == 7


def closure():
    seen = {}

    @torchcache(ignore="seen")
    def function(x):
        seen[len(seen)] = len(x)
        return x * 2 + 0 * len(seen)

    return function


@torchcache(ignore="SEEN")
def with_global(x):
    SEEN[len(SEEN)] = len(x)
    return x * 2 + 0 * len(SEEN)


@torchcache(ignore=["COUNT"])
def counting(x):
    global COUNT
    COUNT = COUNT + 1
    return x * 2 + 0 * COUNT


SPACE = types.SimpleNamespace(calls=0, scale=1.0)


@torchcache(ignore="SPACE.calls")
def in_namespace(x):
    SPACE.calls += 1
    return x * 2 + 0 * SPACE.calls + 0 * len(vars(SPACE))


FUNCTIONS = {"closure": closure(), "dict": with_global, "number": counting, "namespace": in_namespace}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_variables_are_ignored_by_their_names(function):
    for _ in range(3):
        assert torch.equal(function(X), X * 2)
    assert function.cache_instance.stats().bypasses == {} and hits(function) == 8
    assert function.cache_instance.keeper.walks == 1


def test_other_state_counts_as_ever():
    module = torchcache(item_args=("texts",), ignore=("tokenizer.*", "seen"))(Encoder())
    cache = calls(module)
    before = cache.module_hash
    module.tokenizer.scale, module.lora_A.weight.data = 3.0, torch.ones(3, 3)
    assert cache.module_hash != before  # of the weight
    module.config["scale"] = 2.0
    assert torch.equal(module(X, [""] * 4), X * 0.0) and cache.stats().misses == 9


def test_weights_are_not_read_nor_watched_and_need_no_grad():
    module = torchcache(item_args=("texts",), ignore=("lora_*", "seen", "tokenizer.*"))(Encoder())
    cache = module.cache_instance
    with torch.enable_grad():
        module(X, list("abcd"))
        before = cache.module_hash
        module.lora_A.weight.data.add_(1)
        module.lora_A.requires_grad_(True).weight.sum().backward()
        torch.optim.SGD(module.lora_A.parameters(), 0.1).step()
        module(X, list("abcd"))
    assert cache.stats().bypasses == {} and cache.stats().hits == 4 and cache.module_hash == before
    assert not any("lora" in part for part in cache.fingerprint.parts)


def test_constructor_arguments_of_an_ignored_path_do_not_count():
    @torchcache(item_args=("texts",), ignore=("tokenizer.memo", "tokenizer.calls", "seen", "lora_*"))
    class Made(Encoder):
        pass

    used = Tokenizer()
    used("something")
    first, second = Made(Tokenizer()), Made(used)
    assert first.cache_instance.module_hash == second.cache_instance.module_hash


def test_code_counts_whatever_its_name_is():
    def make(factor):
        def lora_scale(x):
            return x * factor

        @torchcache(ignore=("lora_*", "*"))
        def function(x):
            return lora_scale(x)

        return function

    held = make(2.0)  # a cache does not keep its function
    parts = held.cache_instance
    assert torch.equal(make(2.0)(X), X * 2) and parts.module_hash is not None
    assert any(part.startswith("function lora_scale") for part in parts.fingerprint.parts)
    assert not any(part.startswith("closure factor") for part in parts.fingerprint.parts)


def test_the_patterns_are_part_of_the_key_and_of_the_explanation():
    modules = [torchcache(ignore=names)(Encoder()) for names in ((), "seen", ("seen", "lora_*"))]
    assert len({module.cache_instance.module_hash for module in modules}) == 3
    assert (
        modules[2].cache_instance.explain().endswith("\nleft out by ignore: lora_A\nleft out by ignore: seen")
    )
    assert modules[2].cache_instance.settings.ignore == ("lora_*", "seen")


def test_a_module_overrides_it_and_a_cache_around_it_knows():
    class Inner(Encoder):
        def __init__(self, names):
            super().__init__()
            self.torchcache_ignore = names

    inner = [torchcache(Inner(names)) for names in ("seen", "lora_*", ())]
    assert [one.cache_instance.settings.ignore for one in inner] == [("seen",), ("lora_*",), ()]
    around = [torchcache(nn.Sequential(one)) for one in inner]
    assert len({one.cache_instance.module_hash for one in around}) == 3


def test_a_pattern_that_matches_nothing_is_warned_of_once(log):
    module = torchcache(item_args=("texts",), ignore=("tokenizer.mmeo", "seen"))(Encoder())
    calls(module)
    assert texts(log).count("ignore='tokenizer.mmeo' matches nothing") == 1 and "'seen' m" not in texts(log)


def test_ignored_arguments_reach_the_forward_and_have_no_key(log):
    given = []

    def forward(x, size=1, *, table=None, **kwargs):
        given.append((size, table, kwargs.get("bar")))
        return x * 1

    function = torchcache(forward, ignore=("size", "table", "bar", "sizes.x"), probe=False)
    x, tables = torch.rand(4, 2), [torch.rand(4), object()]
    function(x)
    function(x, 2, table=tables[0], bar=len)
    function(x, size=[3])
    assert function.cache_instance.stats().hits == 8 and given == [(1, None, None)]
    function(torch.cat([x, x + 1]), 5, table=tables[0], bar=tables[1])
    assert given[1][0] == 5 and given[1][1] is tables[0] and given[1][2] is tables[1]
    function(x, other=2)
    assert function.cache_instance.stats().misses == 12
    assert "left out by ignore: argument bar" in function.cache_instance.explain()
    assert texts(log).count("matches nothing") == texts(log).count("ignore='sizes.x' matches nothing") == 1


class Embedder:
    """A plain object with a tokenizer."""

    def __init__(self):
        self.tokenizer = Tokenizer()

    def encode(self, texts):
        return torch.tensor([[self.tokenizer(text)] for text in texts])


def test_a_memo_of_a_plain_object_is_ignored():
    plain, ignoring = Embedder(), Embedder()
    torchcache(plain.encode, item_args="texts")
    torchcache(ignoring.encode, item_args="texts", ignore=("tokenizer.memo", "tokenizer.calls"))
    for texts in (["a", "bb"], ["bb", "ccc"]):
        assert plain.encode(texts).tolist() == ignoring.encode(texts).tolist()
    assert cache_of(plain.encode).stats().bypasses == {"state": 4}
    assert cache_of(ignoring.encode).stats().bypasses == {} and cache_of(ignoring.encode).stats().hits == 1
