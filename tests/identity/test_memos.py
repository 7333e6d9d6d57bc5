"""Memos: dicts that a method only fills with what it computes from its argument do not count."""

import json
import random

import pytest
import torch
from torch import nn

from tests.helpers.outputs import hits
from torchcache2 import torchcache

X = torch.ones(3, 2)
FACTOR = [2.0]


@pytest.fixture(autouse=True)
def _without_grad():
    with torch.no_grad():
        yield


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


def edit(tokenizer):
    tokenizer.cache["abcd"] = "a b c d"


def add(tokenizer):
    tokenizer.cache["other"] = "o"


def remove(tokenizer):
    del tokenizer.cache["<start>"]


def change_first(tokenizer):
    tokenizer.cache["<start>"] = "< start >"


def replace(tokenizer):
    tokenizer.cache = dict(tokenizer.cache)


def add_list(tokenizer):
    tokenizer.cache["list"] = ["l"]


def clear(tokenizer):
    tokenizer.cache.clear()


def use_elsewhere(tokenizer):
    tokenizer("elsewhere it is used too")


def change_ranks(tokenizer):
    tokenizer.bpe_ranks["b", "d"] = 0


def patch(tokenizer):
    tokenizer.bpe = lambda word: word


@pytest.mark.parametrize(
    "change", [edit, add, remove, change_first, replace, add_list, clear, use_elsewhere, change_ranks, patch]
)
def test_any_other_change_of_it_is_noticed(change):
    module, plain = cached(SimpleTokenizer()), SimpleTokenizer()
    run(module, module.tokenizer, plain)
    before = namespace(module)
    change(module.tokenizer), change(plain)
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


class CountsEntries(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = len(self.memo)
        self.memo[key] = size
        return size


class ReadsAnother(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = self.memo.get(key[:-1], 0) + 1
        self.memo[key] = size
        return size


class ReturnsAnother(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = len(key)
        self.memo[key] = size
        return size + 1


class Rebinds(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = len(key)
        key = key[0]
        self.memo[key] = size
        return size


class ReadsGlobal(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = int(FACTOR[0]) * len(key)
        self.memo[key] = size
        return size


class Draws(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = random.randrange(9)
        self.memo[key] = size
        return size


class Counts(Base):
    calls = 0

    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        self.calls += 1
        size = self.calls
        self.memo[key] = size
        return size


class CallsOther(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = self.size_of(key)
        self.memo[key] = size
        return size

    def size_of(self, key):
        return len(key)


class Iterates(Plain):
    def __call__(self, text):
        return range(super().of(text) + len(list(self.memo)))


class HandsOut(Plain):
    def __call__(self, text):
        return range(self.of(text) + len(getattr(self, "memo")))  # noqa: B009


class Overrides(Plain):
    def of(self, key):
        return super().of(key) + len(self.memo)


class Default(Base):
    def of(self, key, seen=[]):  # noqa: B006
        if key in self.memo:
            return self.memo[key]
        size = len(seen)
        self.memo[key] = size
        return size


def counting(word, seen=[]):  # noqa: B006
    seen.append(word)
    return len(seen)


class CallsImpure(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = counting(key)
        self.memo[key] = size
        return size


class Mutable(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = [len(key)]
        self.memo[key] = size
        return size

    def __call__(self, text):
        sizes = self.of(text)
        sizes.append(0)
        return range(sizes[0] + len(sizes) - 2)


class Numbers(Base):
    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = len(str(key))
        self.memo[key] = size
        return size

    def __call__(self, text):
        return range(self.of(len(text) == 1 or 1.0))


class Shared(Plain):
    def __init__(self):
        super().__init__()
        self.other = self.memo

    def __call__(self, text):
        return range(self.of(text) + len(self.other))


class Property(Plain):
    def __init__(self):
        vars(self).update(memo={}, scale=1)

    @property
    def memo(self):
        return vars(self)["memo"]


class Sets(Scaling):
    def __call__(self, text):
        self.scale = len(text)
        size = self.of(text[0])
        self.scale = 1
        return range(size)


class Setter(Scaling):
    def __call__(self, text):
        setattr(self, "scale", len(text))  # noqa: B010
        size = self.of(text[0])
        setattr(self, "scale", 1)  # noqa: B010
        return range(size)


class Transient(Base):
    def __init__(self):
        super().__init__()
        self.sizes = {}

    def of(self, key):
        if key in self.memo:
            return self.memo[key]
        size = self.sizes.get(key, len(key))
        self.memo[key] = size
        return size

    def __call__(self, text):
        self.sizes[text[0]] = len(text)
        size = self.of(text[0])
        del self.sizes[text[0]]
        return range(size)


class Instance(dict):
    def __contains__(self, key):
        return len(self) > 1 and super().__contains__(key)


class OwnDict(Plain):
    def __init__(self):
        super().__init__()
        self.memo = Instance()


KINDS = [
    *(CountsEntries, ReadsAnother, ReturnsAnother, Rebinds, ReadsGlobal, Draws, Counts, CallsOther, Iterates),
    *(
        HandsOut,
        Overrides,
        Default,
        CallsImpure,
        Mutable,
        Numbers,
        Shared,
        Property,
        Sets,
        Setter,
        Transient,
        OwnDict,
    ),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dict_that_may_be_more_than_a_memo_counts(kind):
    module = cached(kind())
    module(X, ["ab", "c", "abc"])
    assert {"state", "random"} & module.cache_instance.stats().bypasses.keys()


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
