"""Keys of items on an accelerator are those of the same items on the CPU."""

import os

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.outputs import frozen
from torchcache2 import torchcache
from torchcache2.identity.items import item_keys

NAMESPACE = bytes(range(16))
SOAK = bool(os.environ.get("SOAK"))
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]
LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "expanded items": lambda x: x[:1].expand(7, -1, -1, -1),
    "expanded inside": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "every other element": lambda x: x[..., ::2],
    "every other item": lambda x: x[::2],
    "not aligned": lambda x: x.flatten(1)[:, 3:],
    "an offset": lambda x: x.view(-1)[5 : 5 + 600].view(3, 200),
}


def keys_of(*tensors, **options):
    leaves = [(f"x{number}", tensor) for number, tensor in enumerate(tensors)]
    return item_keys(NAMESPACE, b"", leaves, **options).data


def random_bytes(*shape, dtype=torch.uint8):
    """Of these bytes, as numbers of a dtype, on the CPU."""
    data = torch.randint(0, 2 if dtype == torch.bool else 256, shape, dtype=torch.uint8, device="cpu")
    return data.view(dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keys_are_those_of_the_cpu(dtype, layout, device):
    whole = random_bytes(6, 3, 7, 9 * 16, dtype=dtype)
    x, there = LAYOUTS[layout](whole), LAYOUTS[layout](whole.to(device))
    assert x.stride() == there.stride()
    assert np.array_equal(keys_of(there), keys_of(x))


def test_items_of_any_length_have_the_keys_of_the_cpu(device):
    sizes = [
        *range(0, 4201, 1 if SOAK else 13),
        *(n + d for n in range(1024, 70_000, 4096) for d in (-1, 0, 1)),
    ]
    for size in sizes:
        x = random_bytes(3, size)
        assert np.array_equal(keys_of(x.to(device)), keys_of(x)), size


def test_one_item_of_many_bytes_and_many_of_few(device):
    for shape in ((1, 50_000_000), (2, 10_000_001), (4096, 1024), (100_000, 16), (1, 1)):
        x = random_bytes(*shape)
        assert np.array_equal(keys_of(x.to(device)), keys_of(x)), shape


def test_several_tensors_and_samples_of_elements(device):
    images, masks, labels = (
        random_bytes(5, 3, 64, 64),
        random_bytes(5, 4096) < 9,
        random_bytes(5, 8).view(torch.int64),
    )
    there = [tensor.to(device) for tensor in (images, masks, labels)]
    assert np.array_equal(keys_of(*there), keys_of(images, masks, labels))
    assert np.array_equal(keys_of(there[0], masks, labels), keys_of(images, masks, labels))
    assert np.array_equal(
        keys_of(*there, subsample_count=100), keys_of(images, masks, labels, subsample_count=100)
    )


def test_near_duplicates_never_share_a_key(device):
    wanted, found, seen = 10_000_000 if SOAK else 100_000, 0, set()
    size = 241  # the shortest item that has no formula of its own
    while found < wanted:
        base = random_bytes(size)
        bits = torch.arange(8 * size, device="cpu")
        items = base.repeat(len(bits), 1)  # each differs from all others in one or two bits
        items[bits, bits // 8] ^= (1 << bits % 8).to(torch.uint8)
        keys = keys_of(items.to(device))
        assert np.array_equal(keys, keys_of(items)), size
        seen.update(key.tobytes() for key in keys)
        found += len(items)
        size = size + 13 if size < 3000 else 241 + size % 13
    assert len(seen) == found


def test_weights_have_the_same_digests(device):
    module = torchcache(
        frozen(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(40, 300)))
    ).cpu()
    namespace = module.cache_instance.module_hash
    assert module.to(device).cache_instance.module_hash == namespace
    assert module.to(memory_format=torch.channels_last).cache_instance.module_hash
    with torch.no_grad():
        module[2].weight[-1, -1] += 1
    edited = module.cache_instance.module_hash
    assert edited != namespace
    assert module.cpu().cache_instance.module_hash == edited
