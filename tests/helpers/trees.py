"""Random pytrees whose tensors have a row for each item."""

import hypothesis.strategies as st
import torch
from torch.utils import _pytree as pytree

DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool]
)


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


LEAVES = st.tuples(DTYPES, SHAPES)


OTHERS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=5)
)


def nested(leaves):
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.tuples(inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        ),
        max_leaves=6,
    )


def is_tensor_spec(leaf):
    return isinstance(leaf, tuple) and len(leaf) == 2 and isinstance(leaf[0], torch.dtype)


def build(spec, items):
    """A pytree whose tensors hold, for each item, values that depend on the item alone."""

    def leaf(node):
        if not is_tensor_spec(node):
            return node
        dtype, shape = node
        size = max(1, torch.Size(shape).numel())
        values = (items[:, None] * 37 + torch.arange(size) * 11) % 251
        values = values[:, : torch.Size(shape).numel()].reshape(len(items), *shape)
        return (values % 2 if dtype == torch.bool else values).to(dtype)

    return pytree.tree_map(leaf, spec, is_leaf=is_tensor_spec)
