"""Memos: dicts that a method only fills with what it computes from its argument do not count."""

import json

import pytest
import torch
from torch import nn

from tests.helpers.outputs import hits
from torchcache2 import torchcache

X = torch.ones(3, 2)


pytestmark = pytest.mark.usefixtures("without_grad")


def get_pairs(word):
    pairs = set()
    previous = word[0]
    for char in word[1:]:
        pairs.add((previous, char))
        previous = char
    return pairs


class SimpleTokenizer:
    """As CLIP's: byte pair encoding with a memo that begins with the special tokens."""

    def __init__(self, merges=("ab", "abc"), special=("<start>",)):
        self.bpe_ranks = {(merge[:-1], merge[-1]): rank for rank, merge in enumerate(merges)}
        self.cache = {token: token for token in special}

    def bpe(self, token: str) -> str:
        """The parts of a word."""
        if token in self.cache:
            return self.cache[token]
        word = tuple(token)
        pairs = get_pairs(word)
        if not pairs:
            return token + "</w>"
        while True:
            bigram = min(pairs, key=lambda pair: self.bpe_ranks.get(pair, float("inf")))
            if bigram not in self.bpe_ranks:
                break
            first, second = bigram
            new_word, i = [], 0
            while i < len(word):
                try:
                    j = word.index(first, i)
                    new_word.extend(word[i:j])
                    i = j
                except ValueError:
                    new_word.extend(word[i:])
                    break
                if i < len(word) - 1 and word[i + 1] == second:
                    new_word.append(first + second)
                    i += 2
                else:
                    new_word.append(word[i])
                    i += 1
            word = tuple(new_word)
            if len(word) == 1:
                break
            pairs = get_pairs(word)
        word = " ".join(word)
        self.cache[token] = word
        return word

    def __call__(self, text):
        return [part for word in text.split() for part in self.bpe(word).split()]


class Encoder(nn.Module):
    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, texts):
        return x * self.weight * torch.tensor([[float(len(self.tokenizer(text)))] for text in texts])


def cached(tokenizer):
    return torchcache(item_args=("texts",), probe=False)(Encoder(tokenizer).eval())


def namespace(module):
    return module.cache_instance.fingerprint.namespace


BATCHES = (["abcd", "abd x", "q"], ["abcabc", "abcd", "new word"], ["abcd", "new", "abd x"])


def run(module, tokenizer, plain):
    for texts in BATCHES:
        expected = Encoder(plain)(X, texts) if plain is not None else None
        output = module(X, texts)
        assert expected is None or torch.equal(output, expected)
    return module.cache_instance


def test_a_memo_that_fills_changes_no_key():
    module = cached(SimpleTokenizer())
    cache = run(module, module.tokenizer, SimpleTokenizer())
    assert cache.stats().bypasses == {} and cache.keeper.walks == 1
    assert hits(module) == 3 and len(module.tokenizer.cache) > 4
    # Whoever begins with an empty memo has the same key.
    other = cached(SimpleTokenizer())
    other(X, BATCHES[2])
    assert namespace(other) == namespace(module)


def test_what_was_there_at_first_counts():
    modules = [cached(SimpleTokenizer(special=special)) for special in (("<start>",), ("<end>",), ("abcd",))]
    for module in modules:
        module(X, BATCHES[0])
    assert len(set(map(namespace, modules))) == 3


EDITS = {
    "an entry": lambda tokenizer: tokenizer.cache.update(abcd="a b c d"),
    "a new entry": lambda tokenizer: tokenizer.cache.update(other="o"),
    "an entry less": lambda tokenizer: tokenizer.cache.pop("<start>"),
    "the first entry": lambda tokenizer: tokenizer.cache.update({"<start>": "< start >"}),
    "another dict": lambda tokenizer: setattr(tokenizer, "cache", dict(tokenizer.cache)),
    "a list": lambda tokenizer: tokenizer.cache.update(list=["l"]),
    "cleared": lambda tokenizer: tokenizer.cache.clear(),
    "used elsewhere": lambda tokenizer: tokenizer("elsewhere it is used too"),
    "what it reads": lambda tokenizer: tokenizer.bpe_ranks.update({("b", "d"): 0}),
    "its method": lambda tokenizer: setattr(tokenizer, "bpe", str),
}


@pytest.mark.parametrize("name", EDITS)
def test_any_other_change_of_it_is_noticed(name):
    module, plain = cached(SimpleTokenizer()), SimpleTokenizer()
    run(module, module.tokenizer, plain)
    before = namespace(module)
    EDITS[name](module.tokenizer), EDITS[name](plain)
    for _ in range(2):
        assert torch.equal(module(X, BATCHES[0]), Encoder(plain)(X, BATCHES[0]))
    assert namespace(module) != before


def test_words_that_were_computed_before_another_change_count():
    module = cached(Scaling())
    module(X, ["a", "b", "c"])
    with_memo = []
    for scale in (3, 1, 3):
        module.tokenizer.scale = scale
        module(X, ["d", "e", "f"] if scale == 1 else ["a", "g", "h"])
        with_memo.append(namespace(module))
    fresh = cached(Scaling(scale=3))
    fresh(X, ["a", "g", "h"])
    assert len({*with_memo, namespace(fresh)}) == 4
    assert torch.equal(module(X, ["a", "a", "a"]), X) and torch.equal(fresh(X, ["a", "a", "a"]), 3 * X)


class Base:
    def __init__(self, scale=1):
        self.memo, self.scale = {}, scale

    def __call__(self, text):
        return range(self.of(text))


class Scaling(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = self.scale * len(key)
        self.memo[key] = size
        return size


class Plain(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = len(key)
        self.memo[key] = size
        return size


KIND = """
import random
FACTOR = [2.0]
def counting(word, seen=[]):
    seen.append(word)
    return len(seen)
class Instance(dict):
    def __contains__(self, key):
        return len(self) > 1 and super().__contains__(key)
class Kind:
    calls = 0
    def __init__(self):
        self.scale, self.sizes = 1, {}
        {init}
    def __call__(self, text):
        {call}
    def of(self, key{more}):
        if key in self.memo:
            return self.memo[key]
        {compute}
        self.memo[key] = size
        return {result}
{methods}
"""
USUAL = {"init": "self.memo = {}", "call": "return range(self.of(text))", "more": "", "methods": ""}
USUAL |= {"compute": "size = len(key)", "result": "size"}
SCALED = "size = self.scale * len(key)"
KINDS = {
    "counts entries": {"compute": "size = len(self.memo)"},
    "reads another": {"compute": "size = self.memo.get(key[:-1], 0) + 1"},
    "returns another": {"result": "size + 1"},
    "rebinds": {"compute": "size = len(key)\nkey = key[0]"},
    "reads a global": {"compute": "size = int(FACTOR[0]) * len(key)"},
    "draws": {"compute": "size = random.randrange(9)"},
    "counts": {"compute": "self.calls += 1\nsize = self.calls"},
    "calls another method": {
        "compute": "size = self.size_of(key)",
        "methods": "    def size_of(self, key):\n        return len(key)",
    },
    "iterates": {"call": "return range(self.of(text) + len(list(self.memo)))"},
    "hands out": {"call": "return range(self.of(text) + len(getattr(self, 'memo')))"},
    "overrides": {
        "methods": "class Kind(Kind):\n    def of(self, key):\n"
        "        return super().of(key) + len(self.memo)",
    },
    "default": {"more": ", seen=[]", "compute": "size = len(seen)"},
    "calls what is impure": {"compute": "size = counting(key)"},
    "mutable": {
        "compute": "size = [len(key)]",
        "call": "sizes = self.of(text)\nsizes.append(0)\nreturn range(sizes[0] + len(sizes) - 2)",
    },
    "numbers": {"compute": "size = len(str(key))", "call": "return range(self.of(len(text) == 1 or 1.0))"},
    "shared": {
        "init": "self.memo = self.other = {}",
        "call": "return range(self.of(text) + len(self.other))",
    },
    "property": {
        "init": "vars(self).update(memo={})",
        "methods": "    @property\n    def memo(self):\n        return vars(self)['memo']",
    },
    "sets": {
        "compute": SCALED,
        "call": "self.scale = len(text)\nsize = self.of(text[0])\nself.scale = 1\nreturn range(size)",
    },
    "sets by name": {
        "compute": SCALED,
        "call": "setattr(self, 'scale', len(text))\nsize = self.of(text[0])\nsetattr(self, 'scale', 1)\n"
        "return range(size)",
    },
    "transient": {
        "compute": "size = self.sizes.get(key, len(key))",
        "call": "self.sizes[text[0]] = len(text)\nsize = self.of(text[0])\ndel self.sizes[text[0]]\n"
        "return range(size)",
    },
    "own dict": {"init": "self.memo = Instance()"},
}


def made(load, parts):
    text = KIND
    for name, part in (USUAL | parts).items():
        text = text.replace(f"{{{name}}}", part if name == "methods" else part.replace("\n", "\n        "))
    return cached(load("kind_of_test", text).Kind())


@pytest.mark.parametrize("name", KINDS)
def test_a_dict_that_may_be_more_than_a_memo_counts(name, load):
    module = made(load, KINDS[name])
    module(X, ["ab", "c", "abc"])
    assert {"state", "random"} & module.cache_instance.stats().bypasses.keys()


def test_the_usual_kind_is_a_memo(load):
    module = made(load, {})
    module(X, ["ab", "c", "abc"])
    assert module.cache_instance.stats().bypasses == {}


@pytest.mark.parametrize("kind", [Plain, Scaling])
def test_these_are_memos(kind):
    module = cached(kind())
    module(X, ["ab", "c", "abc"])
    first = namespace(module)
    module(X, ["d", "ef", "ghij"])
    module(X, ["d", "ef", "ghij"])
    assert namespace(module) == first and hits(module) == 3 and module.cache_instance.keeper.walks == 1


def test_an_edit_while_a_forward_runs_is_noticed():
    class Editing(Plain):
        edit = staticmethod(lambda memo: None)

        def __call__(self, text):
            self.edit(text)
            return super().__call__(text)

    module = cached(Editing())
    module(X, ["ab", "c", "abc"])
    memo = module.tokenizer.memo
    for edit in (lambda _: memo.update(c=2), lambda _: memo.pop("ab", None), lambda _: memo.update(x=[1])):
        before = namespace(module)
        module.tokenizer.edit = edit
        for _ in range(2):
            module(X, ["d", "e", "f"])
        assert namespace(module) != before


def test_a_forward_that_reads_it_too_has_it_count():
    class Reading(Encoder):
        def forward(self, x, texts):
            return super().forward(x, texts) + 0 * len(self.tokenizer.cache)

    module = torchcache(item_args=("texts",), probe=False)(Reading(SimpleTokenizer()).eval())
    module(X, BATCHES[0])
    first = namespace(module)
    module(X, BATCHES[1])
    module(X, BATCHES[1])
    assert namespace(module) != first


def test_new_weights_have_the_memo_count():
    module = cached(Scaling())
    module(X, ["a", "b", "c"])
    module.weight.mul_(2)
    module(X, ["d", "e", "f"])
    fresh = cached(Scaling())
    fresh.weight.mul_(2)
    fresh(X, ["d", "e", "f"])
    assert namespace(fresh) != namespace(module)


def test_the_probe_adds_words_that_do_not_count():
    module = torchcache(item_args=("texts",), verify=1.0)(Encoder(SimpleTokenizer()).eval())
    for _ in range(3):
        for texts in BATCHES:
            module(X, texts)
    assert module.cache_instance.keeper.walks == 1 and module.cache_instance.stats().bypasses == {}


def test_slow_tokenizers_of_transformers_have_memos(tmp_path):
    transformers = pytest.importorskip("transformers")
    texts = ["low er", "lower", "low new"], ["lowest", "er", "lower"]
    parts = ["<unk>", *"lower", "lo@@", "low", "er", "w@@", "l@@", "o@@", "e@@", "s@@", "t", "n@@"]
    (tmp_path / "vocab.json").write_text(
        json.dumps({part: at for at, part in enumerate(dict.fromkeys(parts))})
    )
    (tmp_path / "merges.txt").write_text("#version\nl o\nlo w\ne r</w>\n")
    tokenizer = transformers.CTRLTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"))

    class Texts(Encoder):
        def forward(self, x, texts):
            return x * torch.tensor([[float(sum(self.tokenizer(text)["input_ids"]))] for text in texts])

    module = torchcache(item_args=("texts",))(Texts(tokenizer).eval())
    outputs = [module(X, some) for some in (*texts, *texts)]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert hits(module) >= 6 and module.cache_instance.keeper.walks == 1
    assert len(tokenizer.cache) == 5 and module.cache_instance.stats().bypasses == {}
