"""Random pytrees, batches, orders, duplicates and interleavings against the plain forward."""

import os

import hypothesis
import hypothesis.strategies as st
import torch
from torch.utils import _pytree as pytree

from tests.helpers.outputs import assert_same
from tests.helpers.trees import LEAVES, OTHERS, build, nested
from torchcache2 import torchcache

SOAK = bool(os.environ.get("SOAK"))


@hypothesis.settings(max_examples=75 if SOAK else 25)
@hypothesis.given(
    argument=nested(st.one_of(LEAVES, OTHERS)),
    output=nested(st.one_of(LEAVES, OTHERS)),
    batches=st.lists(st.lists(st.integers(0, 12), max_size=9), min_size=1, max_size=8),
    options=st.fixed_dictionaries(
        {
            "policy": st.sampled_from(["mru", "lru"]),
            "max_memory_cache_size": st.sampled_from([0, 9_000, 30_000, 10**7]),
        }
    ),
)
def test_outputs_are_those_of_the_plain_forward(argument, output, batches, options):
    def forward(items, argument):
        return build(output, items)

    function = torchcache(**options)(forward)
    for batch in batches:
        items = torch.tensor(batch, dtype=torch.int64)
        if not batch and pytree.tree_leaves(output) == []:
            continue
        args = items, build(argument, items)
        assert_same(function(*args), forward(*args))
        assert function.cache_instance.stats().memory_bytes <= options["max_memory_cache_size"]


@hypothesis.settings(max_examples=30 if SOAK else 15)
@hypothesis.given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["first", "second"]),
            st.sampled_from([0, 1, 1.0, True, "1", None]),
            st.lists(st.integers(0, 6), min_size=1, max_size=6),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_interleaved_calls_with_other_arguments_and_weights_do_not_meet(calls):
    class Scaled(torch.nn.Module):
        def __init__(self, weight):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(weight), requires_grad=False)

        def forward(self, x, kind):
            return x * self.weight + hash((type(kind).__name__, kind)) % 97

    cached = torchcache(Scaled)
    modules = {"first": cached(2.0), "second": cached(3.0)}
    for name, kind, batch, update in calls:
        module = modules[name]
        if update:
            module.weight += 1
        x = torch.tensor(batch, dtype=torch.float32)
        expected = x * module.weight + hash((type(kind).__name__, kind)) % 97
        assert torch.equal(module(x, kind), expected)
