"""Modules whose items depend on each other: no row is ever wrong, whatever is mixed and however it is called.

The first call of two items or more with arguments of one structure is checked: a part of the batch is
computed by itself. So these modules mix in every batch of two or more. What mixes in rare conditions only,
such as in batches of more than seven, no such check can see, and is not tested here.
"""

import copy
import math
import os

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchcache2 import torchcache

SOAK = bool(os.environ.get("SOAK"))
LENGTH, WIDTH, POOL = 4, 6, 8
TOLERANCE = 10 * math.sqrt(torch.finfo(torch.float32).eps)  # what is found differs by a tenth of it or more


class Along(nn.Module):
    """A function along one dimension: of the batch, of the sequence, or of the channels."""

    def __init__(self, kind, dim):
        super().__init__()
        self.kind, self.dim = kind, dim

    def forward(self, x, mask):
        return ALONG[self.kind](x, self.dim)


def gathered(x, dim):
    order = torch.arange(x.shape[dim]).flip(0)
    return x.index_select(dim, order) + x


ALONG = {
    "softmax": lambda x, dim: torch.softmax(x, dim),
    "cumsum": lambda x, dim: torch.cumsum(x, dim),
    "centred": lambda x, dim: x - x.mean(dim, keepdim=True),
    "largest": lambda x, dim: x / x.abs().amax(dim, keepdim=True),
    "flipped": lambda x, dim: torch.flip(x, (dim,)),
    "rolled": lambda x, dim: x + torch.roll(x, 1, dim),
    "sorted": lambda x, dim: torch.sort(x, dim).values,
    "gathered": gathered,
    "scaled by the size": lambda x, dim: x / x.shape[dim],
    "positions": lambda x, dim: x + torch.arange(x.shape[dim]).reshape(-1, *[1] * (2 - dim)),
}


class Sequential(nn.Module):
    """A layer of torch over sequences, with the batch in its first dimension or in its second."""

    def __init__(self, kind, batch_first):
        super().__init__()
        if kind == "lstm":
            self.layer = nn.LSTM(WIDTH, WIDTH, batch_first=batch_first)
        elif kind == "gru":
            self.layer = nn.GRU(WIDTH, WIDTH, bidirectional=False, batch_first=batch_first)
        elif kind == "attention":
            self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first)
        else:
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=batch_first)
        with torch.no_grad():
            for weight in self.layer.parameters():
                weight.mul_(2.0)  # so that what is mixed is seen

    def forward(self, x, mask):
        layer = self.layer
        if isinstance(layer, nn.MultiheadAttention):
            return layer(x, x, x, need_weights=False)[0] + x
        output = layer(x)
        return output[0] if isinstance(output, tuple) else output


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        return torch.tanh(self.layer(x)) + x


class Masked(nn.Module):
    """Attention over the sequence, with a mask between its positions."""

    def forward(self, x, mask):
        scores = x @ x.transpose(1, 2) + (0.0 if mask is None else mask)
        return torch.softmax(scores, -1) @ x


class MaskOfItems(nn.Module):
    """A mask that has a row for each item, where it is as long as the batch."""

    def forward(self, x, mask):
        return x * mask.sum(1)[:, None, None] if len(mask) == len(x) else x


# The output that is returned in the end. None but the first few has a row for each item, which is its own.
ENDS = {
    "as it is": lambda x: x,
    "in a dict": lambda x: {"x": x, "parts": (x[:, 0], x.mean((1, 2)))},
    "flat": lambda x: x.flatten(1),
    "with a number": lambda x: (x, 3),
    "with the size of the batch": lambda x: (x, x.shape[0]),
    "with a text of it": lambda x: (x, "x" * len(x)),
    "similarities": lambda x: x.flatten(1) @ x.flatten(1).T,
    "similarities beside": lambda x: {"x": x, "all": x.flatten(1) @ x.flatten(1).T},
    "batch second": lambda x: x.transpose(0, 1).contiguous(),
    "mean": lambda x: x.mean(0),
    "one number": lambda x: x.mean(),
    "one number beside": lambda x: (x, x.mean()),
    "items in a row": lambda x: x.flatten(0, 1),
    "a batch of one": lambda x: x[None],
    "the first": lambda x: x[:1],
    "twice": lambda x: torch.cat([x, x]),
    "the best": lambda x: x.amax(0),
    "a list of items": lambda x: list(x),
    "the norm": lambda x: (x, x.norm().item()),
}
OWN_ROWS = list(ENDS)[:4]


class Chain(nn.Module):
    def __init__(self, parts, end):
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.end = end

    def forward(self, x, mask=None):
        for part in self.parts:
            x = part(x, mask)
        return ENDS[self.end](x)


# Each with whether items are mixed.
PARTS = {
    **{
        f"{kind} {dim}": (lambda kind=kind, dim=dim: Along(kind, dim), dim == 0)
        for kind in ALONG
        for dim in range(3)
    },
    **{
        f"{kind} {'first' if first else 'second'}": (
            lambda kind=kind, first=first: Sequential(kind, first),
            not first,
        )
        for kind in ("lstm", "gru", "attention", "encoder")
        for first in (True, False)
    },
    "linear": (Linear, False),
}
CALLS = [
    [[0, 1, 2, 3], [3, 1, 0, 2], [0, 4, 1, 5], [2], [4, 4, 0], [7, 6, 5, 4, 3, 2], [1, 1]],
    [[2], [0, 2], [5], [2, 5, 0, 1], [1, 0]],
    [[1, 1], [1, 0], [0, 1], [3, 3, 3, 3], [3, 2, 1, 0]],
]


def compare(actual, expected, message):
    left, structure = pytree.tree_flatten(actual)
    right, other = pytree.tree_flatten(expected)
    assert structure == other, message
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == (pytest.approx(b, rel=TOLERANCE) if isinstance(b, float) else b), message
            continue
        assert (a.dtype, a.shape) == (b.dtype, b.shape), message
        bound = TOLERANCE * max(1.0, b.abs().max().item())
        apart = (a - b).abs().max().item()
        assert apart <= bound, f"{message}: differs by {apart:.3g}"


def check(parts, end, calls, *, masks=None, shared=(), independent=False):
    """Every call gives what the plain module gives; with independent items, rows are found."""
    torch.manual_seed(0)
    plain = Chain([make() for make in parts], end).eval().requires_grad_(False)
    cached = torchcache(copy.deepcopy(plain), shared_args=shared)
    pool = torch.randn(POOL, LENGTH, WIDTH)
    for number, positions in enumerate(calls):
        arguments = (pool[positions],) if masks is None else (pool[positions], masks[number % len(masks)])
        compare(cached(*arguments), plain(*arguments), f"call {number} of {calls}")
    stats = cached.cache_instance.stats()
    if independent:
        assert stats.bypasses == {}
        assert stats.hits > 0


@pytest.mark.parametrize("calls", CALLS, ids=["batch", "one first", "repeated first"])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.one_in(8)
def test_a_layer_that_mixes_or_not(name, calls):
    make, mixes = PARTS[name]
    check([make], "as it is", calls, independent=not mixes)


@pytest.mark.parametrize("calls", CALLS, ids=["batch", "one first", "repeated first"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.one_in(9)
def test_an_output_that_has_rows_or_not(end, calls):
    check([Linear], end, calls, independent=end in OWN_ROWS)


def triangles():
    return [torch.full((LENGTH, LENGTH), -9.0).triu(1), torch.full((LENGTH, LENGTH), -9.0).tril(-1)]


@pytest.mark.parametrize("calls", CALLS, ids=["batch", "one first", "repeated first"])
@pytest.mark.parametrize("shared", [(), ("mask",)], ids=["batched", "shared"])
def test_a_mask_as_large_as_the_batch(shared, calls):
    check([Masked], "as it is", calls, masks=triangles(), shared=shared, independent=bool(shared))
    if not shared:
        check([MaskOfItems], "as it is", calls, masks=triangles())


SEQUENCES = st.lists(st.lists(st.integers(0, POOL - 1), min_size=1, max_size=6), min_size=2, max_size=8)


@pytest.mark.slow
@hypothesis.settings(
    max_examples=3000 if SOAK else 15,
    deadline=None,
    derandomize=not SOAK,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    report_multiple_bugs=False,
)
@hypothesis.given(
    names=st.lists(st.sampled_from(sorted([*PARTS, "masked"])), min_size=1, max_size=4),
    end=st.one_of(st.just("as it is"), st.sampled_from(list(ENDS))),
    calls=SEQUENCES,
    mask=st.sampled_from(["none", "one", "two"]),
    is_shared=st.booleans(),
)
def test_random_modules_in_random_calls(names, end, calls, mask, is_shared):
    makers = [Masked if name == "masked" else PARTS[name][0] for name in names]
    masks = {"none": None, "one": triangles()[:1], "two": triangles()}[mask]
    shared = ("mask",) if is_shared and mask != "none" else ()
    check(makers, end, calls, masks=masks, shared=shared)
