"""Attention functions that users put in the place of those of transformers."""

import importlib.util
import sys

import pytest
import torch
import transformers

from torchcache2 import torchcache

pytestmark = pytest.mark.slow


def bert():
    sizes = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 16}
    config = transformers.BertConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
    torch.manual_seed(0)
    return transformers.BertModel(config, add_pooling_layer=False).eval()


def own_attention(module, query, key, value, attention_mask, **kwargs):
    return value.transpose(1, 2) * 2, None


def test_attention_of_transformers_that_is_patched_counts(monkeypatch, tmp_path):
    modeling_bert, interface = transformers.models.bert.modeling_bert, transformers.AttentionInterface
    model = bert()
    model.set_attn_implementation("eager")
    ids = torch.randint(0, 11, (2, 5))
    cached = torchcache(model)
    before, first = cached(ids)[0], cached.cache_instance.module_hash
    with monkeypatch.context() as context:
        context.setattr(modeling_bert, "eager_attention_forward", own_attention)
        assert not torch.equal(cached(ids)[0], before)
    assert torch.equal(cached(ids)[0], before)
    assert cached.cache_instance.module_hash == first
    found = []
    monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    for scale in (2, 2, 3):
        head = "def mine(module, query, key, value, *args, **kwargs):\n"
        text = f"{head}    return value.transpose(1, 2) * {scale}, None\n"
        (tmp_path / f"attention_{len(found)}.py").write_text(text)
        spec = importlib.util.spec_from_file_location(
            "written_attention", tmp_path / f"attention_{len(found)}.py"
        )
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "written_attention", module)
        spec.loader.exec_module(module)
        interface.register("mine", module.mine)
        found.append(cached.cache_instance.module_hash)
    assert found[0] == found[1] != found[2]
    assert first not in found
