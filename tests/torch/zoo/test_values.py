"""What other libraries return: objects that they sample of, and a tokenizer's encodings."""

import pytest
import torch

from tests.helpers.outputs import assert_same, bypasses, hits
from torchcache2 import torchcache

ITEMS = torch.arange(48.0).reshape(12, 4)


def test_diffusers_distributions_are_sampled_after_the_cache():
    vae = pytest.importorskip("diffusers.models.autoencoders.vae")
    from diffusers.models.modeling_outputs import AutoencoderKLOutput

    def encode(x):
        parameters = x[:, :, None, None].expand(-1, 4, 2, 2) / 40
        return AutoencoderKLOutput(latent_dist=vae.DiagonalGaussianDistribution(parameters.contiguous()))

    function = torchcache(encode)
    for batch in ([0, 1, 2], [2, 3], [3, 0], [0]):
        found, plain = function(ITEMS[batch]).latent_dist, encode(ITEMS[batch]).latent_dist
        assert_same(plain, found)
        torch.manual_seed(0)
        sample = found.sample()
        assert not torch.equal(sample, found.sample())
        torch.manual_seed(0)
        assert torch.equal(sample, plain.sample())
    assert hits(function) == 4 and bypasses(function) == {}


def test_a_tokenizer_s_encoding_comes_back_with_what_it_knows():
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import BatchEncoding

    vocabulary = {"[UNK]": 0, **{text: i + 1 for i, text in enumerate("abcd")}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def encode(texts):
        encodings = tokenizer.encode_batch(texts)
        return BatchEncoding({"input_ids": [e.ids for e in encodings]}, encodings, n_sequences=1)

    function = torchcache(encode, item_args="texts", ignore=("tokenizer",))
    for texts in (["a b", "c"], ["c", "d d d", "a b"], ["d d d"]):
        found, plain = function(texts), encode(texts)
        assert type(found) is BatchEncoding and found.data == plain.data
        assert [found.tokens(i) for i in range(len(texts))] == [plain.tokens(i) for i in range(len(texts))]
        assert found.word_ids(0) == plain.word_ids(0) and found.is_fast
        found["input_ids"].clear()
    assert hits(function) == 3 and bypasses(function) == {}
