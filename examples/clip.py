"""Images and labels by CLIP: two methods of one model are cached, and the second run computes neither.

An adapter is trained on the features of a frozen CLIP (as in "CLIP-Adapter"): the images come back in each
epoch, and the texts of the labels in each batch. Neither is the model's ``forward``, so the methods are
named::

    torchcache(model, methods=("get_image_features", "get_text_features"))

This script trains twice from the same start, with one folder of rows. The first run computes the features
of each image and text once. The second finds all of them, and has the same losses, bit by bit.

The images are scikit-learn's handwritten digits. The weights are random, for nothing is downloaded: with
yours, it is ``CLIPModel.from_pretrained(…)``. With ``--cache-dir`` the folder stays, and the next process
finds its rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.utils import logging

from torchcache2 import cache_of, torchcache

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LABELS = [f"a photo of the number {number}" for number in NUMBERS]
WORDS = ["<pad>", "<end>", "?", "a", "photo", "of", "the", "number", *NUMBERS]
SIZE, BATCH = 32, 64


def load_model(width: int) -> tuple[CLIPModel, PreTrainedTokenizerFast]:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 4}
    text = {"vocab_size": len(WORDS), "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 1}
    image = {"image_size": SIZE, "patch_size": 8}
    config = CLIPConfig(text_config=sizes | text, vision_config=sizes | image, projection_dim=64)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A <end>", special_tokens=[("<end>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    return CLIPModel(config).eval().requires_grad_(False), tokenizer


def load_images(count: int) -> tuple[Tensor, Tensor]:
    digits = load_digits()
    images = torch.from_numpy(digits.images[:count]).float().unsqueeze(1) / 8 - 1
    images = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear").expand(-1, 3, -1, -1)
    return images, torch.from_numpy(digits.target[:count])


def train(folder: Path, options: argparse.Namespace) -> list[float]:
    """The losses of all steps of one run."""
    model, tokenizer = load_model(options.width)
    torchcache(model, methods=("get_image_features", "get_text_features"), persistent_cache_dir=folder)
    tokens = tokenizer(LABELS, padding="max_length", max_length=8, return_tensors="pt")
    images, labels = load_images(options.images)

    torch.manual_seed(0)
    adapter = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=0.01)
    losses = []
    with cache_of(model) as cache:  # its rows are on disk when it is closed
        for epoch in range(1, options.epochs + 1):
            start, right = time.perf_counter(), 0
            for items in torch.randperm(len(images)).split(BATCH):
                seen = model.get_image_features(pixel_values=images[items]).pooler_output
                said = model.get_text_features(
                    input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
                ).pooler_output
                similarity = F.normalize(adapter(seen), dim=1) @ F.normalize(said, dim=1).T
                loss = F.cross_entropy(20 * similarity, labels[items])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                right += (similarity.argmax(dim=1) == labels[items]).sum().item()
            seconds = time.perf_counter() - start
            print(f"  epoch {epoch}: {seconds:6.2f} s, accuracy {right / len(images):.2f}", flush=True)
        for name in ("get_image_features", "get_text_features"):
            stats = cache.stats(method=name)
            print(f"  {name}: {stats.misses} computed, {stats.hits} found")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--images", type=int, default=960, metavar="N", help="default: %(default)s")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="of CLIP (default: %(default)s)")
    parser.add_argument("--cache-dir", type=Path, metavar="PATH", help="keep the rows there")
    options = parser.parse_args()
    if options.epochs < 1 or options.images < 1 or options.width < 4 or options.width % 4:
        parser.error("expected at least 1 epoch and 1 image, and a multiple of 4 for --width")
    logging.set_verbosity_error()

    with tempfile.TemporaryDirectory() as temporary:
        losses, seconds = [], []
        for name in ("first run", "second run"):
            print(name)
            start = time.perf_counter()
            losses.append(train(options.cache_dir or Path(temporary), options))
            seconds.append(time.perf_counter() - start)
    assert losses[0] == losses[1], "a loss differs between the two runs"
    print(f"first run {seconds[0]:.1f} s, second run {seconds[1]:.1f} s; losses equal bit by bit")


if __name__ == "__main__":
    main()
