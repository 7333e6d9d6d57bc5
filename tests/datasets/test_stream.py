"""`CachedStream` decodes a sample once, and gives what its source gives."""

import gc
import io
import pickle
import tarfile
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tests.helpers import warm
from tests.helpers.outputs import Notes, assert_same, note, warnings_in
from torchcache2 import CachedStream, OptionError, OutputError

RAW = [{"id": f"sample {i}", "text": str(i), "at": i} for i in range(50)]
DECODED = Notes()
NAME = DECODED.name


def decode(raw):
    note(NAME, raw["id"])
    return {"value": torch.full((3,), float(raw["text"])), "name": raw["id"]}


def expected(raw):
    return {"value": torch.full((3,), float(raw["text"])), "name": raw["id"]}


class Shards(IterableDataset):
    """Gives each worker its own part, and in each epoch another order."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        order = torch.randperm(50, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return (RAW[i] for i in order[first::step])


def make(iterable=RAW, **options):
    usual = {"key": "id", "load": decode, "name": "numbers", "batch_size": 8, "memory_size": "10MB"}
    return CachedStream(iterable, **usual | options)


def decoded():
    found = [*DECODED.notes]
    del DECODED.notes[:]
    return found


@pytest.fixture(autouse=True)
def _fresh():
    gc.collect()  # streams of earlier tests, whose samples others would find
    decoded()


def test_a_sample_is_decoded_once_and_comes_in_the_order_of_the_source():
    stream = make(Shards())
    for epoch in range(3):
        stream.set_epoch(epoch)
        assert_same(list(stream), [expected(raw) for raw in Shards.__iter__(stream._iterable)])
    assert sorted(decoded()) == sorted(raw["id"] for raw in RAW)
    stats = stream.stats()
    assert (stats.misses, stats.memory_hits) == (50, 100)
    stream.clear()
    assert len(list(stream)) == 50 and len(decoded()) == 50
    with pytest.raises(TypeError):
        len(stream)
    assert len(make()) == 50


@pytest.mark.parametrize("path", [None, "folder"])
def test_workers_share_what_one_of_them_has_decoded(path, tmp_path):
    stream = make(Shards(), cache_dir=path and tmp_path / path)
    found = []
    for epoch in range(2):
        stream.set_epoch(epoch)
        loader = DataLoader(stream, None, num_workers=2, multiprocessing_context="fork")
        found.append(sorted(sample["name"] for sample in loader))
    assert found == [sorted(raw["id"] for raw in RAW)] * 2
    assert stream.stats().misses == 50 and stream.stats().hits == 50
    assert len(list(stream)) == 50 and decoded() == []


def test_a_later_run_decodes_nothing_and_changed_code_all(tmp_path):
    script = f"""
        import torch
        from torchcache2 import CachedStream
        factor = 2
        def decode(raw):
            return torch.tensor([float(raw)]) * factor
        path = {str(tmp_path / "rows")!r}
        stream = CachedStream(["1", "2", "3"], key=str, load=decode, name="texts", cache_dir=path)
        print([float(x) for x in stream], stream.stats().misses)
    """
    assert warm.run(script).out == "[2.0, 4.0, 6.0] 3\n"
    assert warm.run(script).out == "[2.0, 4.0, 6.0] 0\n"
    assert warm.run(script.replace("factor = 2", "factor = 3")).out == "[3.0, 6.0, 9.0] 3\n"


def test_what_counts_is_the_name_the_key_and_what_decodes(tmp_path):
    def namespace(**options):
        return make(**options)._recipe.identity.namespace

    others = [
        {"name": "other"},
        {"key": lambda raw: raw["id"]},
        {"key": "text"},
        {"load": lambda raw: raw["id"]},
        {"version": 2},
    ]
    assert namespace() == namespace(iterable=Shards(), batch_size=3, memory_size="1MB", transform=len)
    assert len({namespace(), *(namespace(**one) for one in others)}) == 6


def test_errors_of_the_source_and_of_what_decodes_pass():
    def failing(raw):
        raise ValueError("cannot be decoded")

    def source():
        yield from RAW[:20]
        raise OSError("the source")

    for stream, error in (make(load=failing), ValueError), (make(source()), OSError):
        with pytest.raises(error):
            list(stream)


def test_samples_of_one_key_transforms_and_values_that_are_refused():
    twice = make([*RAW[:3], *RAW[:3]], transform=lambda sample: sample["name"])
    assert list(twice) == [raw["id"] for raw in RAW[:3]] * 2
    assert [*twice] and set(decoded()) == {raw["id"] for raw in RAW[:3]}
    with pytest.raises(OutputError):
        list(make(load=lambda raw: object()))
    with pytest.raises(TypeError, match="one int, str or bytes"):
        list(make(key=lambda raw: 0.5))


def test_a_decoder_that_draws_random_numbers_is_not_cached(log):
    stream = make(load=lambda raw: float(torch.rand(1)))
    assert list(stream) != list(stream) and "transform=" in warnings_in(log)[0]


def test_pickles_and_closed_streams():
    stream = make()
    list(stream)
    decoded()
    again = pickle.loads(pickle.dumps(stream))
    assert_same(list(again), [expected(raw) for raw in RAW])
    assert decoded() == []
    stream.close()
    assert len(list(stream)) == 50 and len(decoded()) == 50


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"load": None},
        {"key": 3},
        {"iterable": 3},
        {"batch_size": 0},
        {"partial": True},
        {"path": "rows"},
    ],
)
def test_mistakes_are_errors_at_once(options):
    with pytest.raises(OptionError):
        make(**options)


def test_tars_of_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for i in range(10):
                member = tarfile.TarInfo(f"{shard}{i:02}.txt")
                member.size = len(data := f"text {shard} {i}".encode())
                tar.addfile(member, io.BytesIO(data))

    def load(raw):
        note(NAME, raw["__key__"])
        return raw["txt"].decode()

    source = webdataset.WebDataset(f"{tmp_path}/{{0..1}}.tar", shardshuffle=False)
    stream = make(source, key="__key__", load=load)
    for workers in (0, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loader = DataLoader(stream, None, num_workers=workers)
            assert sorted(loader) == [f"text {shard} {i}" for shard in range(2) for i in range(10)]
        assert len(decoded()) == (20 if workers == 0 else 0)
    assert stream.stats().misses == 20 and stream.stats().hits == 20


def test_a_stream_of_hugging_face():
    datasets = pytest.importorskip("datasets")
    source = datasets.Dataset.from_list(RAW).to_iterable_dataset(num_shards=4)
    stream = make(source)
    for epoch in range(2):
        stream.set_epoch(epoch)
        assert_same(list(stream), [expected(raw) for raw in RAW])
    assert len(decoded()) == 50
