"""Latents and captions of a diffusion trainer: the second run loads none of its three encoders.

A latent diffusion model is trained on what frozen encoders make of images and captions: the autoencoder's
latents, and the hidden states of a CLIP and of a T5 text encoder. All three are larger than what is trained
here, and give the same in each epoch. So ``CachedDataset(map=)`` keeps what they make of each image file and
its caption, and its loader gives batches of them. Each encoder is a `LazyModule`: it is read from its
checkpoint when something is missing, and not before. After the first epoch nothing is, and ``seal()`` lets
the encoders go. This script trains a small UNet twice from the same start, with one folder of rows. The
second run reads no checkpoint, decodes no image, and has the same losses, bit by bit.

The autoencoder gives a distribution. Its parameters are kept, and each step draws anew.

The weights are random and the images drawn, for nothing is downloaded: write your own checkpoints in
`load_…`, and your own files in `make_images`. With ``--cache-dir`` the folder stays, and the next process
finds its rows. Edit an image or a caption there, and it is the only one that is computed.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel
from transformers.utils import logging

from torchcache2 import CachedDataset, LazyModule

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


def make_images(folder: Path, count: int, side: int) -> None:
    """Files of three shapes, and their captions."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    captions = {}
    shapes = (side, side), (side // 2, side + side // 2), (side + side // 2, side // 2)
    for number in range(count):
        height, width = shapes[number % 3]
        image, said = torch.zeros(3, height, width), []
        y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        for place in ("left", "right"):
            colour, shape = draw.choice(list(COLOURS)), draw.choice(SHAPES)
            middle = width // 4 if place == "left" else 3 * width // 4
            size, up = draw.randint(side // 16, side // 8), draw.randint(height // 4, 3 * height // 4)
            inside = (x - middle).abs() < size
            if shape == "disc":
                inside = (x - middle) ** 2 + (y - up) ** 2 < size**2
            image[:, inside] = torch.tensor(COLOURS[colour])[:, None]
            said.append(f"a {colour} {shape} {place}")
        pixels = (255 * image).byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(folder / f"{number:04}.png")
        captions[f"{number:04}.png"] = " ".join(said)
    (folder / "captions.json").write_text(json.dumps(captions))


class Captioned(Dataset[tuple[Tensor, Tensor]]):
    """Images of several shapes, and the tokens of their captions."""

    def __init__(self, folder: Path) -> None:
        captions = json.loads((folder / "captions.json").read_text())
        self.paths = [folder / name for name in captions]
        self.keys = [*zip(self.paths, captions.values(), strict=True)]
        # To a fixed length: what is padded to the longest of its batch cannot be kept for each.
        padded = {"padding": "max_length", "max_length": LENGTH, "return_tensors": "pt"}
        self.ids = make_tokenizer()([*captions.values()], **padded).input_ids

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with Image.open(self.paths[index]) as image:
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
        return pixels / 127.5 - 1, self.ids[index]

    def shape(self, index: int) -> tuple[int, int]:
        """Width and height, from the head of the file."""
        with Image.open(self.paths[index]) as image:
            return image.size


class Buckets(Sampler[list[int]]):
    """Batches of images of one shape, in random order."""

    def __init__(self, shapes: list[tuple[int, int]], batch_size: int) -> None:
        self.buckets = {shape: [i for i, other in enumerate(shapes) if other == shape] for shape in shapes}
        self.batch_size, self.random = batch_size, random.Random(0)

    def __len__(self) -> int:
        return sum(-(-len(items) // self.batch_size) for items in self.buckets.values())

    def __iter__(self) -> Iterator[list[int]]:
        batches = []
        for items in self.buckets.values():
            order = self.random.sample(items, len(items))
            batches += [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        self.random.shuffle(batches)
        return iter(batches)


def train(folder: Path, options: argparse.Namespace) -> list[float]:
    """The losses of all steps of one run."""
    checkpoints = folder / "checkpoints"
    vae = LazyModule(lambda: load_vae(checkpoints / "vae"), files=[checkpoints / "vae"])
    clip = LazyModule(lambda: load_clip(checkpoints / "clip"), files=[checkpoints / "clip"])
    t5 = LazyModule(lambda: load_t5(checkpoints / "t5"), files=[checkpoints / "t5"])

    def encode(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        images, ids = batch
        parameters = vae.encode(images).latent_dist.parameters
        return parameters, torch.cat([clip(ids).last_hidden_state, t5(ids).last_hidden_state], dim=1)

    captioned = Captioned(folder / "images")
    shapes = [captioned.shape(i) for i in range(len(captioned))]
    encoded = CachedDataset(captioned, folder / "rows", map=encode, keys=captioned.keys)
    loader = encoded.loader(batch_sampler=Buckets(shapes, options.batch_size))
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
        for parameters, hidden in loader:
            latents = DiagonalGaussianDistribution(parameters).sample() * SCALING
            noise, times = torch.randn_like(latents), torch.randint(1000, (len(latents),))
            guess = unet(schedule.add_noise(latents, noise, times), times, hidden).sample
            loss = F.mse_loss(guess, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if epoch == 1:
            encoded.seal()  # all is there: from here on, a missing row is an error
            for encoder in (vae, clip, t5):
                encoder.unload()
        mean = sum(losses[before:]) / len(losses[before:])
        print(f"  epoch {epoch}: {time.perf_counter() - start:6.2f} s, mean loss {mean:.4f}", flush=True)

    print(f"  images and captions: {encoded.stats().misses} computed, {encoded.stats().hits} found")
    encoded.close()
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
            make_images(folder / "images", options.images, options.size)
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
