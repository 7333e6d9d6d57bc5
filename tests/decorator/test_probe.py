"""The probe: an item's output must not depend on the rest of its batch, and if it does, that is found out."""

import functools
import logging
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.helpers.outputs import bypasses, warnings_in
from torchcache2 import NotCachedError, torchcache

SIZES = logging.getLogger("tests.sizes")  # a list that a forward appends to would be state
X = torch.arange(24.0).reshape(6, 4).sin()
Y = torch.arange(24.0).reshape(6, 4).cos()


@pytest.fixture(autouse=True)
def checks_are_free(monkeypatch):
    """No time passes, so that the price of checks never puts one off."""
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)


@pytest.fixture
def sizes():
    """The sizes of the batches that were computed, as forwards tell them to the logger."""
    handler, found = logging.Handler(), []
    handler.emit = lambda record: found.append(record.msg)
    SIZES.addHandler(handler)
    SIZES.setLevel(logging.INFO)
    yield found
    SIZES.removeHandler(handler)


def counted(forward=lambda x: x * 2, **options):
    """A cached function that tells the sizes of what it computes."""

    @functools.wraps(forward)
    def counting(x, *args, **kwargs):
        SIZES.info(len(x))
        return forward(x, *args, **kwargs)

    return torchcache(**options)(counting)


def attention(x, mask):
    return torch.softmax(x @ x.transpose(1, 2) + mask, -1) @ x


SQUARE = torch.triu(torch.full((6, 6), -1e9), 1)
MIXING = {  # layers and functions along the batch: `tests/torch/test_independence.py` has more
    "a @ b.T": (lambda a, b: a @ b.T, [X, Y]),
    "square mask": (attention, [torch.randn(6, 6, 4), SQUARE]),
    "mean": (lambda x: x - x.mean(0), [X]),
    "first": (lambda x: x - x[:1], [X]),
    "no batch of one": (lambda x: x.squeeze() * 2, [X]),  # of one, the batch is gone
    "longest": (lambda x: torch.cat([x, x], 1)[:, : int(x.abs().sum() * 7) % 3 + len(x)], [X]),
}


@pytest.mark.parametrize("name", MIXING)
def test_items_that_depend_on_their_batch_are_never_cached(name, log):
    plain, args = MIXING[name]
    cached = torchcache(lambda *args: plain(*args))
    with torch.no_grad():
        for order in (range(6), [5, 1, 0], [2, 2, 3], range(5, -1, -1)):
            if name == "square mask" and len(order) < 6:
                continue
            some = [arg[torch.tensor(list(order))] for arg in args]
            assert torch.equal(cached(*some), plain(*some))
    stats = cached.cache_instance.stats()
    assert stats.hits == 0 and stats.memory_rows == 0
    assert stats.bypasses.keys() == {"batch"}
    (message,) = warnings_in(log)
    for part in ("not cached (batch)", "output", "batch_first=True", "decorate what runs before"):
        assert part in message


def test_a_first_batch_of_two_is_checked_and_strict_raises():
    cached = torchcache(lambda x: x - x.mean(0))
    assert torch.equal(cached(X[:2]), X[:2] - X[:2].mean(0))
    assert bypasses(cached) == {"batch": 2}
    with pytest.raises(NotCachedError, match=r"item \d differs by"):
        torchcache(strict=True)(lambda x: x - x.mean(0))(X)


def test_without_the_probe_nothing_is_checked(sizes):
    mixing = counted(lambda x: x - x.mean(0), probe=False)
    for batch in (X, X, X.flip(0), X[:3], X[[2, 4]]):
        mixing(batch)
    assert sizes == [6]


def test_numbers_that_never_end_are_not_probed_for_ever(sizes):
    step = counted(lambda x, number: x * number)
    for number in range(50):
        step(torch.randn(4, 2), number)
    assert len(sizes) == 50 + 8 * 2 + 6 * 2  # the first eight; 1st, 2nd, 4th, 8th … of the others


def test_texts_that_never_end_are_not_probed_for_ever(sizes):
    mixing, keyed = counted(lambda x, text: x - x.mean(0)), counted(lambda x, names: x * 2)
    for number in range(30):
        mixing(torch.randn(4, 2), str(number))
    assert len(sizes) == 30 + 8 * 3
    del sizes[:]
    for number in range(30):
        keyed(torch.randn(4, 2), {str(number): 1})
    assert len(sizes) == 30 + 8 * 2 + 5 * 2


def test_what_is_not_kept_is_not_probed(sizes):
    loss = counted(lambda x, text: (x.sum(), x))
    for number in range(6):
        loss(torch.randn(4, 2), str(number))
    assert sizes == [4] * 6
    assert bypasses(loss) == {"output": 24}


@pytest.mark.parametrize("default", [0.0, 1.0])
def test_a_factor_that_turns_mixing_off(default):
    def forward(x, by):
        return x + (by - default) * x.mean(0)

    function = torchcache(forward)
    for by in (default, 0.5, 0.25):
        for batch in (X, X[:3]):
            assert torch.equal(function(batch, by), forward(batch, by))
    assert bypasses(function).keys() == {"batch"}


def mixes_by_nine(x, number):
    return x - x.mean(0) if number == 9 else x * 2


def test_a_value_that_mixes_among_many_that_do_not():
    function = torchcache(mixes_by_nine)
    for number in (9, *range(30, 50), 9):
        for batch in (X, X[:3]):
            assert torch.equal(function(batch, number), mixes_by_nine(batch, number))


def test_what_was_found_is_checked_too():
    centred = torchcache(lambda x: x - x.mean(0))
    for i in range(6):
        assert torch.equal(centred(X[i : i + 1]), X[i : i + 1] * 0)
    assert centred.cache_instance.stats().memory_rows == 6
    assert torch.equal(centred(X), X - X.mean(0))
    assert centred.cache_instance.stats().memory_rows == 0
    assert torch.equal(centred(X[:1]), X[:1] * 0)


def test_a_batch_of_equal_items_proves_little():
    centred = torchcache(lambda x: x - x.mean(0))
    centred(torch.zeros(8, 4))  # as people warm up
    centred(torch.ones(2, 4))
    for batch in (X[:2], X, X[2:], X[[0, 5]]):
        assert torch.equal(centred(batch), batch - batch.mean(0))


def test_no_part_has_the_largest_item_twice():
    for largest in range(8):
        x = torch.rand(8, 3)
        x[largest] += 5
        fresh = torchcache(lambda x: x / x.amax())
        fresh(x)
        assert bypasses(fresh) == {"batch": 8}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_influence_as_small_as_rounding(dtype):
    weight = torch.randn(16, 16).to(dtype)

    def forward(x):
        return x.to(dtype) @ weight + 0.05 * (x.to(dtype) @ weight).mean(0)

    mixing = torchcache(forward)
    alone = torchcache(lambda x: torch.nn.functional.gelu(x.to(dtype) @ weight))
    x = torch.randn(24, 16)
    for function in (mixing, alone):
        function(x)
    assert bypasses(mixing) == {"batch": 24} and not bypasses(alone)


@pytest.mark.cpu_only
def test_memory_that_the_forward_uses_again():
    memory = np.zeros((16, 4), np.float32)

    def forward(x):
        memory[: len(x)] = x.numpy() * 2
        return torch.from_numpy(memory[: len(x)])

    function = torchcache(forward)
    x = torch.randn(16, 4)
    assert torch.equal(function(x), x * 2) and torch.equal(function(x), x * 2)


@pytest.mark.cpu_only
def test_rows_in_memory_that_a_part_overwrites_are_compared_as_they_were():
    memory = np.zeros((100_000, 4), np.float32)  # so large that changes in the middle are not seen

    def forward(x):
        part = memory[50_000 - len(x) : 50_000]
        part[:] = x.numpy() * 2
        return torch.from_numpy(part)

    function = torchcache(forward)
    x = torch.randn(16, 4)
    assert torch.equal(function(x), x * 2) and torch.equal(function(x.flip(0)), x.flip(0) * 2)
    assert function.cache_instance.stats().hits == 16


def test_no_memory_for_a_part_says_nothing():
    class Full(nn.Module):
        full = True

        def forward(self, x):
            if len(x) == 1 and self.full:
                raise MemoryError
            return x - x.mean(0)

    module = torchcache(Full())
    module(X)
    assert not bypasses(module)
    module.full = False
    assert torch.equal(module(X), X - X.mean(0)) and bypasses(module) == {"batch": 6}


def test_the_callers_random_state_is_left_alone(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    @torchcache
    def few_are_random(x):
        return x + torch.rand(1) * 0 if len(x) < 4 else x * 1.0

    torch.manual_seed(5)
    few_are_random(X)
    assert torch.equal(torch.rand(3), torch.manual_seed(5) and torch.rand(3))


def test_what_sets_itself_up_for_a_size_is_put_back(monkeypatch):
    monkeypatch.setattr(threading, "active_count", lambda: 1)

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.size = None

        def forward(self, x):
            if self.size != len(x):
                self.size = len(x)
            return x * 2 + self.size * 0

    module = torchcache(Masked())
    for _ in range(3):
        module(X)
    assert module.size == 6
    assert module.cache_instance.stats().hits > 0


class Overflow(nn.Module):
    """Counts large items, and computes with that number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.count, self.large = 0, []

    def forward(self, x):
        if (x > 50).any():
            self.count += 1
            self.seen += 1
            self.large.append(1)
        if (x > 90).any() and len(x) < 4:
            torch.set_grad_enabled(True)
            raise ValueError("not these alone")
        return x * (1 + self.count + self.seen + len(self.large))


@torch.no_grad()
def test_a_part_that_changes_state_or_raises_does_so_once():
    plain, module = Overflow(), torchcache(Overflow(), probe=False)
    first = torch.arange(8.0).view(4, 2)
    for items in (first, first + 10, torch.tensor([60.0, 60, 61, 62])[:, None] + first[:1], first + 20):
        assert torch.equal(module(items), plain(items))
    items = torch.tensor([95.0, 95, 95, 2])[:, None] + first[:1]
    assert torch.equal(module(items), plain(items)) and not torch.is_grad_enabled()
    assert (module.count, module.large, module.seen) == (plain.count, plain.large, plain.seen)


def test_grad_mode_after_a_part_that_raises():
    @torchcache
    def even(x):
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(not before)
        if len(x) % 2:
            raise ValueError("an even number, please")
        torch.set_grad_enabled(before)
        return x * 2

    for mode in (False, True):
        with torch.set_grad_enabled(mode):
            even(torch.randn(6, 4 + mode))
            assert torch.is_grad_enabled() == mode


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(3).to(torch.float8_e4m3fn),
        torch.full((3,), float("nan")),
        torch.eye(3).to_sparse(),
        torch.zeros(()),
        torch.zeros(3, device="meta"),
        torch.zeros(3, dtype=torch.complex64).conj(),
    ],
)
def test_buffers_of_every_kind_are_compared(buffer):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", buffer)

        def forward(self, x):
            return x * 2

    module = torchcache(Doubled())
    version = buffer._version
    assert torch.equal(module(X), X * 2) and torch.equal(module(X[:3]), X[:3] * 2)
    assert buffer._version == version


def test_a_part_that_raises(log):
    @torchcache
    def even(x):
        if len(x) % 2:
            raise ValueError("an even number, please")
        return x * 2

    for batch in (X, X[:2], X):
        assert torch.equal(even(batch), batch * 2)
    assert bypasses(even) == {"batch": 14}
    assert "raises ValueError('an even number, please')" in warnings_in(log)[0]


@pytest.mark.cpu_only
def test_sequences_that_have_to_be_sorted():
    lstm = nn.LSTM(4, 3, batch_first=True).eval().requires_grad_(False)

    @torchcache
    def encode(x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True)
        return pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=5)[0]

    x, lengths = torch.randn(8, 5, 4), torch.tensor([5, 5, 4, 4, 3, 2, 2, 1])
    first = encode(x, lengths)
    assert torch.equal(encode(x, lengths), first)
    assert encode.cache_instance.stats().hits == 8


TEXTS = [
    "a cat",
    "a dog",
    "an ox",
    "a bird in the hand",
    "two",
    "a much longer sentence than that",
    "!",
    "? ?",
]


def encode(texts):
    rows = [torch.tensor([len(word) for word in text.split()]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def test_texts_of_one_length_in_each_batch_are_cached():
    cached = torchcache(item_args=("texts",))(encode)
    batches = [
        TEXTS[:3],
        ["a b c", "d e f", "g h i"],
        ["one", "two"],
        [TEXTS[1], TEXTS[0]],
        ["d e f", "x y z"],
    ]
    for some in batches:
        assert torch.equal(cached(some), encode(some))
    assert not bypasses(cached) and cached.cache_instance.stats().hits == 3


TABLE = torch.linspace(-1, 1, 2000).sin().reshape(1000, 2)
PAD = 999
LENGTHS = np.random.default_rng(0).integers(1, 12, 192).tolist()
SENTENCES = [" ".join(str((i * 31 + j * 11) % PAD) for j in range(n)) for i, n in enumerate(LENGTHS)]


def padded_ids(texts):
    """Ids of the words, padded to the longest text, as a tokenizer does it."""
    rows = [torch.tensor([int(word) for word in text.split()]) for text in texts]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


def pooled_texts(texts):
    return TABLE[padded_ids(texts)].mean(1)


def flattened_texts(texts):
    ids = padded_ids(texts)
    return TABLE[ids].cumsum(1)[:, -1] / ids.shape[1]


def cut_ids(ids):
    """The ids up to the longest row of the batch, pooled over the padding."""
    width = int((ids != PAD).sum(1).max())
    return TABLE[ids[:, :width]].mean(1)


def cut_by_lengths(ids, lengths):
    return TABLE[ids[:, : int(lengths.max())]].mean(1)


def epochs(size, orders):
    """The positions of each batch of four epochs."""
    by_length = sorted(range(len(SENTENCES)), key=LENGTHS.__getitem__)
    generator = torch.Generator().manual_seed(size)
    for order in orders:
        if order == "shuffled":
            positions = torch.randperm(len(SENTENCES), generator=generator)
        else:
            positions = torch.tensor(by_length if order == "sorted" else by_length[::-1])
        yield from positions.split(size)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("size", [3, 4, 8, 12, 16, 64])
@pytest.mark.parametrize(
    "orders",
    [
        ["sorted", "shuffled", "shuffled", "sorted"],
        ["sorted", "sorted", "sorted", "shuffled"],
        ["longest", "sorted", "longest", "shuffled"],
        ["shuffled", "sorted", "longest", "shuffled"],
    ],
    ids="-".join,
)
@pytest.mark.parametrize("function", [pooled_texts, flattened_texts, cut_ids, cut_by_lengths])
def test_batches_that_are_padded_inside_are_never_wrong(function, orders, size, log):
    names = ("texts",) if "texts" in function.__name__ else ()
    cached = torchcache(item_args=names)(function)
    ids = padded_ids(SENTENCES)
    wrong = 0
    for positions in epochs(size, orders):
        if names:
            args = ([SENTENCES[i] for i in positions],)
        else:
            args = (ids[positions], torch.tensor(LENGTHS)[positions])[: 1 + (function is cut_by_lengths)]
        wrong += not torch.allclose(cached(*args), function(*args), rtol=1e-4)
    assert wrong == 0
    (message,) = warnings_in(log)
    assert "docs/recipes/padding.md" in message or ("decorate what runs before" in message and not names)
    assert bypasses(cached).keys() == {"batch"}


@pytest.mark.parametrize("options", [{}, {"verify": 1.0, "probe": False}], ids=["probe", "verify"])
def test_what_a_cached_module_inside_finds_proves_nothing(options):
    def by_longest(x):
        return x * 2 + x[:, 0].max() // 10

    inner = torchcache(by_longest)
    outer = torchcache(**options)(lambda x: inner(x) + 1)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 50, (400,), generator=generator).sort().values
    items = torch.stack([lengths, torch.arange(400)], 1).float()
    for x in items.split(8):
        assert torch.equal(outer(x), by_longest(x) + 1)
    for _ in range(40):  # so that the next batches that the inner one finds are not to be checked
        inner(items[torch.randperm(8, generator=generator)])
    for x in items[torch.randperm(400, generator=generator)].split(8):
        assert torch.equal(outer(x), by_longest(x) + 1)
    assert bypasses(inner).keys() == {"batch"}
    assert (bypasses(outer).keys() == {"batch"}) == ("verify" not in options)  # no parts are computed there


def test_dependence_is_not_looked_for_again_with_other_weights(sizes):
    class Centred(nn.Linear):
        def forward(self, x):
            SIZES.info(len(x))
            x = super().forward(x)
            return x - x.mean(0)

    module = torchcache(Centred(4, 3)).requires_grad_(False)
    for _ in range(3):
        module(X)
        module.weight.add_(1.0)
    assert sizes == [6, 1, 1, 1, 6, 6]  # an item alone, twice: it is not random
    assert bypasses(module) == {"batch": 18}


def doubled(x, by=2):
    return x * by


def test_forwards_that_talk_to_other_processes_are_not_probed(sizes):
    dist = torch.distributed

    class Gathered(nn.Module):
        def forward(self, x):
            SIZES.info(len(x))
            total = x.sum()
            torch.distributed.all_reduce(total)
            return x * 2 + total * 0

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        module = torchcache(Gathered())
        module(X)
        assert sizes == [6]
        torchcache(lambda x: SIZES.info(len(x)) or x * 2)(X)
        assert sizes == [6, 6, 1, 1]
    finally:
        dist.destroy_process_group()


# Batches that are found

CONTENT = {
    "number": lambda x, t: x * len(x),
    "odd number": lambda x, t: x + len(x) % 2,
    "large batches": lambda x, t: x * (1 + (len(x) > 5)),
    "order": lambda x, t: x + torch.arange(float(len(x)))[:, None],
    "last": lambda x, t: x + x[-1:],
    "neighbour": lambda x, t: torch.cat([x[:1], x[1:] + x[:-1]]),
    "mean": lambda x, t: x - x.mean(0),
    "largest": lambda x, t: x / x.abs().amax(),
    "one that is above": lambda x, t: x + 1.0 if bool((x[:, 0] > t).any()) else x * 1.0,
    "all are above": lambda x, t: x + 1.0 if bool((x[:, 0] > t).all()) else x * 1.0,
    "how many are above": lambda x, t: x + (x[:, 0] > t).sum(),
    "longest": lambda x, t: x / (x > t).sum(1).amax().clamp_min(1),
    "none": lambda x, t: x * t,
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("name", CONTENT)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_what_is_put_together_of_earlier_batches_is_right_or_not_cached(name, data):
    threshold = data.draw(st.sampled_from([0.5, 0.1, 0.9]), "threshold")
    items = torch.rand(24, 3, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed")))
    order = torch.tensor(data.draw(st.permutations(range(24)), "order"))
    function = torchcache(lambda x: CONTENT[name](x, threshold))
    for positions in order.split(data.draw(st.integers(2, 12), "size")):
        x = items[positions]
        assert torch.equal(function(x), CONTENT[name](x, threshold))
    some = st.lists(st.integers(0, 23), min_size=1, max_size=12)
    for positions in [data.draw(some, "found") for _ in range(2)] * 2:  # each is found as a whole, twice
        x = items[positions]
        assert torch.allclose(function(x), CONTENT[name](x, threshold), rtol=1e-3, atol=1e-6)
    assert bypasses(function).keys() <= {"batch"} and (name != "none" or not bypasses(function))


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_what_is_partly_found_is_right_or_not_cached(data):
    name = data.draw(st.sampled_from(sorted(CONTENT)))
    items = torch.rand(24, 3, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed")))
    function = torchcache(lambda x: CONTENT[name](x, 0.5))
    for positions in (range(8), range(4, 14), range(10, 24)):
        x = items[torch.tensor(positions)]
        assert torch.allclose(function(x), CONTENT[name](x, 0.5), rtol=1e-3, atol=1e-6)


def test_a_found_batch_whose_forward_cannot_run_is_not_checked(tmp_path, log):
    broken = tmp_path / "broken"

    @torchcache
    def doubled(x):
        if broken.exists():
            raise OSError("no such thing")
        return x * 2

    doubled(X)
    broken.touch()
    assert torch.equal(doubled(X.flip(0)), X.flip(0) * 2)
    with pytest.raises(OSError, match="no such thing"):
        doubled(Y)
    assert doubled.cache_instance.stats().hits == 6 and warnings_in(log) == []


def test_an_interrupt_in_a_check_is_the_callers():
    class Interrupted(nn.Module):
        def forward(self, x):
            if len(x) == 6 and bool((x[0] == X[5]).all()):
                raise KeyboardInterrupt
            return x * 2

    module = torchcache(Interrupted())
    module(X[:3]), module(torch.cat([Y, X[3:]]))
    with pytest.raises(KeyboardInterrupt):
        module(X.flip(0))
