"""Models of transformers: of each kind one, tiny."""

import torch
import transformers
from torch import nn

from tests.torch.zoo.checks import Entry

WORDS = 31
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
IMAGES = {"image_size": 16, "patch_size": 8}


def texts(count):
    ids = torch.randint(3, WORDS, (count, 7))
    mask = torch.ones_like(ids)
    mask[::2, 5:] = 0  # items of different lengths
    return {"input_ids": ids, "attention_mask": mask}


def sentences(count):
    """Texts that end, as the text model of CLIP wants it."""
    ids = torch.randint(3, WORDS - 1, (count, 7))
    ids[torch.arange(count), torch.arange(count) % 4 + 2] = WORDS - 1
    return {"input_ids": ids}


def pairs(count):
    return {**texts(count), "decoder_input_ids": torch.randint(3, WORDS, (count, 5))}


def images(count):
    return {"pixel_values": torch.randn(count, 3, 16, 16)}


def sounds(count):
    return {"input_values": torch.randn(count, 800)}


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, use_cache=False)
    return transformers.LlamaForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def bart():
    halves = {
        f"{half}_{name}": value
        for half in ("encoder", "decoder")
        for name, value in {"layers": 1, "attention_heads": 2, "ffn_dim": 24}.items()
    }
    config = transformers.BartConfig(
        vocab_size=WORDS, d_model=16, max_position_embeddings=16, use_cache=False, **halves
    )
    return transformers.BartModel(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def distilbert():
    config = transformers.DistilBertConfig(vocab_size=WORDS, dim=16, n_layers=1, n_heads=2, hidden_dim=24)
    return transformers.DistilBertForSequenceClassification(config)


def deberta():
    config = transformers.DebertaV2Config(
        **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4
    )
    return transformers.DebertaV2Model(config)


def vit():
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return transformers.ViTModel(transformers.ViTConfig(**options, **IMAGES))


def clip_vision():
    options = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    return transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(**options, **IMAGES, projection_dim=8)
    )


def clip_text():
    config = transformers.CLIPTextConfig(
        **SMALL, max_position_embeddings=8, projection_dim=8, eos_token_id=WORDS - 1
    )
    return transformers.CLIPTextModelWithProjection(config)


def swin():
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4
    )
    return transformers.SwinModel(config)


def wav2vec2():
    config = transformers.Wav2Vec2Config(
        **SMALL,
        conv_dim=(8, 8),
        conv_stride=(5, 4),
        conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    return transformers.Wav2Vec2Model(config)


def mamba():
    config = transformers.MambaConfig(
        vocab_size=WORDS, hidden_size=16, state_size=4, num_hidden_layers=2, use_cache=False
    )
    return transformers.MambaModel(config)


def words(count):
    return {"input_ids": texts(count)["input_ids"]}


def with_hidden_states(model):
    model.config.output_hidden_states = True


def swap(path, make=nn.Tanh):
    """An edit that puts another module in the place of one."""
    parent, _, name = path.rpartition(".")
    return lambda model: setattr(model.get_submodule(parent), name, make())


def set_on(path, name, value):
    """An edit of one attribute of a submodule."""
    return lambda model: setattr(model.get_submodule(path), name, value)


ENTRIES = {
    "gpt2": Entry(
        gpt2, texts, {"hidden states": with_hidden_states, "activation": swap("transformer.h.0.mlp.act")}
    ),
    "llama": Entry(llama, texts, {"scaling": set_on("model.layers.0.self_attn", "scaling", 2.0)}),
    "t5": Entry(t5, pairs, {"eps": set_on("encoder.final_layer_norm", "variance_epsilon", 0.5)}),
    "bart": Entry(bart, pairs, {"activation": swap("decoder.layers.0.activation_fn")}),
    "bert": Entry(
        bert, texts, {"hidden states": with_hidden_states, "pooler": swap("pooler.activation", nn.ReLU)}
    ),
    "distilbert": Entry(distilbert, texts, {"eps": set_on("distilbert.embeddings.LayerNorm", "eps", 0.1)}),
    "deberta": Entry(
        deberta, texts, {"activation": swap("encoder.layer.0.intermediate.intermediate_act_fn")}
    ),
    "vit": Entry(vit, images, {"norm": swap("layernorm", nn.Identity)}),
    "clip vision": Entry(clip_vision, images, {"hidden states": with_hidden_states}),
    "clip text": Entry(clip_text, sentences, {"end of a text": set_on("text_model", "eos_token_id", 5)}),
    "swin": Entry(swin, images, {"norm": swap("layernorm", nn.Identity)}),
    "wav2vec2": Entry(wav2vec2, sounds, {"hidden states": with_hidden_states}),
    "mamba": Entry(mamba, words, {"norm": swap("norm_f", nn.Identity)}),
}
