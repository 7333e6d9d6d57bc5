"""`SharedCache`: what stocaching's tests ask of it, and what it promises beyond that."""

import copy
import math
import os
import pickle
import signal

import numpy as np
import pytest
import torch

from tests.helpers import warm
from tests.helpers.storage import files_in_memory, wait_until
from torchcache2 import OptionError, SharedCache, get_shm_size

SOAK = bool(os.environ.get("SOAK"))

GIB = 1 << 30
DIMS = (3, 8, 8)
ROW = math.prod(DIMS)
LENGTH, CACHED = 100, 60
LIMIT = (LENGTH + CACHED * ROW) / GIB
DTYPES = [
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    )
    if hasattr(torch, name)
]


def image(seed, dims=DIMS):
    return torch.randint(0, 255, dims, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def cache():
    return SharedCache(LIMIT, LENGTH, DIMS)


# As in stocaching's tests


def test_the_arrays_have_the_shapes_and_dtypes_of_slots_and_states(cache):
    assert len(cache) == CACHED
    assert cache.array.shape == cache.underlying_array.shape == (CACHED, *DIMS)
    assert cache.aux_array.shape == (LENGTH,)
    assert cache.array.dtype == cache.aux_array.dtype == torch.uint8
    assert cache.aux_array.tolist() == [0] * CACHED + [2] * (LENGTH - CACHED)
    assert not cache.array.any()


def test_a_slot_is_set_once_unless_it_may_be_overwritten(cache):
    cache.set_slot(7, image(0), allow_oob_idx=False, allow_overwrite=False)
    assert torch.equal(cache[7], image(0)) and cache.aux_array[7] == 1
    cache.set_slot(7, image(1), allow_overwrite=True)
    assert torch.equal(cache[7], image(1)) and cache.aux_array[7] == 1
    with pytest.raises(RuntimeError, match="slot 7 of the SharedCache is set, and allow_overwrite=False"):
        cache.set_slot(7, image(2), allow_overwrite=False)
    assert torch.equal(cache.get_slot(7), image(1))
    assert cache.aux_array.sum() == 1 + 2 * (LENGTH - CACHED)


def test_a_slot_that_is_not_set_is_none_or_an_error(cache):
    with pytest.raises(RuntimeError, match="slot 7 of the SharedCache is empty, and allow_empty_slot=False"):
        cache.get_slot(7, allow_oob_idx=False, allow_empty_slot=False)
    assert cache.get_slot(7, allow_oob_idx=False, allow_empty_slot=True) is None
    cache.set_slot(7, image(0))
    assert torch.equal(cache.get_slot(7, False, False), image(0))


@pytest.mark.parametrize("index", [CACHED, LENGTH - 1])
def test_a_sample_without_a_slot_is_none_or_an_error(cache, index):
    message = f"index {index} is out of bounds for a SharedCache of length {CACHED}"
    with pytest.raises(IndexError, match=message):
        cache.set_slot(index, image(0), allow_oob_idx=False)
    with pytest.raises(IndexError, match=message):
        cache.get_slot(index, allow_oob_idx=False)
    cache.set_slot(index, image(0))
    assert cache.get_slot(index) is None
    assert cache.get_slot(index, allow_empty_slot=False) is None
    assert cache.aux_array[index] == 2


@pytest.mark.parametrize("index", [LENGTH, LENGTH + 1, -1, -LENGTH])
def test_a_number_that_the_dataset_does_not_have_is_always_an_error(cache, index):
    for oob in (True, False):
        with pytest.raises(IndexError, match=f"index {index} is out of bounds for a dataset of length 100"):
            cache.set_slot(index, image(0), allow_oob_idx=oob)
        with pytest.raises(IndexError, match=f"index {index} is out of bounds"):
            cache.get_slot(index, allow_oob_idx=oob)
    assert not cache.array.any()


def test_clear_empties_all_slots(cache):
    for index in range(LENGTH):
        cache.set_slot(index, image(index))
    cache.clear()
    assert cache.get_slot(7) is None and not cache.array.any()
    assert cache.aux_array.tolist() == [0] * CACHED + [2] * (LENGTH - CACHED)
    cache.set_slot(7, image(1), allow_overwrite=False)
    assert torch.equal(cache[7], image(1))


# Sizes and dtypes


@pytest.mark.parametrize("gib", [LIMIT, 0.0001, 0.000013, 0])
def test_as_many_samples_have_a_slot_as_fit_in_the_limit(gib):
    cache = SharedCache(gib, LENGTH, DIMS)
    expected = max(0, min(LENGTH, int((gib * GIB - LENGTH) // ROW)))
    assert len(cache) == expected
    assert cache.array.nbytes + cache.aux_array.nbytes <= max(LENGTH, gib * GIB)


@pytest.mark.parametrize(
    ("gib", "length", "dims", "cached"),
    [
        (1, 0, (3,), 0),
        (1, 5, (), 5),
        (1, 5, (0, 3), 5),
        (0, 5, (0,), 5),
        (math.inf, 5, (3,), 5),
        (1e-9, 50, (3,), 0),
        (1, np.int64(5), torch.Size([3]), 5),
        (1, 5, [3], 5),
    ],
)
def test_sizes_at_the_edge(gib, length, dims, cached):
    cache = SharedCache(gib, length, dims, torch.float32)
    assert len(cache) == cached and cache.array.shape == (cached, *dims)
    for index in range(length):
        assert cache.get_slot(index) is None
        cache.set_slot(index, torch.full(tuple(dims), index + 0.5))
        found = cache.get_slot(index)
        if cached:
            assert torch.equal(found, torch.full(tuple(dims), index + 0.5))
        else:
            assert found is None


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")  # torch says that of any tensor of it
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype):
    cache = SharedCache(1, 4, (2, 3), dtype)
    data = (torch.arange(12 * dtype.itemsize) % (2 if dtype == torch.bool else 251)).to(torch.uint8)
    values = data.view(dtype).view(2, 2, 3)
    for index, value in enumerate(values):
        cache.set_slot(2 * index, value)
    cache[1] = values[1]
    for index, value in enumerate(values):
        for found in (cache.get_slot(2 * index), cache.get_slot(2 * index, copy=True), cache[2 * index]):
            assert found.dtype == dtype and found.shape == (2, 3)
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8))
    assert torch.equal(cache.array[1].view(torch.uint8), values[1].view(torch.uint8))
    cache.clear()
    assert not cache.array.view(torch.uint8).any()
    scalar = SharedCache(1, 4, (), dtype)
    scalar.set_slot(3, values[1, 1, 1])
    assert torch.equal(scalar.get_slot(3).view(-1).view(torch.uint8), values[1, 1, 1:2].view(torch.uint8))


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_dtypes_by_their_bits(bits):
    assert SharedCache(1, 4, (2,), f"{bits}-bit").array.dtype == getattr(torch, f"uint{bits}")


@pytest.mark.parametrize(
    "dtype", ["7-bit", "uint8", torch.quint8, getattr(torch, "int3", "3-bit"), None, np.uint8]
)
def test_a_dtype_that_slots_cannot_have_is_an_error(dtype):
    with pytest.raises(OptionError, match=r"dtype=.*: expected a dtype of plain tensors, or one of 8-bit, "):
        SharedCache(1, 4, (2,), dtype)


@pytest.mark.parametrize(
    "arguments", [(-1, 4, (2,)), (math.nan, 4, (2,)), (1, -4, (2,)), (1, 4, (2, -2))], ids=str
)
def test_sizes_below_zero_are_an_error(arguments):
    with pytest.raises(OptionError, match="expected nothing below 0"):
        SharedCache(*arguments)


def test_shm_size_is_in_whole_gib():
    status = os.statvfs("/dev/shm")
    assert get_shm_size() == int(status.f_bsize * status.f_blocks / GIB)


# Values


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(8, 8, dtype=torch.uint8),
        torch.zeros(1, 8, 8, dtype=torch.uint8),
        torch.zeros(3, 8, 9, dtype=torch.uint8),
        torch.zeros((), dtype=torch.uint8),
        torch.zeros(DIMS),
        torch.zeros(DIMS, dtype=torch.int8),
    ],
    ids=lambda value: f"{tuple(value.shape)} {value.dtype}",
)
def test_a_value_of_another_shape_or_dtype_is_an_error_that_names_both(cache, value):
    cache.set_slot(7, image(0))
    message = f"a value of shape {tuple(value.shape)} and {value.dtype} for slots of shape {DIMS} and "
    for index in (7, 8):
        with pytest.raises(RuntimeError) as caught:
            cache.set_slot(index, value, allow_overwrite=True)
        assert str(caught.value).startswith(f"{message}torch.uint8: ")
        with pytest.raises(RuntimeError):
            cache[index] = value
    assert torch.equal(cache.get_slot(7), image(0)) and cache.get_slot(8) is None


def test_a_value_that_is_no_tensor_is_an_error(cache):
    for value in (0, image(0).numpy(), image(0).tolist()):
        with pytest.raises(TypeError, match=r"a slot holds a tensor, not \w+: use torch.as_tensor"):
            cache.set_slot(7, value)
    assert cache.get_slot(7) is None


def test_values_may_be_strided_require_grad_or_come_from_inference_mode():
    cache = SharedCache(1, 4, (3, 2))
    values = torch.arange(6, dtype=torch.uint8).view(2, 3).T
    cache.set_slot(0, values)
    assert torch.equal(cache.get_slot(0), values)
    cache = SharedCache(1, 4, (3, 2), torch.float32)
    leaf = torch.ones(3, 2, requires_grad=True)
    cache.set_slot(0, leaf * 2)
    cache[2] = leaf * 3
    with torch.inference_mode():
        cache.set_slot(1, torch.ones(3, 2) * 4)
    assert cache.array.tolist() == [[[n] * 2] * 3 for n in (2, 4, 3, 0)]
    assert not cache.get_slot(0).requires_grad and not cache.array.requires_grad
    cache.get_slot(1).mul_(2).requires_grad_().sum().backward()  # it was not made in inference mode


def test_numbers_of_samples_are_any_ints(cache):
    for index, kind in enumerate((int, np.int64, np.uint8, torch.tensor)):
        cache.set_slot(kind(index), image(index))
        assert torch.equal(cache.get_slot(kind(index)), image(index))
        assert torch.equal(cache[kind(index)], image(index))
    with pytest.raises(TypeError):
        cache.get_slot(1.0)


# Views


def test_a_slot_is_a_view_unless_a_copy_is_asked_for(cache):
    cache.set_slot(7, image(0))
    view, own = cache.get_slot(7), cache.get_slot(7, copy=True)
    assert view.data_ptr() == cache.array[7].data_ptr() != own.data_ptr()
    view.add_(1)
    assert torch.equal(cache.get_slot(7), image(0) + 1) and torch.equal(own, image(0))


def test_items_are_those_of_the_array_and_states_stay(cache):
    cache[-1] = image(0)
    assert torch.equal(cache[CACHED - 1], image(0)) and torch.equal(cache.array[-1], image(0))
    cache[:2] = 7
    assert cache[:3].flatten(1).max(1).values.tolist() == [7, 7, 0]
    assert torch.equal(cache[torch.tensor([0, CACHED - 1])][1], image(0))
    assert cache.get_slot(0) is None and not cache.aux_array[:CACHED].any()
    cache.aux_array[0] = 1  # as some do
    assert (cache.get_slot(0) == 7).all()
    with pytest.raises(IndexError):
        cache[CACHED]
    assert len(list(cache)) == CACHED


def test_sending_a_view_to_another_process_does_not_take_the_cache_along():
    # To send a tensor, torch moves its storage to memory that it shares; the cache must not go with it.
    cache = SharedCache(1, 4, (2,))
    other = pickle.loads(pickle.dumps(cache))
    for tensor in (cache[0], cache[:], cache.array, cache.aux_array):
        tensor.share_memory_()
    cache.set_slot(1, torch.tensor([5, 6], dtype=torch.uint8))
    sent = cache.get_slot(1).share_memory_()
    assert sent.untyped_storage().nbytes() == 2
    cache.set_slot(1, torch.tensor([7, 8], dtype=torch.uint8), allow_overwrite=True)
    assert other.get_slot(1).tolist() == cache.get_slot(1).tolist() == [7, 8]


def test_a_copy_or_a_pickle_is_the_same_memory_and_holds_no_data():
    cache = SharedCache(1, 1000, (1000,))
    data = pickle.dumps(cache)
    assert len(data) < 500 and b"torchcache2.datasets" not in data
    for other in (pickle.loads(data), copy.deepcopy(cache), copy.copy(cache)):
        cache.clear()
        other.set_slot(3, image(3, (1000,)))
        assert torch.equal(cache.get_slot(3), image(3, (1000,)))
        assert len(other) == 1000 and other.aux_array.sum() == 1


def test_a_pickle_of_a_cache_that_is_gone_is_an_error_that_says_what_to_do():
    data = pickle.dumps(SharedCache(1, 4, (2,)))
    with pytest.raises(RuntimeError, match=f"cannot be found in /proc/{os.getpid()}: keep it in the process"):
        pickle.loads(data)
    ended = "import pickle; from torchcache2 import SharedCache; print(pickle.dumps(SharedCache(1, 4, (2,))))"
    data = eval(warm.run(ended).out)
    with pytest.raises(RuntimeError, match=r"cannot be found in /proc/\d+:"):
        pickle.loads(data)


# Memory


def test_memory_is_taken_when_the_cache_is_made_and_given_back_after_it():
    cache = SharedCache(1, 100, (100_000,))
    descriptor = cache._region.descriptor
    assert os.fstat(descriptor).st_blocks * 512 >= 10_000_100
    cache.set_slot(0, torch.ones(100_000, dtype=torch.uint8))
    del cache
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_more_than_the_free_memory_is_an_error_that_says_what_to_do():
    with pytest.raises(MemoryError) as caught:
        SharedCache(10**6, 10**6, (10**9,))
    message = str(caught.value)
    assert message.startswith("a SharedCache of 1,000,000,001,000,000 bytes does not fit in memory, ")
    assert message.endswith("use a smaller size_limit_gib, which caches fewer samples, or free memory")
    available = int(message.split(" of which ")[1].split()[0].replace(",", ""))
    assert 1 << 20 < available < 1 << 45


LIMITED = """
import resource, sys
from torchcache2 import SharedCache

used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(getattr(resource, sys.argv[1]), (used * (sys.argv[1] == "RLIMIT_AS") + 10**8,) * 2)
small = SharedCache(0.01, 10**6, (1000,))
try:
    SharedCache(0.2, 10**6, (1000,))
except MemoryError as error:
    print(error)
small.clear()
"""


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_memory_that_a_limit_of_the_process_denies_is_an_error(limit):
    out = warm.run(LIMITED, limit).out
    assert out.startswith("a SharedCache of 214,748,") and "use a smaller" in out
    assert ("[Errno " in out) == (limit == "RLIMIT_FSIZE")  # the free address space is known beforehand


def test_systems_that_have_no_files_in_memory_are_told(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(NotImplementedError, match="on Linux only; elsewhere use torch"):
        SharedCache(1, 4, (2,))


# Processes

LOADING = """
import os, sys
import torch
from torch.utils.data import DataLoader, Dataset
from torchcache2 import SharedCache

COUNT, DIMS = 24, (3, 8, 8)


class Images(Dataset):
    '''The last third has no slots. A sample's label tells who decoded it, or 0 if it was found.'''

    def __init__(self):
        self.cache = SharedCache((COUNT + COUNT * 2 // 3 * 192) / 2**30, COUNT, DIMS)

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        found = self.cache.get_slot(index)
        if found is not None:
            return found, 0
        image = expected(index)
        self.cache.set_slot(index, image)
        return image, os.getpid()


def expected(index):
    return torch.full(DIMS, index * 10, dtype=torch.uint8)


def samples(loader):
    '''Who decoded each of the samples, which are checked.'''
    who = []
    for images, pids in loader:
        for image, pid in zip(images, pids):
            assert torch.equal(image, expected(len(who)))
            who.append(int(pid))
    return who


def together(batch):
    '''Without stacking: views are sent as they are.'''
    return tuple(zip(*batch))


if __name__ == "__main__":
    method, workers = sys.argv[1], int(sys.argv[2])
    data = Images()
    data[0], data[1]  # slots that this process has set are found by workers
    loader = DataLoader(
        data,
        batch_size=4,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=True,
        collate_fn=together,
    )
    first, second = samples(loader), samples(loader)
    assert first[:2] == [0, 0] and 0 not in first[2:] and os.getpid() not in first, first
    assert len(set(first)) == 1 + workers
    assert second[:16] == [0] * 16 and 0 not in second[16:], second
    assert data.cache.aux_array.tolist() == [1] * 16 + [2] * 8
    assert all(torch.equal(data[index][0], expected(index)) for index in range(COUNT))
    data.cache.clear()  # the same workers see that
    assert 0 not in samples(loader)
    print(*sorted(set(first) - {0}))
"""


@pytest.mark.parametrize(("method", "workers"), [("fork", 2), ("forkserver", 1), *[("spawn", 1)] * SOAK])
def test_workers_of_a_loader_share_the_slots(method, workers):
    process = warm.run(LOADING, method, workers, forks=True)
    assert len(process.words) == workers and process.err == ""


KILLED = """
import os, signal, sys
import torch
from torchcache2 import SharedCache


class Deadly(torch.Tensor):
    '''Half of it is copied, and then the process is killed.'''

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.copy_:
            args[0][:500].fill_(9)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__torch_function__(function, types, args, kwargs or {})


cache = SharedCache(0.001, 10, (1000,))
cache.set_slot(1, torch.ones(1000, dtype=torch.uint8))
for index in (0, 1):  # an empty slot, and one that is overwritten
    child = os.fork()
    if child == 0:
        cache.set_slot(index, torch.zeros(1000, dtype=torch.uint8).as_subclass(Deadly), allow_overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert cache[index].tolist() == [9] * 500 + [index] * 500  # half of the row was written
    assert cache.get_slot(index) is None
    value = torch.full((1000,), 7, dtype=torch.uint8)
    cache.set_slot(index, value)
    assert torch.equal(cache.get_slot(index), value)
print("end")
"""


def test_a_writer_that_is_killed_leaves_an_empty_slot_which_can_be_set_again():
    assert warm.run(KILLED).words == ["end"]


EVERYWHERE = """
import os, sys, time
import torch
from torchcache2 import SharedCache

cache = SharedCache(0.5, 10**6, (500,))
cache.set_slot(0, torch.ones(500, dtype=torch.uint8))
if os.fork() == 0:
    assert cache.get_slot(0).all()
    print("child", os.getpid(), flush=True)
time.sleep(100)
"""


def test_kill_of_all_processes_leaves_no_memory_and_no_file_behind(tmp_path):
    process = warm.start(EVERYWHERE, env={"TMPDIR": str(tmp_path)}).until("child")
    child = int(process.until("\n").words[1])
    held = files_in_memory([process.pid])
    assert sum(held.values()) > 250_000_000
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert held.keys() <= files_in_memory().keys()  # the child has it still
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not held.keys() & files_in_memory().keys())
    assert list(tmp_path.iterdir()) == []
