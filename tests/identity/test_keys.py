"""Keys: equal for equal items, different for all others, the same forever."""

import json
import os
import pathlib
import threading

import numpy as np
import pytest
import torch

from tests.helpers import warm
from torchcache2.core.keys import Keys
from torchcache2.files.contents import FileDigests
from torchcache2.identity import items
from torchcache2.identity.arguments import Signature
from torchcache2.identity.items import item_keys

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "keys.json"
NAMESPACE = bytes(range(16))
SOAK = bool(os.environ.get("SOAK"))


def keys_of(function, *args, subsample_count=None, shared=(), **kwargs):
    call = Signature(function, shared=shared, content=FileDigests().of).bind(args, kwargs)
    return item_keys(NAMESPACE, call.context, call.leaves, subsample_count=subsample_count)


def hexes(keys):
    return [row.tobytes().hex() for row in keys.data]


def one(x, scale=2.0, *, mode="a", table=None):
    return x


def several(first, second=None, *rest, **named):
    return first


def ramp(*shape, dtype=torch.float32):
    return torch.arange(np.prod(shape), dtype=torch.float64).reshape(shape).to(dtype) / 7


CASES = {
    "float32": lambda: keys_of(one, ramp(3, 4)),
    "float32 row": lambda: keys_of(one, ramp(2)),
    "image": lambda: keys_of(one, ramp(2, 3, 8, 8)),
    "bfloat16": lambda: keys_of(one, ramp(2, 5, dtype=torch.bfloat16)),
    "float16": lambda: keys_of(one, ramp(2, 5, dtype=torch.float16)),
    "float64": lambda: keys_of(one, ramp(2, 5, dtype=torch.float64)),
    "complex64": lambda: keys_of(one, torch.complex(ramp(2, 3), ramp(2, 3))),
    "int64": lambda: keys_of(one, torch.arange(6).reshape(2, 3)),
    "uint8": lambda: keys_of(one, torch.arange(6, dtype=torch.uint8).reshape(2, 3)),
    "bool": lambda: keys_of(one, torch.tensor([[True, False], [False, False]])),
    "no elements": lambda: keys_of(one, torch.empty(2, 0)),
    "float argument": lambda: keys_of(one, ramp(2, 3), 3.5),
    "int argument": lambda: keys_of(one, ramp(2, 3), 3),
    "text argument": lambda: keys_of(one, ramp(2, 3), mode="é"),
    "nested argument": lambda: keys_of(one, ramp(2, 3), table={"a": [1, (2.5, None)], "b": b"x"}),
    "dtype argument": lambda: keys_of(one, ramp(2, 3), table=torch.float16),
    "shared table": lambda: keys_of(one, ramp(2, 3), table=ramp(4), shared=("table",)),
    "two tensors": lambda: keys_of(several, ramp(2, 3), torch.arange(2)),
    "nested tensors": lambda: keys_of(several, {"a": ramp(2, 3), "b": [torch.arange(2), 7]}),
    "keywords": lambda: keys_of(several, ramp(2, 3), mask=torch.arange(2), flag=True),
    "rest": lambda: keys_of(several, ramp(2, 3), None, torch.arange(2)),
    "subsample": lambda: keys_of(one, ramp(2, 5000), subsample_count=1000),
}


def golden():
    return {name: hexes(case()) for name, case in CASES.items()}


@pytest.mark.cpu_only
def test_keys_are_those_of_the_golden_file():
    # Rewrite with: python -m tests.identity.test_keys > tests/golden/keys.json, and only for a new format.
    assert golden() == json.loads(GOLDEN.read_text())


@pytest.mark.cpu_only
def test_keys_are_the_same_in_another_process():
    code = "import json; from tests.identity.test_keys import golden; print(json.dumps(golden()))"
    assert json.loads(warm.run(code, seed="1").out) == golden()


def test_keys_do_not_depend_on_batch_or_order():
    x = torch.randn(10, 3, 4)
    whole = keys_of(one, x).data
    order = torch.randperm(10)
    assert (keys_of(one, x[order]).data == whole[order.tolist()]).all()
    assert (np.concatenate([keys_of(one, part).data for part in x.split(3)]) == whole).all()


@pytest.mark.parametrize(
    "restride",
    [
        lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
        lambda x: torch.stack([x, x], dim=-1)[..., 0],
        lambda x: torch.cat([x, x])[: len(x)],
        lambda x: x.flip(0).flip(0),
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: x.conj().conj(),
        lambda x: -torch._neg_view(x),
    ],
)
def test_keys_do_not_depend_on_strides(restride):
    x = torch.randn(4, 3, 6, 5)
    assert (keys_of(one, restride(x)).data == keys_of(one, x).data).all()


@pytest.mark.parametrize("size", [8, 1000])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float16])
def test_every_other_element_has_the_key_of_its_copy(size, dtype):
    x = torch.randint(0, 2, (4, size)).to(dtype)
    for view in (x[:, ::2], x[::2], x[:, :1], x.t()):
        assert (
            keys_of(one, view).data == keys_of(one, view.clone(memory_format=torch.contiguous_format)).data
        ).all()


@pytest.mark.parametrize("how", ["started", "late", "refused"])
def test_large_items_have_the_same_keys_however_many_threads_hash(monkeypatch, how):
    tensor = torch.arange(64 * 40_000, dtype=torch.int32).view(64, 40_000)
    expected = [hexes(keys_of(one, tensor[i : i + 1]))[0] for i in range(64)]
    started = []

    def start(function, arguments):
        started.append(function)
        if how == "refused":
            raise RuntimeError("can't start new thread")
        if how == "started":
            threading.Thread(target=function, args=arguments).start()

    monkeypatch.setattr(items._thread, "start_new_thread", start)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert hexes(keys_of(one, tensor)) == expected
    assert len(started) == (1 if how == "refused" else 3)


def test_channels_last_is_another_item():
    # A forward may tell: its output comes in that format, and `view` raises for one of the two.
    x = torch.randn(4, 3, 6, 5)
    last = x.contiguous(memory_format=torch.channels_last)
    assert (keys_of(one, last).data != keys_of(one, x).data).any(axis=1).all()
    assert (keys_of(one, last[1:2]).data == keys_of(one, last).data[1:2]).all()
    assert (keys_of(one, last[:, :, ::2]).data != keys_of(one, x[:, :, ::2]).data).any(axis=1).all()
    assert (keys_of(one, x[:, :1]).data == keys_of(one, x[:, :1].clone()).data).all()
    volume = torch.randn(2, 3, 4, 4, 4)
    last = volume.contiguous(memory_format=torch.channels_last_3d)
    assert not set(hexes(keys_of(one, volume))) & set(hexes(keys_of(one, last)))


def test_lazily_conjugated_and_negated_values_count_as_what_they_are():
    z = torch.randn(4, 3, dtype=torch.complex64)
    assert (keys_of(one, z.conj()).data == keys_of(one, z.conj().resolve_conj()).data).all()
    assert (keys_of(one, z.conj()).data != keys_of(one, z).data).any(axis=1).all()
    assert (keys_of(one, z.conj().imag).data == keys_of(one, -z.imag).data).all()


def test_duplicates_are_found_in_order_of_appearance():
    first, inverse = keys_of(one, torch.tensor([5.0, 3.0, 5.0, 4.0, 3.0])).first_positions()
    assert first.tolist() == [0, 1, 3]
    assert inverse.tolist() == [0, 1, 0, 2, 1]
    assert keys_of(one, torch.tensor([5.0, 3.0])).first_positions() is None


AGREE = [
    (lambda x: keys_of(one, x, 2.0), lambda x: keys_of(one, x)),
    (lambda x: keys_of(one, x, 3), lambda x: keys_of(one, x, scale=3)),
    (lambda x: keys_of(one, x=x, mode="b", scale=3), lambda x: keys_of(one, x, 3, mode="b")),
    (lambda x: keys_of(several, x, None, a=x), lambda x: keys_of(several, first=x, a=x)),
]


@pytest.mark.parametrize("left, right", AGREE)
def test_one_call_written_in_two_ways_has_one_key(left, right):
    x = torch.randn(4, 3)
    assert hexes(left(x)) == hexes(right(x))


def three(x, a=0, b=0):
    return x


class Exact(float):
    pass


DIFFER = {
    "swapped values": lambda x: (keys_of(three, x, 3, 5), keys_of(three, x, 5, 3)),
    "swapped names": lambda x: (keys_of(three, x, a=3), keys_of(three, x, b=3)),
    "swapped tensors": lambda x: (keys_of(several, x, x + 1), keys_of(several, x + 1, x)),
    "moved tensor": lambda x: (keys_of(several, x, a=x), keys_of(several, x, b=x)),
    "int, float": lambda x: (keys_of(three, x, 1), keys_of(three, x, 1.0)),
    "int, bool": lambda x: (keys_of(three, x, 1), keys_of(three, x, True)),
    "int, text": lambda x: (keys_of(three, x, 1), keys_of(three, x, "1")),
    "text, bytes": lambda x: (keys_of(three, x, "a"), keys_of(three, x, b"a")),
    "zero, minus zero": lambda x: (keys_of(three, x, 0.0), keys_of(three, x, -0.0)),
    "list, tuple": lambda x: (keys_of(three, x, [1]), keys_of(three, x, (1,))),
    "nested otherwise": lambda x: (keys_of(three, x, [[1], 2]), keys_of(three, x, [[1, 2]])),
    "texts run together": lambda x: (keys_of(three, x, ["ab", "c"]), keys_of(three, x, ["a", "bc"])),
    "none, nothing": lambda x: (keys_of(three, x, None), keys_of(three, x)),
    "subclass of float": lambda x: (keys_of(three, x, 1.5), keys_of(three, x, Exact(1.5))),
    "shared, batched": lambda x: (keys_of(several, x, x), keys_of(several, x, x, shared=("second",))),
    "subsampled": lambda x: (keys_of(one, x), keys_of(one, x, subsample_count=2)),
    "dtype of the same bits": lambda x: (keys_of(one, x), keys_of(one, x.view(torch.int32))),
    "shape of the same bytes": lambda x: (keys_of(one, x), keys_of(one, x.reshape(len(x), -1))),
    "one more dimension": lambda x: (keys_of(one, x), keys_of(one, x[:, None])),
    "keyword order": lambda x: (keys_of(several, x, a=1, b=2), keys_of(several, x, b=2, a=1)),
}


@pytest.mark.parametrize("name", DIFFER)
def test_different_calls_have_different_keys(name):
    left, right = DIFFER[name](torch.randn(4, 3, 2))
    assert not set(hexes(left)) & set(hexes(right))


def test_autocast_and_default_dtype_are_part_of_the_key():
    x = torch.randn(4, 3)
    keys = [hexes(keys_of(one, x))]
    with torch.autocast("cpu", torch.bfloat16):
        keys.append(hexes(keys_of(one, x)))
    with torch.autocast("cpu", torch.float16):
        keys.append(hexes(keys_of(one, x)))
    torch.set_autocast_enabled("xpu", True)  # what a function of texts calls may be on another device
    try:
        keys.append(hexes(keys_of(one, x)))
    finally:
        torch.set_autocast_enabled("xpu", False)
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(hexes(keys_of(one, x)))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len({key for batch in keys for key in batch}) == 20
    assert hexes(keys_of(one, x)) == keys[0]


def near_duplicates(size, generator):
    """Items that differ from each other in little, as one tensor of shape (n, size)."""
    base = torch.randn(size, generator=generator)
    items = [base, -base, base * 2, base.flip(0), base.nextafter(torch.tensor(torch.inf))]
    positions = torch.randint(size, (4,), generator=generator)
    for position in positions.tolist():
        for value in (0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, base[position] + 1):
            items.append(base.clone())
            items[-1][position] = value
        items.append(base.roll(position + 1))
        items.append(base.clone())
        other = (position + 1) % size
        items[-1][[position, other]] = base[[other, position]]
        for bit in range(32):
            items.append(base.clone())
            items[-1].view(torch.int32)[position] ^= -(2**31) if bit == 31 else 1 << bit
    return torch.stack(items)


@pytest.mark.slow
@pytest.mark.cpu_only
def test_near_duplicates_never_share_a_key():
    wanted = 10_000_000 if SOAK else 100_000
    generator = torch.Generator().manual_seed(0)
    low = set()
    bits = set()
    for size in range(1, 100_000):
        items = near_duplicates(2 + size % 997, generator)
        # The same bytes as other dtypes and shapes are other items.
        views = [items, items[:, None], items.view(torch.int32), items.view(torch.uint8)]
        if size % 2 == 0 and items.shape[1] % 2 == 0:
            views.append(items.unflatten(1, (-1, 2)))
            views.append(items.view(torch.int64))
        for view in views:
            kind = hash((view.dtype, view.shape[1:]))
            for key, item in zip(keys_of(one, view).data, items.numpy(), strict=True):
                low.add(key[:12].tobytes())  # 96 bits of the key already tell them apart
                bits.add((kind, hash(item.tobytes())))
        if len(bits) >= wanted:
            break
    assert len(bits) >= wanted
    assert len(low) == len(bits)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("size, count", [(1000, 300), (5000, 1000), (150_528, 10_000), (3, 2), (1001, 999)])
def test_subsample_reads_so_many_elements_and_the_ends(size, count):
    (before,) = hexes(keys_of(one, torch.zeros(1, size), subsample_count=count))

    x = torch.zeros(100, size)

    def seen(positions):
        """Of each position, whether a change there is seen: each in an item of its own."""
        some = x[: len(positions)]
        some[torch.arange(len(positions)), positions] = 1
        keys = hexes(keys_of(one, some, subsample_count=count))
        some.zero_()
        return [key != before for key in keys]

    assert all(seen(torch.tensor([0, size - 1])))
    positions = torch.arange(0, size, 1 if size <= 5000 else 41)
    share = sum(sum(seen(some)) for some in positions.split(100)) / len(positions)
    assert share == pytest.approx(count / size, rel=1e-9 if size <= 5000 else 0.1)


def test_keys_check_what_they_are_made_of():
    with pytest.raises(ValueError, match="expected 16"):
        Keys(b"short", np.zeros((1, 16), np.uint8))
    with pytest.raises(ValueError, match="expected uint8"):
        Keys(NAMESPACE, np.zeros((1, 8), np.uint8))


if __name__ == "__main__":
    print(json.dumps(golden(), indent=1))
