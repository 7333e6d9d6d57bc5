"""Adapters are switched, scaled, merged and deleted: each state of a model has rows of its own."""

import copy

import pytest
import torch

from tests.torch.zoo.checks import FIRST, HALF_KNOWN, SEED, TOTAL, Counted, check_same, differ, rows_of
from tests.torch.zoo.models_transformers import bert, distilbert, gpt2, texts

# peft asks transformers in a way that the newest one has deprecated.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Already unmerged"),  # of layers without the adapter that was merged
]


def lora(rank=2, **options):
    import peft

    return peft.LoraConfig(r=rank, init_lora_weights=False, **options)


def adapted():
    """A model with two adapters, of which the first is on."""
    import peft

    torch.manual_seed(SEED)
    model = peft.get_peft_model(bert(), lora(target_modules=["query", "value"]))
    model.add_adapter("second", lora(rank=3, target_modules=["value"]))
    return model.eval().requires_grad_(False)


def layers(model):
    import peft

    return [module for module in model.modules() if isinstance(module, peft.tuners.lora.LoraLayer)]


def set_scale(model):
    for layer in layers(model):
        if "default" in layer.scaling:
            layer.set_scale("default", 9.0)


def scale_layer(model):
    for layer in layers(model):
        layer.scale_layer(3.0)


def unscale_layer(model):
    for layer in layers(model):
        layer.unscale_layer(3.0)


def add_third(model):
    torch.manual_seed(SEED)
    model.add_adapter("third", lora(target_modules=["dense"]))
    model.set_adapter("third")
    model.eval()


def combine(model):
    model.base_model.set_adapter(["default", "second"])


def set_adapter(name):
    return lambda model: model.set_adapter(name)


# In this order. With each: whether the state was there before, so that all rows are known; None where the
# outputs are those of another state but for rounding.
STEPS = {
    "first adapter": (set_adapter("default"), False),
    "second adapter": (set_adapter("second"), False),
    "first adapter again": (set_adapter("default"), True),
    "scaled layers": (scale_layer, False),
    "layers scaled back": (unscale_layer, True),
    "another scale": (set_scale, False),
    "merged": (lambda model: model.merge_adapter(), None),
    "merged back": (lambda model: model.unmerge_adapter(), None),
    "third adapter": (add_third, False),
    "two adapters": (combine, False),
    "all switched off": (lambda model: model.base_model.disable_adapter_layers(), False),
    "all switched on": (lambda model: model.base_model.enable_adapter_layers(), True),
    "without the second": (lambda model: model.delete_adapter("second"), None),
}


@torch.no_grad()  # peft makes parameters require grad when it switches adapters on
def test_every_switch_is_noticed():
    plain = adapted()
    cached = Counted(copy.deepcopy(plain))
    batch = texts(4)
    known = []
    for name, (step, is_known) in STEPS.items():
        step(plain)
        step(cached.model)
        expected = plain(**batch)
        if is_known is not None:
            assert is_known != all(differ(expected, output) for output in known), name
        known.append(expected)
        before = cached.model.cache_instance.stats()
        check_same(name, cached.model(**batch), expected)
        after = cached.model.cache_instance.stats()
        assert after.bypasses == {}, name
        if is_known is not None:
            assert (after.hits - before.hits == 4) == is_known, name
        check_same(name, cached(name, batch, hits=4, misses=0), expected)


@torch.no_grad()
def test_the_context_without_adapters_has_rows_of_its_own():
    plain = adapted()
    cached = Counted(copy.deepcopy(plain))
    batch = texts(4)
    adapter_is_on = plain(**batch)
    with plain.disable_adapter():
        is_off = plain(**batch)
    assert differ(adapter_is_on, is_off)
    for hits in (0, 4):
        check_same("on", cached("on", batch, hits=hits, misses=4 - hits), adapter_is_on)
        with cached.model.disable_adapter():
            check_same("off", cached("off", batch, hits=hits, misses=4 - hits), is_off)


def test_a_merged_model_is_cached_when_it_is_unloaded():
    plain = adapted()
    whole = Counted(copy.deepcopy(plain).merge_and_unload())
    batch = texts(4)
    for hits in (0, 4):
        output = whole("merged", batch, hits=hits, misses=4 - hits)
        check_same("merged", output, plain(**batch), exact=False)


@pytest.mark.parametrize("build", [distilbert, gpt2])
def test_each_item_can_have_an_adapter_of_its_own(build):
    import peft

    torch.manual_seed(SEED)
    targets = ["c_attn"] if build is gpt2 else ["q_lin", "v_lin"]
    options = {"target_modules": targets, "fan_in_fan_out": build is gpt2}
    plain = peft.get_peft_model(build(), lora(**options))
    plain.add_adapter("second", lora(**options))
    plain.eval().requires_grad_(False)
    cached = Counted(copy.deepcopy(plain)).model
    everything = texts(TOTAL)
    names = ["default", "second", "__base__", "second", "default", "__base__"]
    turned = names[1:] + names[:1]

    for positions in (FIRST, FIRST, HALF_KNOWN, [3, 3, 0], [5]):
        for each in (names, turned, names[::-1]):
            batch = rows_of(everything, positions) | {"adapter_names": [each[i] for i in positions]}
            check_same(f"{positions} {each}", cached(**batch), plain(**batch), exact=False)
    for each in (names, turned, names[::-1]):
        batch = rows_of(everything, FIRST) | {"adapter_names": each[:4]}
        before = cached.cache_instance.stats()
        check_same("again", cached(**batch), plain(**batch), exact=False)
        assert cached.cache_instance.stats().hits == before.hits + 4
