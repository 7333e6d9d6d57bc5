"""Codecs on real features: how much smaller, and how fast, beside plain brotli and blosc2."""

import importlib.util
import statistics
import time
from pathlib import Path

import blosc2
import brotli
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from transformers.utils import logging as transformers_logging

from tests.benchmarks.timing import progress
from torchcache2.files.codec import codec, lane

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_embeddings.py"
SIZES = {"8 KB": (8 << 10, 1 << 20), "256 KB": (256 << 10, 4 << 20)}  # of a block, and of all together
ROUNDS = 3
HEADER = ("features", "block", "codec", "ratio", "compresses, MB/s", "decompresses, MB/s")


class Ours:
    """A codec of ours, quality 1, for a single leaf."""

    def __init__(self, name, dtype):
        self.name = f"torchcache2, {name}"
        self.codec, self.lanes = codec(name, 1), [lane(dtype)]

    def encode(self, block):
        return self.codec.encode([block], self.lanes)

    def decode(self, data, size):
        out = np.empty(size, np.uint8)
        self.codec.decode(data, [out], self.lanes)
        return out


class Brotli:
    """Brotli on the bytes as they are, quality 1."""

    name = "brotli"

    def encode(self, block):
        return brotli.compress(block.data, quality=1)

    def decode(self, data, size):
        return brotli.decompress(data)


class Blosc2:
    """Blosc2 on the bytes as they are: zstd, level 1, and no filter; one thread."""

    name = "blosc2"

    def encode(self, block):
        zstd = {"codec": blosc2.Codec.ZSTD, "clevel": 1}
        plain = {"typesize": 1, "filters": [blosc2.Filter.NOFILTER], "filters_meta": [0]}
        return blosc2.compress2(block, nthreads=1, **zstd, **plain)

    def decode(self, data, size):
        return blosc2.decompress2(data, nthreads=1)


def run(report):
    with torch.no_grad():
        progress("features")
        tokens, maps = token_states(), relu_maps()
    features = {
        "MiniLM tokens, float32": tokens,
        "MiniLM tokens, bfloat16": tokens.bfloat16(),
        "ReLU maps, float32": maps,
        "ReLU maps, bfloat16": maps.bfloat16(),
    }
    table = []
    for name, values in features.items():
        data = values.contiguous().view(-1).view(torch.uint8).numpy()
        codecs = [*(Ours(kind, values.dtype) for kind in ("brotli", "blosc2")), Brotli(), Blosc2()]
        for block, (size, total) in SIZES.items():
            progress(f"codecs: {name}, {block}")
            blocks = data[:total].reshape(-1, size)
            table += [(name, block, *numbers) for numbers in compare(codecs, blocks)]
    report.table("Codecs on real features", HEADER, table)
    zeros = f"{(maps == 0).float().mean():.0%}"
    report.text(
        f"Hidden states of {len(tokens):,} tokens from the last layer of all-MiniLM-L6-v2, and maps after "
        f"two convolutions, with random weights, of the digits of scikit-learn ({zeros} zeros)."
    )


def compare(codecs, blocks):
    """Name, ratio and speeds of each codec."""
    seconds = {c.name: ([], []) for c in codecs}
    sizes = {}
    for _ in range(ROUNDS):
        for c in codecs:
            start = time.perf_counter()
            encoded = [c.encode(block) for block in blocks]
            seconds[c.name][0].append(time.perf_counter() - start)
            start = time.perf_counter()
            decoded = [c.decode(data, blocks.shape[1]) for data in encoded]
            seconds[c.name][1].append(time.perf_counter() - start)
            for block, back in zip(blocks, decoded, strict=True):
                assert np.array_equal(np.frombuffer(back, np.uint8), block), c.name
            sizes[c.name] = sum(map(len, encoded))
    for name, times in seconds.items():
        speeds = (f"{blocks.nbytes / statistics.median(some) / 1e6:,.0f}" for some in times)
        yield name, f"{blocks.nbytes / sizes[name]:.2f}", *speeds


def token_states():
    """Hidden states of the tokens of sentences; padding is left out."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    example = load_example()
    model, tokenized = example.load_model(example.model_folder(), 48)
    batch = tokenized(example.make_corpus(Path(statistics.__file__).parent, 420))
    states = model.eval()(**batch).last_hidden_state[batch["attention_mask"].bool()]
    assert states.nbytes >= 8 << 20  # as bfloat16 half of it
    return states


def load_example():
    specification = importlib.util.spec_from_file_location("text_embeddings", EXAMPLE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def relu_maps():
    """Maps of a convolutional net of 8×8 images of digits."""
    generator = torch.Generator().manual_seed(0)
    images = torch.from_numpy(load_digits().images[:256]).float()[:, None] / 16
    layers = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 128, 3, padding=1), nn.ReLU()
    )
    for parameter in layers.parameters():
        bound = (6 / max(1, parameter[0].numel())) ** 0.5
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layers(images)
