"""What real models do that cannot be cached: it works as it does without the cache."""

import copy
import dataclasses

import pytest
import torch
import transformers

from tests.torch.zoo.checks import FIRST, PERMUTED, check_same, rows_of, seeded
from tests.torch.zoo.models_diffusers import BLOCKS, noise, unet
from tests.torch.zoo.models_transformers import (
    IMAGES,
    SMALL,
    WORDS,
    bart,
    gpt2,
    images,
    llama,
    pairs,
    sentences,
    t5,
    texts,
)
from torchcache2 import torchcache

PROMPTS = {
    "greedy": {"max_new_tokens": 5},
    "beams": {"max_new_tokens": 5, "num_beams": 3},
    "sampled": {"max_new_tokens": 5, "do_sample": True, "top_k": 5},
    "without kept values": {"max_new_tokens": 5, "use_cache": False},
}


def with_kept_values(build):
    model = seeded(build)
    for config in (model.config, model.generation_config):
        config.use_cache = True
    model.generation_config.pad_token_id = 0
    return model


def cached_copy(model):
    return torchcache(copy.deepcopy(model))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("options", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("build", [gpt2, llama, t5])
def test_generated_tokens_are_the_same(build, options):
    plain = with_kept_values(build)
    cached = cached_copy(plain)
    prompts = texts(4) | {"attention_mask": torch.ones(4, 7, dtype=torch.int64)}
    for _ in range(2):
        torch.manual_seed(2)
        expected = plain.generate(**prompts, **options)
        torch.manual_seed(2)
        assert torch.equal(cached.generate(**prompts, **options), expected)


def test_tokens_are_generated_after_a_cached_encoder():
    plain = with_kept_values(t5)
    cached = copy.deepcopy(plain)
    cached.encoder = torchcache(cached.encoder)
    prompts = texts(4)
    options = {"num_beams": 2, "max_new_tokens": 5}
    for hits in (0, 4):
        assert torch.equal(cached.generate(**prompts, **options), plain.generate(**prompts, **options))
        assert cached.encoder.cache_instance.stats().hits == hits


@pytest.mark.parametrize(("build", "inputs"), [(gpt2, texts), (llama, texts), (bart, pairs)])
def test_calls_that_return_keys_and_values_are_passed_through(build, inputs):
    plain = seeded(build)
    plain.config.use_cache = True
    cached = cached_copy(plain)
    batch = inputs(4)
    for _ in range(3):
        output, expected = cached(**batch), plain(**batch)
        assert type(output.past_key_values) is type(expected.past_key_values)
        check_same("kept values", tensors(output), tensors(expected))
    assert cached.cache_instance.stats().hits == 0
    assert sum(cached.cache_instance.stats().bypasses.values()) == 12
    check_same("without", cached(**batch, use_cache=False), plain(**batch, use_cache=False))


def tensors(output):
    return {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}


def clip():
    vision = {name: value for name, value in SMALL.items() if name != "vocab_size"} | IMAGES
    text = SMALL | {"max_position_embeddings": 8, "eos_token_id": WORDS - 1}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    return transformers.CLIPModel(config)


def test_similarities_within_a_batch_are_not_rows():
    plain = seeded(clip)
    cached = cached_copy(plain)
    batch = sentences(6) | images(6)
    for positions in (FIRST, FIRST, PERMUTED, [4, 2], [5, 0, 1, 2, 3, 4]):
        arguments = rows_of(batch, positions)
        check_same(f"{positions}", cached(**arguments), plain(**arguments))
    assert cached.cache_instance.stats().hits == 0
    assert "batch" in cached.cache_instance.stats().bypasses


def test_a_loss_of_the_whole_batch_is_passed_through():
    plain = seeded(gpt2)
    cached = cached_copy(plain)
    for count in (4, 4, 2):
        batch = texts(count)
        arguments = batch | {"labels": batch["input_ids"]}
        check_same("loss", cached(**arguments), plain(**arguments))
    assert cached.cache_instance.stats().hits == 0


@pytest.mark.slow
def test_a_loss_of_codes_is_passed_through():
    import diffusers

    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    plain = seeded(lambda: diffusers.VQModel(latent_channels=3, num_vq_embeddings=16, **kinds, **BLOCKS))
    cached = cached_copy(plain)
    for count in (4, 4, 2):
        sample = torch.randn(count, 3, 16, 16)
        check_same("codes", cached(sample), plain(sample))


@pytest.mark.parametrize("time", [7, torch.tensor(7), torch.tensor([7])], ids=["int", "tensor", "one"])
def test_one_time_for_the_whole_batch(time):
    plain = seeded(unet)
    cached = cached_copy(plain)
    batch = noise(4) | {"timestep": time}
    for _ in range(2):
        check_same("one time", cached(**batch), plain(**batch))
    if isinstance(time, int):
        assert cached.cache_instance.stats().hits == 4


def test_what_a_tokenizer_returns_is_an_argument():
    plain = seeded(lambda: Encoder(gpt2()))
    cached = cached_copy(plain)
    batch = texts(6)
    for positions in (FIRST, FIRST, PERMUTED, [4, 2, 5, 3]):
        encoding = transformers.BatchEncoding(rows_of(batch, positions))
        check_same(f"{positions}", cached(encoding), plain(encoding), exact=False)
    assert cached.cache_instance.stats().hits == 10


class Encoder(torch.nn.Module):
    """What takes its arguments in a mapping, as modules of sentence-transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, features):
        return self.model(**features).logits.mean(1)


class Shy:
    """An object that can be used, but not looked at."""

    scale = 2.0

    def __repr__(self):
        raise RuntimeError("not now")


class Strict:
    """What the configurations of the newest transformers do with values that differ between layers."""

    def __getattribute__(self, name):
        if name == "heads":
            raise RuntimeError("ask for the heads of a layer")
        return super().__getattribute__(name)


@dataclasses.dataclass
class StrictConfig(Strict):
    scale: float = 2.0
    heads: int = 4


class Slots:
    __slots__ = ("other", "scale")

    def __init__(self):
        self.scale = 2.0


class Holder(torch.nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return x * self.value.scale


@pytest.mark.parametrize("kind", [Shy, StrictConfig, Slots])
def test_objects_that_raise_when_they_are_looked_at(kind):
    cached = torchcache(Holder(kind()))
    x = torch.rand(4, 3)
    for _ in range(2):
        assert torch.equal(cached(x), x * 2)
