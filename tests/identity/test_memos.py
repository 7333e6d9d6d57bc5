"""Memos of known classes do not count; any other dict that a forward fills does."""

import enum
import functools
import json
from types import SimpleNamespace

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


def loaded(weight=1.0):
    model = nn.Linear(2, 2, bias=False).eval()
    model.weight.fill_(weight)
    return model


class Owner(nn.Module):
    @functools.cache  # noqa: B019
    def model(self):
        return loaded()

    def forward(self, x):
        return self.model()(x)


class Plain:
    @functools.cache  # noqa: B019
    def model(self):
        return loaded()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Owner(), Owner()

    def forward(self, x):
        return self.one(x) + 2 * self.two(x)


class Size(enum.Enum):
    SMALL = 1


def loaders():
    """Names, forwards, what returns their models, and the functions that keep these."""
    none = functools.cache(lambda: loaded())
    yield "no arguments", lambda x: none()(x), none, none
    name = functools.lru_cache(maxsize=1)(lambda name: (loaded(), name))
    yield "by name", lambda x: name(name="a")[0](x), lambda: name(name="a")[0], name
    held = functools.lru_cache(typed=True)(lambda size: SimpleNamespace(net=loaded()))
    yield "in an object", lambda x: held(2).net(x), lambda: held(2).net, held
    by_size = functools.cache(lambda size: loaded())
    yield "by a member", lambda x: by_size(Size.SMALL)(x), lambda: by_size(Size.SMALL), by_size
    nested = functools.cache(functools.lru_cache(loaded))
    yield "nested", lambda x: nested()(x), nested, nested
    outer = functools.lru_cache(lambda: [none()])
    yield "one in another", lambda x: outer()[0](x), none, outer
    plain = Plain()
    yield "a plain object's method", lambda x: plain.model()(x), plain.model, Plain.model
    owner, pair = Owner(), Pair()
    yield "a method", owner, owner.model, Owner.model
    yield "a submodule's method", pair, pair.two.model, Owner.model


@pytest.mark.parametrize("is_filled", [True, False])
@pytest.mark.parametrize("number", range(9))
def test_a_model_that_lru_cache_keeps_counts_like_a_global(number, is_filled):
    _, plain, model, keeper = [*loaders()][number]
    if is_filled:
        model()
    forward = plain.forward if isinstance(plain, nn.Module) else plain
    cached = torchcache(plain)
    edits = [
        lambda: model().weight.mul_(2),
        lambda: model().load_state_dict({"weight": torch.full((2, 2), 7.0)}),
        lambda: model().weight.data.fill_(8),
        keeper.cache_clear,
        lambda: [keeper.cache_clear(), model().weight.fill_(9)],
    ]
    for edit in [lambda: None, *edits]:
        edit()
        for _ in range(3):
            assert torch.equal(cached(X), forward(X))
        before = cached.cache_instance.stats().hits
        assert torch.equal(cached(X), forward(X)) and cached.cache_instance.stats().hits == before + len(X)


def test_a_model_that_lru_cache_keeps_counts_in_the_next_run(load, tmp_path):
    text = (
        "import functools, torch\nfrom torchcache2 import torchcache\n@functools.cache\ndef model():\n"
        "    one = torch.nn.Linear(2, 2, bias=False)\n"
        "    one.load_state_dict(torch.load(PATH, weights_only=True))\n"
        "    return one\n@torchcache(persistent_cache_dir=FOLDER)\ndef features(x):\n    return model()(x)\n"
    )
    found = []
    for weight in (1.0, 7.0, 1.0):
        torch.save({"weight": torch.full((2, 2), weight)}, tmp_path / "weights.pt")
        run = load(
            "features",
            f"FOLDER, PATH = {str(tmp_path / 'rows')!r}, {str(tmp_path / 'weights.pt')!r}\n" + text,
        )
        for _ in range(3):  # the first one loads the model
            assert torch.equal(run.features(X), torch.full((3, 2), 2 * weight))
        run.features.cache_instance.flush()
        found.append(run.features.cache_instance.stats().hits)
    assert found == [3 + 2, 3 + 2, 2 * 3]  # the rows of X are alike


def test_a_table_that_lru_cache_keeps_counts():
    table = functools.cache(lambda: {"scale": 2.0})
    scaled = torchcache(lambda x: x * table()["scale"])
    for table()["scale"] in (2.0, 3.0):
        assert torch.equal(scaled(X), X * table()["scale"]) and torch.equal(scaled(X), X * table()["scale"])
    assert hits(scaled) > 0


def test_models_that_are_used_in_turn_are_read_once():
    model = functools.lru_cache(lambda name: loaded(len(name)))
    by_name = torchcache(lambda x, name: model(name)(x))
    for name in ("a", "bc") * 3:
        model(name)
        before = by_name.cache_instance.keeper.walks
        assert torch.equal(by_name(X, name), model(name)(X))
    assert by_name.cache_instance.keeper.walks == before == 2


def test_a_model_that_an_installed_package_keeps_counts(installed, load):
    text = "import functools, torch\n@functools.cache\ndef model():\n    return torch.nn.Linear(2, 2)\n"
    model = installed("written_loader", text).model
    forward = load(
        "uses_loader", "import written_loader\ndef f(x):\n    return written_loader.model()(x)\n"
    ).f
    cached = torchcache(forward)
    for _ in range(2):
        model().weight.mul_(2)
        assert torch.equal(cached(X), model()(X)) and torch.equal(cached(X), model()(X))
    assert hits(cached) > 0


@pytest.mark.parametrize("result", [str.upper, list, torch.tensor, len])
def test_a_memo_of_lru_cache_may_grow(result):
    known = functools.lru_cache(lambda word: result(word if result is not torch.tensor else [len(word)]))
    lengths = torchcache(item_args="texts")(
        lambda texts: torch.tensor([float(len(str(known(text)))) for text in texts])
    )
    known("abc")
    before = namespace(lengths)
    for number in range(10):
        lengths([f"a{number}", "abc"])
    stats = lengths.cache_instance.stats()
    assert (stats.bypasses, stats.hits, lengths.cache_instance.keeper.walks) == ({}, 9, 1)
    assert namespace(lengths) == before
