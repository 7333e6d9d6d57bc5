"""The second run of a script that finds all: its encoder is a `LazyModule`, or loaded at the start."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from transformers import T5Config, T5EncoderModel

from tests.benchmarks.timing import progress

HEADER = ("second run", "first output after the imports", "peak memory")
ROUNDS = 3
SIZES = {"vocab_size": 32_128, "d_model": 1024, "d_ff": 2816, "num_layers": 20, "num_heads": 16}
SCRIPT = """
import json, re, sys, time
import torch
from transformers import T5EncoderModel
from torchcache2 import LazyModule, torchcache

kind, path, folder = sys.argv[1:]
start = time.perf_counter()
if kind == "lazy":
    encoder = LazyModule(lambda: T5EncoderModel.from_pretrained(path), files=path)
else:
    encoder = T5EncoderModel.from_pretrained(path).eval().requires_grad_(False)
    for weight in encoder.parameters():
        weight.sum()  # a file that is mapped is read when it is used
torchcache(encoder, persistent_cache_dir=folder)
encoder(input_ids=torch.arange(8 * 16).view(8, 16))
seconds = time.perf_counter() - start
stats = encoder.cache_instance.stats()
encoder.cache_instance.close()
peak = int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
print(json.dumps([seconds, peak, stats.hits, getattr(encoder, "is_loaded", True)]))
"""


def run(report):
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        progress("a checkpoint of 1 GB")
        T5EncoderModel(T5Config(**SIZES)).save_pretrained(folder / "t5")
        size = sum(file.stat().st_size for file in (folder / "t5").iterdir())
        script = folder / "script.py"
        script.write_text(SCRIPT)
        runs = {"lazy": [], "loaded": []}
        for number in range(ROUNDS + 1):
            for kind, found in runs.items():
                progress(f"{kind}, run {number}")
                command = [sys.executable, script, kind, folder / "t5", folder / f"rows of {kind}"]
                output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=".").stdout
                *measured, hits, is_loaded = json.loads(output.splitlines()[-1])
                if number > 0:
                    assert hits == 8 and is_loaded == (kind == "loaded")
                    found.append(measured)
    names = {"lazy": "`LazyModule`", "loaded": "the encoder, loaded at the start"}
    rows = []
    for kind, found in runs.items():
        seconds, peak = map(statistics.median, zip(*found, strict=True))
        rows.append((names[kind], f"{seconds:.2f} s", f"{peak / 1e9:.2f} GB"))
    title = f"A T5 encoder of {size / 1e9:.2f} GB, 8 items that are all found, files in the page cache"
    report.table(title, HEADER, rows)
