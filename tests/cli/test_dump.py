"""`torchcache2 dump`: what is in the plain file, in which order, and what is left out."""

import collections
import itertools
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.utils.data import Dataset

from tests.helpers.commands import run
from tests.helpers.storage import (
    CPU,
    DTYPES,
    NAMESPACES,
    NEVER,
    flip,
    key_of,
    keys_of,
    put,
    segments,
    value_of,
)
from torchcache2 import CachedDataset
from torchcache2.cli import dump as dumping
from torchcache2.core.keys import indices_of
from torchcache2.core.rows import Rows
from torchcache2.datasets.identity import keys_of as sample_keys
from torchcache2.engine.values.packed import unpack
from torchcache2.files.filesystem import FileSystem
from torchcache2.tiers.disk.tier import DiskTier

FIRST = NAMESPACES[0].hex()


def dumped(path, file, namespace=FIRST, **options):
    said = json.loads(run("dump", path, namespace, file, "--format", "json", **options)[0])
    return said, load_file(file)


def metadata(file):
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def tier(path, **options):
    return DiskTier(path, delay=NEVER, **options)


def put_output(disk, names, output):
    disk.put(keys_of(names), Rows.from_pytree(output, len(names), device=CPU))
    disk.flush()


class Samples(Dataset):
    """Samples that a function makes of indices."""

    def __init__(self, make, size):
        self.make, self.size = make, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.make(index)


def sampled(path, make, indices, size=100):
    dataset = CachedDataset(Samples(make, size), path, name="dumped", version="1")
    for index in indices:
        dataset[index]
    dataset.close()
    (folder,) = (one for one in path.iterdir() if one.is_dir())
    return folder.name


@pytest.mark.parametrize("codec", ["none", "brotli", "blosc2"])
@pytest.mark.parametrize("at_once", [1, 1000, 1 << 20], ids=["one row", "some rows", "all rows"])
def test_rows_come_in_the_order_in_which_they_were_written_each_once(tmp_path, monkeypatch, codec, at_once):
    monkeypatch.setattr(dumping, "_AT_ONCE", at_once)
    first, second = tier(tmp_path / "cache", codec=codec), tier(tmp_path / "cache", codec=codec)
    put(first, range(40), 64)
    put(second, range(30, 50), 64)  # ten of them for the second time
    put(second, range(10), 64, NAMESPACES[1])
    first.close()
    second.close()
    said, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    nbytes = (tmp_path / "out.safetensors").stat().st_size
    assert (said["rows"], said["bytes"], said["structures"], said["files"]) == (50, nbytes, 1, [])
    assert set(file) == {"keys", "output"}
    assert [bytes(key.tolist()) for key in file["keys"]] == [key_of(name) for name in range(50)]
    assert torch.equal(file["output"], torch.stack([value_of(name, 64) for name in range(50)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_dtype_is_what_it_was(tmp_path, dtype):
    output = torch.arange(24).reshape(4, 2, 3).to(dtype)
    disk = tier(tmp_path / "cache")
    put_output(disk, range(4), output)
    disk.close()
    _, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    found = torch.view_as_complex(file["output"]) if dtype.is_complex else file["output"]
    assert found.dtype == dtype and torch.equal(found.view(torch.uint8), output.view(torch.uint8))


def test_a_dtype_that_the_format_of_the_file_lacks_is_bytes(tmp_path):
    output = torch.arange(6).reshape(2, 3).to(torch.float8_e5m2fnuz)
    disk = tier(tmp_path / "cache")
    put_output(disk, range(2), output)
    disk.close()
    _, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    assert torch.equal(file["output"], output.view(torch.uint8))
    (leaf,) = json.loads(metadata(tmp_path / "out.safetensors")["structures"])[0]["leaves"]
    assert leaf["dtype"] == "float8_e5m2fnuz"


def test_channels_last_are_in_the_order_of_the_shape(tmp_path):
    output = torch.arange(48.0).reshape(2, 4, 2, 3).to(memory_format=torch.channels_last)
    disk = tier(tmp_path / "cache")
    put_output(disk, range(2), output)
    disk.close()
    assert torch.equal(dumped(tmp_path / "cache", tmp_path / "out.safetensors")[1]["output"], output)


def test_rows_whose_first_extent_differs_lie_one_behind_another(tmp_path, monkeypatch):
    monkeypatch.setattr(dumping, "_AT_ONCE", 100)
    disk = tier(tmp_path / "cache")
    for length in (3, 1, 4):
        put_output(disk, [(length, i) for i in range(2)], torch.full((2, length, 5), float(length)))
    disk.close()
    _, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    assert file["output"].shape == (16, 5) and "output.shapes" not in file
    rows = itertools.pairwise(file["output.offsets"].tolist())
    found = [(end - start, file["output"][start:end].unique().tolist()) for start, end in rows]
    assert found == [*[(3, [3.0])] * 2, *[(1, [1.0])] * 2, *[(4, [4.0])] * 2]


def test_rows_of_other_shapes_are_flat_and_have_their_shapes(tmp_path):
    disk = tier(tmp_path / "cache")
    outputs = [torch.randn(2, 2, 3), torch.randn(1, 3, 2), torch.randn(1, 0, 7)]
    for number, output in enumerate(outputs):
        put_output(disk, [(number, i) for i in range(len(output))], {"hidden": (output,)})
    disk.close()
    _, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    offsets, shapes = file["output.hidden.0.offsets"].tolist(), file["output.hidden.0.shapes"].tolist()
    rows = [row for output in outputs for row in output]
    assert len(shapes) == len(rows)
    for row, (start, end), shape in zip(rows, itertools.pairwise(offsets), shapes, strict=True):
        assert torch.equal(file["output.hidden.0"][start:end].view(shape), row)


@pytest.mark.parametrize("at_once", [1, 1 << 20], ids=["one row", "all rows"])
def test_tensors_without_elements_are_there(tmp_path, monkeypatch, at_once):
    monkeypatch.setattr(dumping, "_AT_ONCE", at_once)
    disk = tier(tmp_path / "cache")
    put_output(disk, range(4), {"empty": torch.ones(4, 3, 0), "other": torch.arange(4.0)})
    disk.close()
    said, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    assert said["rows"] == 4 and file["output.empty"].shape == (4, 3, 0)
    assert torch.equal(file["output.other"], torch.arange(4.0))


def test_samples_come_in_the_order_of_the_dataset(tmp_path):
    def make(index):
        return {
            "scan": torch.full((2, 2), index),
            "patient": f"p{index}" * (index % 3),
            "age": index,
            "weight": index / 2,
            "ill": index % 2 == 0,
            "wave": complex(index, 1),
            "note": None,
            "raw": bytes(index % 4),
            "label": np.float32(index),
        }

    indices = torch.randperm(100, generator=torch.Generator().manual_seed(0))[:60].tolist()
    namespace = sampled(tmp_path / "cache", make, indices)
    said, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors", namespace)
    assert (said["rows"], said["length"], said["samples"]) == (60, 100, 60)
    expected = sorted(indices)
    assert file["index"].tolist() == expected
    assert torch.equal(file["output.scan"], torch.tensor(expected)[:, None, None].expand(60, 2, 2))
    assert file["output.age"].tolist() == expected
    assert torch.equal(file["output.weight"], torch.tensor(expected, dtype=torch.float64) / 2)
    assert file["output.ill"].tolist() == [index % 2 == 0 for index in expected]
    assert torch.view_as_complex(file["output.wave"]).tolist() == [complex(index, 1) for index in expected]
    assert file["output.label"].tolist() == expected and file["output.label"].dtype == torch.float32
    assert "output.note" not in file
    patients = file["output.patient"].tolist()
    ranges = itertools.pairwise(file["output.patient.offsets"].tolist())
    assert [bytes(patients[a:b]).decode() for a, b in ranges] == [f"p{i}" * (i % 3) for i in expected]
    assert file["output.raw.offsets"].diff().tolist() == [i % 4 for i in expected]
    assert json.loads(metadata(tmp_path / "out.safetensors")["dataset"])["name"] == "dumped"
    text, _ = run("dump", tmp_path / "cache", namespace[:6], tmp_path / "again.safetensors")
    assert "60 rows" in text and text.endswith("; 60 of the dataset's 100 samples\n")


def test_each_structure_has_tensors_of_its_own(tmp_path):
    def make(index):
        if index % 3 == 0:
            return (torch.tensor(index),)
        return [torch.tensor(index)] if index % 3 == 1 else list(map(str, range(20)))

    namespace = sampled(tmp_path / "cache", make, range(9))
    said, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors", namespace)
    assert said["structures"] == 3 and file["index"].tolist() == list(range(9))
    structures = json.loads(metadata(tmp_path / "out.safetensors")["structures"])
    for number, said in enumerate(structures):
        chosen = file["index"][file["structure"] == number]
        (leaf,) = said["leaves"]
        if leaf["kind"] == "tensor":
            assert chosen.tolist() == file[leaf["tensor"]].tolist()
            assert list(said["structure"]) == [["tuple", "list"][chosen[0] % 3]]
            continue
        start, end = file[leaf["offsets"]][:2].tolist()
        assert unpack(bytes(file[leaf["tensor"]][start:end].tolist())) == list(map(str, range(20)))


Gone = collections.namedtuple("Gone", ["hidden", "hidden_offsets"])


def test_the_classes_of_outputs_need_not_be_there(tmp_path, monkeypatch):
    disk = tier(tmp_path / "cache")
    put_output(disk, range(3), Gone(torch.ones(3, 2), torch.zeros(3)))
    disk.close()
    monkeypatch.delattr(f"{__name__}.Gone")
    _, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    assert set(file) == {"keys", "output.hidden", "output.hidden_offsets"}


def test_no_two_tensors_have_one_name(tmp_path):
    disk = tier(tmp_path / "cache")
    for length in (1, 2):
        output = {"a": torch.ones(1, length), "a.offsets": torch.full((1, 3), float(length))}
        put_output(disk, [length], output)
    disk.close()
    _, file = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    (said,) = json.loads(metadata(tmp_path / "out.safetensors")["structures"])
    ragged, plain = said["leaves"]
    assert file[ragged["offsets"]].tolist() == [0, 1, 3]
    assert file[plain["tensor"]].tolist() == [
        [1.0] * 3,
        [2.0] * 3,
    ]


def two_segments(path):
    """Rows 0 to 9, and 5 to 19; the older segment."""
    first, second = tier(path, codec="none"), tier(path, codec="none")
    put(first, range(10), 64)
    put(second, range(5, 20), 64)
    first.close()
    second.close()
    return segments(path)[0]


@pytest.mark.parametrize("position", [300, 0], ids=["index", "header"])
def test_a_damaged_segment_is_left_out_and_its_rows_are_taken_from_others(tmp_path, position):
    file = two_segments(tmp_path / "cache")
    flip(file, position)
    said, found = dumped(tmp_path / "cache", tmp_path / "out.safetensors", code=1)
    assert [(one["file"], one["state"]) for one in said["files"]] == [(f"{FIRST}/{file.name}", "damaged")]
    assert torch.equal(found["output"], torch.stack([value_of(name, 64) for name in range(5, 20)]))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cache", "out.safetensors"]


def test_a_segment_with_damaged_rows_is_left_out_as_a_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(dumping, "_AT_ONCE", 1000)
    file = two_segments(tmp_path / "cache")
    flip(file, -1)
    flip(file, -64 * 4 * 8 + 5)
    said, found = dumped(tmp_path / "cache", tmp_path / "out.safetensors", code=1)
    (one,) = said["files"]
    assert one["reason"] == "2 of 10 rows differ from what was written"
    left = range(5, 20)  # which the other one has
    assert {bytes(key.tolist()) for key in found["keys"]} == set(map(key_of, left))
    rows = {bytes(key.tolist()): row for key, row in zip(found["keys"], found["output"], strict=True)}
    assert all(torch.equal(rows[key_of(name)], value_of(name, 64)) for name in left)


def test_a_segment_that_reads_differently_each_time_is_left_out(tmp_path, monkeypatch):
    file, read = two_segments(tmp_path / "cache"), dumping.Segment.read

    def fails_for_many(segment, rows, *arguments):
        return read(segment, rows, *arguments) and (len(rows) == 1 or file.name not in segment.path)

    monkeypatch.setattr(dumping.Segment, "read", fails_for_many)
    said, found = dumped(tmp_path / "cache", tmp_path / "out.safetensors", code=1)
    assert len(said["files"]) == 1 and len(found["output"]) == 15


def test_a_segment_that_somebody_deletes_meanwhile_is_not_missed(tmp_path, monkeypatch):
    disk = tier(tmp_path / "cache", codec="none")
    put(disk, range(10), 64)
    disk.flush()
    put(disk, range(10, 20), 64)
    disk.close()
    file, ordered = segments(tmp_path / "cache")[0], dumping._ordered

    def delete(*arguments, **options):
        file.unlink(missing_ok=True)
        return ordered(*arguments, **options)

    monkeypatch.setattr(dumping, "_ordered", delete)
    said, found = dumped(tmp_path / "cache", tmp_path / "out.safetensors")
    assert said["files"] == [] and len(found["output"]) == 10


def test_what_cannot_be_done_is_told_and_leaves_no_file(tmp_path, monkeypatch):
    disk, out = tier(tmp_path / "cache"), tmp_path / "out.safetensors"
    put(disk, range(10), 64)
    disk.flush()
    disk.close()
    assert "there is no namespace" in run("dump", tmp_path / "cache", "77", out, code=2)[1]
    assert "does not exist" in run("dump", tmp_path / "nothing", FIRST, out, code=2)[1]
    out.write_text("mine")
    assert "exists already" in run("dump", tmp_path / "cache", FIRST, out, code=2)[1]
    assert out.read_text() == "mine"
    out.unlink()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystem, "write", full)
    assert "No space left" in run("dump", tmp_path / "cache", FIRST, out, code=2)[1]
    assert [one.name for one in tmp_path.iterdir()] == ["cache"]


def test_an_index_is_found_from_its_key():
    ints = [0, 1, -1, 2**63 - 1, -(2**63), *torch.randint(-(2**62), 2**62, (1000,)).tolist()]
    found, is_int = indices_of(sample_keys(bytes(16), ints).data)
    assert is_int.all() and found.tolist() == ints
    found, is_int = indices_of(sample_keys(bytes(16), ["1", b"1", 2**70]).data)
    assert not is_int.any()
