"""Objects whose state no Python attribute has: it counts, and what edits it is noticed."""

import contextvars
import ctypes
import io
import types

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

from torchcache2 import cache_of, torchcache

X = torch.arange(1.0, 13.0).view(4, 3)

pytestmark = pytest.mark.usefixtures("without_grad")


def variable(value):
    found = contextvars.ContextVar("variable", default=0.0)
    found.set(value)
    return found


def edit_column(table):
    table["a"] = table["a"] + 1


def edit_element(table):
    table.iloc[0, 0] += 1


def proxy(value):
    # The mapping is kept alive by its proxy alone.
    return types.MappingProxyType({"a": [value]})


def image(value):
    return Image.new("L", (2, 2), int(value))


KINDS = {
    "a number of C": (ctypes.c_double, lambda one: setattr(one, "value", 9.0), lambda one: one.value),
    "a view of a dict": (proxy, lambda one: one["a"].append(9.0), lambda one: one["a"][-1]),
    "a variable of a context": (variable, lambda one: one.set(9.0), lambda one: one.get()),
    "an image": (image, lambda one: one.putpixel((0, 0), 9), lambda one: one.getpixel((0, 0))),
    "a series": (
        lambda value: pd.Series([value]),
        lambda one: one.__setitem__(0, 9.0),
        lambda one: float(one.iloc[0]),
    ),
    "names of columns": (
        lambda value: pd.DataFrame({str(value): [1.0]}),
        lambda one: setattr(one, "columns", ["9.0"]),
        lambda one: float(one.columns[0]),
    ),
    "texts of a table": (
        lambda value: pd.DataFrame({"a": [str(value)]}),
        lambda one: one.__setitem__("a", ["9.0"]),
        lambda one: float(one["a"].iloc[0]),
    ),
    "an index": (
        lambda value: pd.DataFrame({"a": [1.0]}, index=[value]),
        lambda one: setattr(one, "index", [9.0]),
        lambda one: float(one.index[0]),
    ),
}
for size in (2, 5000):
    for name, edit in {"a column": edit_column, "an element": edit_element}.items():
        KINDS[f"{name} of a table of {size} rows"] = (
            lambda value, size=size: pd.DataFrame({"a": np.arange(size) + value}),
            edit,
            lambda one: float(one["a"].iloc[0]),
        )


@pytest.mark.parametrize(("make", "edit", "read"), KINDS.values(), ids=KINDS)
def test_state_that_only_c_code_can_read_counts(make, edit, read):
    def cached(value):
        held = make(value)
        return held, torchcache(lambda x: x * read(held))

    held, scaled = cached(2.0)
    assert cache_of(scaled).module_hash == cache_of(cached(2.0)[1]).module_hash
    assert cache_of(scaled).module_hash != cache_of(cached(3.0)[1]).module_hash
    for _ in range(2):
        assert torch.equal(scaled(X), 2 * X)
    assert cache_of(scaled).stats().hits == len(X)
    edit(held)
    assert read(held) != 2
    for _ in range(2):
        assert torch.equal(scaled(X), read(held) * X)
    assert cache_of(scaled).stats().hits == 2 * len(X)


def test_a_proxy_of_a_dict_that_somebody_else_edits_counts():
    owner = {"a": 2.0}
    view = types.MappingProxyType(owner)
    scaled = torchcache(lambda x: x * view["a"])
    for owner["a"] in (2.0, 3.0):
        assert torch.equal(scaled(X), owner["a"] * X)


def test_a_variable_of_a_context_may_have_no_value():
    empty = contextvars.ContextVar("empty")
    scaled = torchcache(lambda x: x * empty.get(2.0))
    assert torch.equal(scaled(X), 2 * X)
    empty.set(3.0)
    assert torch.equal(scaled(X), 3 * X)


def test_an_object_that_hides_its_class_cannot_be_read(log):
    file = io.BytesIO()
    np.savez(file, a=[2.0])
    file.seek(0)
    arrays = np.load(file)  # its attribute `f` raises for every name but those of the arrays
    scaled = torchcache(lambda x: x * float(arrays["a"][0]))
    assert torch.equal(scaled(X), 2 * X)
    assert any("arrays.f" in record.getMessage() for record in log)
