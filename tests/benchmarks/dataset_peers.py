"""Datasets whose samples somebody keeps: what a user would reach for in place of `CachedDataset`.

A sample is an image and its label. The sources that these caches are made from come first.
"""

import contextlib
import io
import math
import pickle
import warnings
from importlib.util import find_spec
from multiprocessing import Manager

import joblib
import lmdb
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

WORKERS = 4


def shuffled(data, batch, workers=WORKERS, stay=True):
    """A loader of shuffled batches, whose workers stay or are new in each epoch."""
    warnings.filterwarnings("ignore", "This DataLoader will create")  # on a machine with fewer cores
    return DataLoader(data, batch, shuffle=True, num_workers=workers, persistent_workers=stay)


def read(loader):
    """An epoch."""
    for _ in loader:
        pass


class Arrays(Dataset):
    """A source that is in memory: random pixels, uint8 of `shape`, and a label."""

    def __init__(self, count, shape):
        self.count, self.shape = count, shape

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        values, label = self.raw(index)
        return self.decoded(values), label

    def raw(self, index):
        return np.random.default_rng(index).integers(0, 256, self.shape, np.uint8), index % 1000

    def decoded(self, values):
        return torch.as_tensor(values)


class Jpegs(Dataset):
    """JPEG files in memory that are decoded, and made a sample of uint8 (3, side, side) and a label.

    `files` are few, and each is many samples, so that they are made soon.
    """

    def __init__(self, count, side, pixels):
        self.count, self.side = count, side
        rng = np.random.default_rng(0)
        self.files = [_jpeg(rng, pixels) for _ in range(16)]

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        data, label = self.raw(index)
        return self.decoded(data), label

    def raw(self, index):
        return self.files[index % len(self.files)], index

    def decoded(self, data):
        image = Image.open(io.BytesIO(data))
        image = image.resize((self.side, self.side), Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def _jpeg(rng, pixels):
    small = Image.fromarray(rng.integers(0, 256, (pixels // 8, pixels // 8, 3), np.uint8))
    file = io.BytesIO()
    small.resize((pixels, pixels), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


class Peer(Dataset):
    """A cache of a source: a sample that `find` does not have is loaded, and `keep` gets it."""

    def __init__(self, source):
        self.source = source

    def close(self):
        pass

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        sample = self.find(index)
        if sample is None:
            sample = self.source[index]
            self.keep(index, sample)
        return sample


class Plain(Dataset):
    """The floor: all samples in a list that workers inherit, so that no time is left but the loader's."""

    name = "a list of all samples"

    def __init__(self, source):
        self.samples = [source[index] for index in range(len(source))]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


class ManagerDict(Peer):
    """Pickles in a dict that a process has and others ask for, as BiLevelCache does in RAM.

    It asks once for a hit. BiLevelCache asks twice, since it moves the sample to the end of its order.
    """

    name = "Manager().dict() of pickles"

    def __init__(self, source):
        super().__init__(source)
        self.manager = Manager()
        self.samples = self.manager.dict()

    def find(self, index):
        data = self.samples.get(index)
        return None if data is None else pickle.loads(data)

    def keep(self, index, sample):
        self.samples[index] = pickle.dumps(sample)


class Joblib(Dataset):
    """`joblib.Memory` of what loads a sample; its files are in the page cache."""

    name = "joblib.Memory"

    def __init__(self, source, folder):
        self.source = source
        self.load = joblib.Memory(folder, verbose=0).cache(_load, ignore=["source"])

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return self.load(index, self.source)


def _load(index, source):
    return source[index]


class Stocaching(Peer):
    """stocaching keeps the images; labels are in a list, as it has one tensor for each sample."""

    name = "stocaching 0.2.1"

    def __init__(self, source):
        super().__init__(source)
        import stocaching

        image, _ = source[0]
        gib = math.ceil(len(source) * (image.nbytes + 1) / 2**30)
        with contextlib.redirect_stdout(io.StringIO()):
            self.images = stocaching.SharedCache(gib, len(source), tuple(image.shape))
        self.labels = torch.zeros(len(source), dtype=torch.int64).share_memory_()

    @staticmethod
    def is_installed():
        return find_spec("stocaching") is not None

    def find(self, index):
        image = self.images.get_slot(index)
        return None if image is None else (image, int(self.labels[index]))

    def keep(self, index, sample):
        self.labels[index] = sample[1]
        self.images.set_slot(index, sample[0])


class TorchSave(Peer):
    """A `torch.save` file for each sample."""

    name = "torch.save, a file per sample"

    def __init__(self, source, folder):
        super().__init__(source)
        self.folder = folder

    def find(self, index):
        try:
            return torch.load(self.folder / f"{index}.pt", weights_only=True)
        except FileNotFoundError:
            return None

    def keep(self, index, sample):
        torch.save(sample, self.folder / f"{index}.pt")


class LmdbPickle(Peer):
    """LMDB with a pickle for each sample; without read-ahead, as it advises for random reads."""

    name = "LMDB with pickle"

    def __init__(self, source, folder, size):
        super().__init__(source)
        self.environment = lmdb.open(str(folder), map_size=size, sync=False, readahead=False)

    def find(self, index):
        with self.environment.begin(buffers=True) as transaction:
            data = transaction.get(b"%d" % index)
            return None if data is None else pickle.loads(data)

    def keep(self, index, sample):
        with self.environment.begin(write=True) as transaction:
            transaction.put(b"%d" % index, pickle.dumps(sample))

    def close(self):
        self.environment.close()
