"""Latents and captions of a diffusion trainer: the second run loads none of its three encoders.

A latent diffusion model is trained on what frozen encoders make of images and captions: the autoencoder's
latents, and the hidden states of a CLIP and of a T5 text encoder. All three are larger than what is trained
here, and give the same in each epoch. Each is a `LazyModule`: it is read from its checkpoint when something
is missing in the cache, and not before. This script trains a small UNet twice from the same start, with one
folder of rows. The first run computes each image and caption once. The second finds all of them, reads no
checkpoint, and has the same losses, bit by bit.

`vae.encode` returns a distribution. Its parameters are cached, and each call of ``sample()`` draws anew.

The weights are random and the images drawn, for nothing is downloaded: write your own checkpoints in
`load_…`, and your own data in `make_data`. With ``--cache-dir`` the folder stays, and the next process
finds its rows.
"""

from __future__ import annotations

import argparse
import functools
import random
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel
from transformers.utils import logging

from torchcache2 import LazyModule, cache_of, torchcache

COLOURS = {
    "red": (1.0, 0.1, 0.1),
    "green": (0.1, 0.8, 0.2),
    "blue": (0.2, 0.3, 1.0),
    "white": (0.9, 0.9, 0.9),
}
SHAPES = ("disc", "bar")
WORDS = ["<pad>", "<end>", "?", "a", "left", "right", "of", *COLOURS, *SHAPES]
LENGTH = 12  # tokens of a caption
SCALING = 0.18215  # of the latents, in the autoencoder's config


def make_checkpoints(folder: Path, width: int) -> None:
    """Encoders with random weights, as files."""
    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 3, "up_block_types": ["UpDecoderBlock2D"] * 3}
    vae = AutoencoderKL(block_out_channels=(width // 2, width, width), norm_num_groups=8, **blocks)
    vae.save_pretrained(folder / "vae")
    clip = CLIPTextConfig(
        vocab_size=len(WORDS), max_position_embeddings=LENGTH, hidden_size=4 * width,
        intermediate_size=16 * width, num_hidden_layers=8, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    CLIPTextModel(clip).save_pretrained(folder / "clip")
    t5 = T5Config(vocab_size=len(WORDS), d_model=4 * width, d_ff=16 * width, num_layers=8)
    T5EncoderModel(t5).save_pretrained(folder / "t5")


def load_vae(path: Path) -> AutoencoderKL:
    print("  reading the autoencoder")
    return AutoencoderKL.from_pretrained(path).eval().requires_grad_(False)


def load_clip(path: Path) -> CLIPTextModel:
    print("  reading CLIP")
    return CLIPTextModel.from_pretrained(path).eval().requires_grad_(False)


def load_t5(path: Path) -> T5EncoderModel:
    print("  reading T5")
    return T5EncoderModel.from_pretrained(path).eval().requires_grad_(False)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def make_data(count: int, side: int) -> list[tuple[Tensor, list[str]]]:
    """Three aspect buckets: images (count, 3, height, width) of one shape, and their captions."""
    draw = random.Random(0)
    buckets = []
    for height, width in ((side, side), (side // 2, side + side // 2), (side + side // 2, side // 2)):
        images, captions = torch.zeros(count, 3, height, width), []
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        for image in images:
            said = []
            for place in ("left", "right"):
                colour, shape = draw.choice(list(COLOURS)), draw.choice(SHAPES)
                middle = width // 4 if place == "left" else 3 * width // 4
                size, up = draw.randint(side // 16, side // 8), draw.randint(height // 4, 3 * height // 4)
                inside = (x - middle).abs() < size
                if shape == "disc":
                    inside = (x - middle) ** 2 + (y - up) ** 2 < size**2
                image[:, inside] = torch.tensor(COLOURS[colour])[:, None]
                said.append(f"a {colour} {shape} {place}")
            captions.append(" ".join(said))
        buckets.append((2 * images - 1, captions))
    return buckets


def batches_of(buckets: list[tuple[Tensor, list[str]]], batch_size: int) -> list[tuple[Tensor, list[str]]]:
    """One epoch: batches of one shape, in random order."""
    batches = []
    for images, captions in buckets:
        for items in torch.randperm(len(images)).split(batch_size):
            batches.append((images[items], [captions[i] for i in items]))
    random.shuffle(batches)
    return batches


def train(folder: Path, options: argparse.Namespace) -> list[float]:
    """The losses of all steps of one run."""
    checkpoints = folder / "checkpoints"
    keep = functools.partial(torchcache, persistent_cache_dir=folder / "rows")
    vae = LazyModule(lambda: load_vae(checkpoints / "vae"), files=[checkpoints / "vae"])
    clip = LazyModule(lambda: load_clip(checkpoints / "clip"), files=[checkpoints / "clip"])
    t5 = LazyModule(lambda: load_t5(checkpoints / "t5"), files=[checkpoints / "t5"])
    keep(vae, methods=("encode",))
    keep(clip)
    keep(t5)

    tokenizer, buckets = make_tokenizer(), make_data(options.images // 3, options.size)
    random.seed(0)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=2,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=4 * options.width,
    )  # fmt: skip
    schedule = DDPMScheduler()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-3)

    losses = []
    for epoch in range(1, options.epochs + 1):
        start, before = time.perf_counter(), len(losses)
        for images, captions in batches_of(buckets, options.batch_size):
            latents = vae.encode(images).latent_dist.sample() * SCALING
            # To a fixed length: padded to the longest of its batch, a caption would be another item in each.
            ids = tokenizer(captions, padding="max_length", max_length=LENGTH, return_tensors="pt").input_ids
            hidden = torch.cat([clip(ids).last_hidden_state, t5(ids).last_hidden_state], dim=1)

            noise, times = torch.randn_like(latents), torch.randint(1000, (len(latents),))
            guess = unet(schedule.add_noise(latents, noise, times), times, hidden).sample
            loss = F.mse_loss(guess, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        mean = sum(losses[before:]) / len(losses[before:])
        print(f"  epoch {epoch}: {time.perf_counter() - start:6.2f} s, mean loss {mean:.4f}", flush=True)

    for name, encoder in (("images", vae), ("captions, CLIP", clip), ("captions, T5", t5)):
        with cache_of(encoder) as cache:  # its rows are on disk when it is closed
            print(f"  {name}: {cache.stats().misses} computed, {cache.stats().hits} found")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--images", type=int, default=72, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--size", type=int, default=64, metavar="N", help="pixels of a side (default: %(default)s)"
    )
    parser.add_argument(
        "--width", type=int, default=64, metavar="N", help="of the encoders (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--cache-dir", type=Path, metavar="PATH", help="keep checkpoints and rows there")
    options = parser.parse_args()
    if options.epochs < 1 or options.images < 3 or options.size % 16 or options.width % 16:
        parser.error("expected at least 1 epoch and 3 images, and a multiple of 16 for --size and --width")
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.cache_dir or Path(temporary)
        if not (folder / "checkpoints").exists():
            make_checkpoints(folder / "checkpoints", options.width)
        losses, seconds = [], []
        for name in ("first run", "second run"):
            print(name)
            start = time.perf_counter()
            losses.append(train(folder, options))
            seconds.append(time.perf_counter() - start)
    assert losses[0] == losses[1], "a loss differs between the two runs"
    print(f"first run {seconds[0]:.1f} s, second run {seconds[1]:.1f} s; losses equal bit by bit")


if __name__ == "__main__":
    main()
