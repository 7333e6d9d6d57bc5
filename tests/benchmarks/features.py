"""Features of a dataset: batches of rows from a `loader()` beside others, and epochs over JPEGs.

The rows are what a backbone would give, 768 numbers and a label, and are read by one process. All but the
floor shuffle by a `RandomSampler`. The floor has one tensor, and takes batches of it by `index_select`.
"""

import contextlib
import copy
import statistics
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, TensorDataset

from tests.benchmarks.dataset_peers import Jpegs, shuffled
from tests.benchmarks.disk_machine import seconds
from tests.benchmarks.loader_peers import HuggingFace
from tests.benchmarks.report import at_least, at_most, duration
from tests.benchmarks.timing import progress
from torchcache2 import CachedDataset, torchcache

COUNT, WIDTH, BATCH, WORKERS, EPOCHS = 50_000, 768, 256, 2, 5
IMAGES, JPEG_BATCH, ROUNDS, LATER = 1024, 64, 3, 4
FLOOR = "`index_select` from one tensor"
MEMORY, DISK, BROTLI = "`loader()`, in memory", "`loader()`, on disk, none", "`loader()`, on disk, brotli"
PLAIN, MODEL = "no cache", "a cached model, third epoch"
FIRST, SECOND, THIRD = (f"`map=` and `loader()`, {name}" for name in ("first epoch", "second", "later ones"))


def run(report, folder=None):
    targets = []
    with tempfile.TemporaryDirectory(dir=folder, prefix="torchcache2-") as root:
        rates = _rates(Path(root))
        rows = [
            (name, f"{rate:,.0f}", f"{rate / rates[FLOOR]:.3f}", f"{rates[MEMORY] / rate:.1f}×")
            for name, rate in rates.items()
        ]
        title = (
            f"{COUNT:,} rows of {WIDTH} float32 and a label, batches of {BATCH}, shuffled, pages warm: "
            f"median of {EPOCHS} epochs after the first"
        )
        report.table(title, ("", "rows/s", "of the floor", "in memory over it"), rows)
        targets.append(at_least("in memory: of the floor", rates[MEMORY] / rates[FLOOR], 0.6, ""))
        targets.append(at_least("on disk, none", rates[DISK] / 1e3, 200, " k rows/s"))
        targets.append(at_least("on disk, brotli", rates[BROTLI] / 1e3, 100, " k rows/s"))
        times = _jpegs(Path(root))
    plain = times[PLAIN]
    rows = [(name, duration(taken), f"{plain / taken:.1f}×") for name, taken in times.items()]
    title = (
        f"{IMAGES:,} JPEGs of 224 px, a frozen backbone, {WORKERS} workers, batches of {JPEG_BATCH}, "
        f"shuffled: an epoch, median of {ROUNDS} rounds with {LATER} later epochs each"
    )
    report.table(title, ("", "seconds", "as fast"), rows)
    targets.append(at_most("JPEGs, first epoch over the plain one", times[FIRST] / plain, 1.1))
    targets.append(at_least("JPEGs, second epoch", plain / times[SECOND], 5))
    targets.append(at_least("JPEGs, later epochs", plain / times[THIRD], 100))
    report.targets(targets)


class Mapped(Dataset):
    """Rows in a file that workers map into memory."""

    def __init__(self, path, rows, labels):
        rows.numpy().tofile(path)
        self.rows, self.labels = np.memmap(path, np.float32, "r", shape=tuple(rows.shape)), labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return torch.from_numpy(self.rows[index].copy()), self.labels[index]


def _rates(root):
    """Rows/s of each, in turns."""
    rows, labels = torch.randn(COUNT, WIDTH), torch.arange(COUNT)
    data = TensorDataset(rows, labels)
    with contextlib.ExitStack() as stack:

        def cached(*arguments, **options):
            made = stack.enter_context(contextlib.closing(CachedDataset(data, *arguments, **options)))
            _epoch(made.loader(1024))
            made.flush()
            return made

        memory = cached(memory_size="2GB")
        loaders = {
            FLOOR: _Floor(rows, labels),
            "`TensorDataset` in a `DataLoader`": DataLoader(data, BATCH, shuffle=True),
            f"`np.memmap`, {WORKERS} workers": shuffled(Mapped(root / "rows", rows, labels), BATCH, WORKERS),
        }
        if library := HuggingFace.imported():
            table = library.Dataset.from_dict({"x": rows.numpy(), "y": labels.numpy()}).with_format("torch")
            order = BatchSampler(RandomSampler(table), BATCH, drop_last=False)
            loaders["Hugging Face `datasets`, by batches"] = DataLoader(table, None, sampler=order)
        loaders[f"`CachedDataset` in a `DataLoader`, {WORKERS} workers"] = shuffled(memory, BATCH, WORKERS)
        loaders[MEMORY] = memory.loader(BATCH, shuffle=True)
        for name, codec in ((DISK, "none"), (BROTLI, "brotli")):
            made = cached(root / codec, memory_size=0, disk_size="2GB", compression=codec)
            loaders[name] = made.loader(BATCH, shuffle=True)
        found, order = {name: [] for name in loaders}, list(loaders)
        for turn in range(EPOCHS + 1):
            for name in order:
                progress(f"features: {name}, epoch {turn} of {EPOCHS}")
                found[name].append(COUNT / seconds(partial(_epoch, loaders[name])))
            order.reverse()
        loaders.clear()
        return {name: statistics.median(rates[1:]) for name, rates in found.items()}


class _Floor:
    """Batches of tensors, in random order."""

    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        for chosen in torch.randperm(COUNT).split(BATCH):
            yield [tensor.index_select(0, chosen) for tensor in self.tensors]


def _epoch(batches):
    for _ in batches:
        pass


def _backbone():
    layers = []
    for wide, narrow, size in ((3, 16, 7), (16, 32, 3), (32, 64, 3)):
        layers += [nn.Conv2d(wide, narrow, size, stride=3), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval().requires_grad_(False)


def _jpegs(root):
    """Seconds of epochs over JPEGs."""
    images, net = Jpegs(IMAGES, 224, 224), _backbone()
    found = {name: [] for name in (PLAIN, MODEL, FIRST, SECOND, THIRD)}
    options = {"batch_size": JPEG_BATCH, "shuffle": True, "num_workers": WORKERS}
    for turn in range(ROUNDS):
        progress(f"features: JPEGs, round {turn + 1} of {ROUNDS}")
        plain = DataLoader(images, **options)
        found[PLAIN].append(seconds(lambda plain=plain: _epoch(_embedded(net, one) for one in plain)))
        model = torchcache(copy.deepcopy(net))
        times = [seconds(lambda: _epoch(_embedded(model, one) for one in plain)) for _ in range(3)]  # noqa: B023
        found[MODEL].append(times[-1])
        model.cache_instance.close()
        data = CachedDataset(images, root / f"features{turn}", map=partial(_embedded, net))
        loader = data.loader(**options)
        times = [seconds(lambda: _epoch(loader)) for _ in range(2 + LATER)]  # noqa: B023
        found[FIRST].append(times[0])
        found[SECOND].append(times[1])
        found[THIRD] += times[2:]
        data.close()
    return {name: statistics.median(times) for name, times in found.items()}


def _embedded(net, batch):
    images, labels = batch
    return net(images.float() / 255), labels
