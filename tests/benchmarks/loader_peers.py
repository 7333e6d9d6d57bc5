"""Libraries that load training data from files of their own, each as its documentation says.

A library is made for a source and an empty folder. `write()` converts the source, which keeps an image as
`source.raw` has it: an array, or the bytes of a JPEG; `loader()` returns what yields its shuffled batches.
"""

import functools
import importlib.util
import io
import multiprocessing
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.utils.data import DataLoader

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


class Library:
    """What the libraries share."""

    def __init__(self, source, folder, batch, workers):
        self.library = self.imported()
        self.source, self.folder = source, Path(folder)
        self.options = {"num_workers": workers, "persistent_workers": True}
        self.batch = batch

    @classmethod
    def imported(cls):
        """The library; None if it cannot be imported here."""
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                return import_module(cls.package)
        except Exception:  # such as one that was built for another version of torch
            return None

    def raw_samples(self):
        return map(self.source.raw, range(len(self.source)))


class Mosaic(Library):
    """MDS shards. Its shuffle takes samples of blocks of shards."""

    name, package = "MosaicML Streaming 0.13", "streaming"

    @classmethod
    def imported(cls):
        """As above; its data sets of images, which are not used here, need one class of torchvision."""
        if cls.package in sys.modules or importlib.util.find_spec("torchvision"):
            return super().imported()
        import transformers.feature_extraction_utils  # noqa: F401 - it looks for the real one

        paths = ("torchvision", *(f"torchvision.{name}" for name in ("datasets", "transforms")))
        stands_in = mock.MagicMock(VisionDataset=torch.utils.data.Dataset)
        modules = dict.fromkeys((*paths, "torchvision.transforms.functional"), stands_in)
        sys.modules.update(modules)
        try:
            return super().imported()
        finally:
            for path in modules:
                del sys.modules[path]

    def write(self):
        image, _ = self.source.raw(0)
        is_array = isinstance(image, np.ndarray)
        kind = f"ndarray:{image.dtype}:{','.join(map(str, image.shape))}" if is_array else "bytes"
        with self.library.MDSWriter(out=str(self.folder), columns={"image": kind, "label": "int"}) as out:
            for image, label in self.raw_samples():
                out.write({"image": image, "label": label})

    def loader(self):
        decoded = self.source.decoded

        class Streamed(self.library.StreamingDataset):
            def __getitem__(self, index):
                sample = super().__getitem__(index)
                return decoded(sample["image"]), sample["label"]

        data = Streamed(local=str(self.folder), shuffle=True, batch_size=self.batch)
        return DataLoader(data, self.batch, **self.options)


class HuggingFace(Library):
    """An Arrow table with the format torch; files of images are decoded by a transform."""

    name, package = "Hugging Face datasets", "datasets"

    def write(self):
        image, _ = self.source.raw(0)
        is_array = isinstance(image, np.ndarray)
        kind = (
            self.library.Array3D(image.shape, str(image.dtype)) if is_array else self.library.Value("binary")
        )
        features = self.library.Features({"image": kind, "label": self.library.Value("int64")})
        made = self.library.Dataset.from_generator(self._samples, features, str(self.folder / "cache"))
        made.save_to_disk(self.folder / "table")

    def _samples(self):
        for image, label in self.raw_samples():
            yield {"image": image, "label": label}

    def loader(self):
        data = self.library.load_from_disk(self.folder / "table")
        is_array = isinstance(self.source.raw(0)[0], np.ndarray)
        data = data.with_format("torch") if is_array else data.with_transform(self._decoded)
        return DataLoader(data, self.batch, shuffle=True, **self.options)

    def _decoded(self, batch):
        return {**batch, "image": list(map(self.source.decoded, batch["image"]))}


class LitData(Library):
    """Chunks of 64 MB. Its shuffle takes chunks, and windows of 256 samples in them."""

    name, package = "LitData 0.2.76", "litdata"

    def write(self):
        start = multiprocessing.get_start_method()
        self.library.optimize(
            functools.partial(_tensors, self.source),
            list(range(len(self.source))),
            str(self.folder),
            chunk_bytes="64MB",
            num_workers=self.options["num_workers"],
            verbose=False,
        )
        multiprocessing.set_start_method(start, force=True)  # it has changed that for all

    def loader(self):
        transform = functools.partial(_decoded, self.source)
        data = self.library.StreamingDataset(str(self.folder), shuffle=True, transform=transform)
        return self.library.StreamingDataLoader(data, batch_size=self.batch, **self.options)


def _tensors(source, index):
    image, label = source.raw(index)
    return {"image": torch.from_numpy(image) if isinstance(image, np.ndarray) else image, "label": label}


def _decoded(source, sample):
    return source.decoded(sample["image"]), sample["label"]


class WebDataset(Library):
    """Tars of 1,000 samples. It shuffles tars, and samples in a buffer of 1,000; workers make batches."""

    name, package = "WebDataset", "webdataset"

    def write(self):
        is_array = isinstance(self.source.raw(0)[0], np.ndarray)
        self.suffix = "npy" if is_array else "jpg"
        with self.library.ShardWriter(str(self.folder / "%04d.tar"), maxcount=1000, verbose=0) as out:
            for index, (image, label) in enumerate(self.raw_samples()):
                out.write({"__key__": f"{index:08}", self.suffix: image, "cls": label})

    def loader(self):
        tars = sorted(map(str, self.folder.glob("*.tar")))
        samples = self.library.WebDataset(tars, shardshuffle=100).shuffle(1000)
        if self.suffix == "npy":
            samples = samples.decode().to_tuple("npy", "cls")
        else:
            samples = samples.to_tuple("jpg", "cls").map_tuple(self.source.decoded, int)
        return self.library.WebLoader(samples.batched(self.batch), batch_size=None, **self.options)


LIBRARIES = (Mosaic, HuggingFace, LitData, WebDataset)
