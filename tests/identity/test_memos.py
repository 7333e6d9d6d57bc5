"""Memos of known classes do not count; any other dict that a forward fills does."""

import json

import pytest
import torch
from torch import nn

from tests.helpers.outputs import hits, warnings_in
from torchcache2 import torchcache

X = torch.ones(3, 2)
BATCHES = (["abcd", "abd x", "q"], ["abcabc", "abcd", "new word"], ["abcd", "new", "abd x"])
TOKENIZER = """
class SimpleTokenizer:
    def __init__(self, merges=("ab", "abc")):
        self.merges, self.cache = merges, {"<start>": ("<start>",)}

    def bpe(self, word):
        if word not in self.cache:
            self.cache[word] = tuple(part for part in self.merges if part in word)
        return self.cache[word]

    def __call__(self, text):
        return [part for word in text.split() for part in self.bpe(word)]
"""

pytestmark = pytest.mark.usefixtures("without_grad")


class Encoder(nn.Module):
    def __init__(self, tokenizer):
        super().__init__()
        self.tokenizer = tokenizer

    def forward(self, x, texts):
        return x * torch.tensor([[float(len(self.tokenizer(text)))] for text in texts])


def cached(tokenizer, kind=Encoder, **options):
    return torchcache(item_args=("texts",), **options)(kind(tokenizer).eval())


def namespace(module):
    return module.cache_instance.module_hash


def run(module):
    """The bypasses after batches of new texts and of some that are known."""
    for texts in BATCHES:
        module(X, texts)
    return module.cache_instance.stats().bypasses


@pytest.fixture(params=["clip", "open_clip"])
def simple(request, installed):
    return installed(request.param, TOKENIZER).SimpleTokenizer


def test_a_known_memo_does_not_count_however_full_it_is(simple):
    module = cached(simple())
    assert run(module) == {} and hits(module) == 3 and module.cache_instance.keeper.walks == 1
    other, before = simple(), namespace(module)
    other("words of elsewhere")
    assert namespace(cached(other)) == before
    module.tokenizer("words of elsewhere")
    assert namespace(module) == before
    assert namespace(cached(simple(merges=("b",)))) != before


def test_words_that_the_net_looks_up_do_not_count(simple):
    module = cached(simple(), verify=1.0)
    for _ in range(3):
        assert run(module) == {}
    assert module.cache_instance.keeper.walks == 1


def test_a_subclass_has_the_memo_too(simple):
    class Mine(simple):
        def __call__(self, text):
            return super().__call__(text)[::-1]

    assert run(cached(Mine())) == {}


def test_a_users_class_of_that_name_is_not_known_and_the_warning_names_ignore(load, log):
    tokenizer = load("tokenizer_of_mine", TOKENIZER).SimpleTokenizer
    assert run(cached(tokenizer()))["state"] > 0
    (text,) = warnings_in(log)
    assert (
        "tokenizer.cache was edited" in text and "ignore='tokenizer.cache' leaves it out of the key" in text
    )
    assert run(cached(tokenizer(), ignore="tokenizer.cache")) == {}


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

    module = cached(tokenizer, Texts)
    outputs = [module(X, some) for some in (*texts, *texts)]
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    assert hits(module) >= 6 and module.cache_instance.keeper.walks == 1
    assert len(tokenizer.cache) == 5 and module.cache_instance.stats().bypasses == {}
