"""Features of recordings: Whisper's encoder, and of wav2vec2 as many as each recording is long.

Whisper's encoder is a part of a larger model: ``torchcache(model.encoder)``. Wav2vec2 gets recordings of
all lengths, padded to the longest of their batch; a function gives back what belongs to each of them, as a
list with an entry for each recording, and each entry is cached for itself::

    @torchcache(item_args="recordings")
    def features(recordings): ...

A classifier is trained on both, twice from the same start, with one folder of rows. The first run computes
each recording once. The second finds all of them, and has the same losses, bit by bit.

The recordings are tones that rise, fall or stay, and the weights are random, for nothing is downloaded.
With ``--cache-dir`` the folder stays, and the next process finds its rows.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)
from transformers.utils import logging

from torchcache2 import cache_of, torchcache

RATE = 16_000  # samples a second
BATCH = 16


def load_models(width: int) -> tuple[WhisperModel, Wav2Vec2Model]:
    torch.manual_seed(0)
    whisper = WhisperConfig(
        d_model=width, encoder_layers=4, encoder_attention_heads=4, encoder_ffn_dim=4 * width,
        decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=width, max_source_positions=50,
    )  # fmt: skip
    # With a norm of layers, and not of groups, what is padded changes nothing if it is masked.
    wav2vec2 = Wav2Vec2Config(
        hidden_size=width, num_hidden_layers=4, num_attention_heads=4, intermediate_size=4 * width,
        conv_dim=(64,) * 7, feat_extract_norm="layer", do_stable_layer_norm=True, num_conv_pos_embeddings=16,
    )  # fmt: skip
    models = WhisperModel(whisper), Wav2Vec2Model(wav2vec2)
    return tuple(model.eval().requires_grad_(False) for model in models)


def make_recordings(count: int) -> tuple[list[np.ndarray], Tensor]:
    """Tones of 0.3 to 1 seconds, and whether each falls (0), stays (1) or rises (2)."""
    drawn = np.random.RandomState(0)
    recordings, labels = [], drawn.randint(0, 3, count)
    for label in labels:
        seconds = drawn.uniform(0.3, 1.0)
        pitch = drawn.uniform(200, 400) * 2.0 ** np.linspace(0, label - 1, int(seconds * RATE))
        tone = np.sin(2 * np.pi * np.cumsum(pitch) / RATE) + 0.1 * drawn.standard_normal(len(pitch))
        recordings.append(tone.astype(np.float32))
    return recordings, torch.from_numpy(labels)


def train(folder: Path, options: argparse.Namespace) -> list[float]:
    """The losses of all steps of one run."""
    whisper, wav2vec2 = load_models(options.width)
    to_spectra, to_waves = WhisperFeatureExtractor(chunk_length=1), Wav2Vec2FeatureExtractor()
    torchcache(whisper.encoder, persistent_cache_dir=folder)

    @torchcache(item_args="recordings", persistent_cache_dir=folder)
    def features(recordings: list[np.ndarray]) -> list[Tensor]:
        batch = to_waves(
            recordings, sampling_rate=RATE, padding=True, return_attention_mask=True, return_tensors="pt"
        )
        hidden = wav2vec2(batch.input_values, attention_mask=batch.attention_mask).last_hidden_state
        lengths = wav2vec2._get_feat_extract_output_lengths(batch.attention_mask.sum(dim=1))
        return [each[:length] for each, length in zip(hidden, lengths, strict=True)]

    recordings, labels = make_recordings(options.recordings)
    torch.manual_seed(0)
    classifier = nn.Linear(2 * options.width, 3)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=0.01)
    losses = []
    for epoch in range(1, options.epochs + 1):
        start, right = time.perf_counter(), 0
        for items in torch.randperm(len(recordings)).split(BATCH):
            chosen = [recordings[i] for i in items]
            spectra = to_spectra(chosen, sampling_rate=RATE, return_tensors="pt").input_features
            heard = whisper.encoder(spectra).last_hidden_state.mean(dim=1)
            # The first features from the last: whether the pitch has changed.
            moved = torch.stack([each[-8:].mean(dim=0) - each[:8].mean(dim=0) for each in features(chosen)])
            logits = classifier(torch.cat([heard, moved], dim=1))
            loss = F.cross_entropy(logits, labels[items])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            right += (logits.argmax(dim=1) == labels[items]).sum().item()
        seconds = time.perf_counter() - start
        print(f"  epoch {epoch}: {seconds:6.2f} s, accuracy {right / len(recordings):.2f}", flush=True)
    for name, cached in (("Whisper", whisper.encoder), ("wav2vec2", features)):
        with cache_of(cached) as cache:  # its rows are on disk when it is closed
            print(f"  {name}: {cache.stats().misses} computed, {cache.stats().hits} found")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--recordings", type=int, default=128, metavar="N", help="default: %(default)s")
    parser.add_argument("--width", type=int, default=96, metavar="N", help="of both (default: %(default)s)")
    parser.add_argument("--cache-dir", type=Path, metavar="PATH", help="keep the rows there")
    options = parser.parse_args()
    if options.epochs < 1 or options.recordings < 1 or options.width < 16 or options.width % 16:
        parser.error("expected at least 1 epoch and 1 recording, and a multiple of 16 for --width")
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
