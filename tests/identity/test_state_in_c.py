"""Objects whose state no Python attribute has: it counts, and what edits it is noticed."""

import abc
import collections
import contextvars
import ctypes
import datetime
import decimal
import enum
import importlib
import io
import pathlib
import types

import h5py
import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.outputs import warnings_in
from torchcache2 import cache_of, torchcache

X = torch.arange(1.0, 13.0).view(4, 3)

pytestmark = pytest.mark.usefixtures("without_grad")


def variable(value):
    found = contextvars.ContextVar("variable", default=0.0)
    found.set(value)
    return found


def pandas():  # it is slow to import, which is for those to do who run these tests
    return importlib.import_module("pandas")


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
        lambda value: pandas().Series([value]),
        lambda one: one.__setitem__(0, 9.0),
        lambda one: float(one.iloc[0]),
    ),
    "names of columns": (
        lambda value: pandas().DataFrame({str(value): [1.0]}),
        lambda one: setattr(one, "columns", ["9.0"]),
        lambda one: float(one.columns[0]),
    ),
    "texts of a table": (
        lambda value: pandas().DataFrame({"a": [str(value)]}),
        lambda one: one.__setitem__("a", ["9.0"]),
        lambda one: float(one["a"].iloc[0]),
    ),
    "an index": (
        lambda value: pandas().DataFrame({"a": [1.0]}, index=[value]),
        lambda one: setattr(one, "index", [9.0]),
        lambda one: float(one.index[0]),
    ),
}


def derived(base, *given):
    kind = type("Derived", (base,), {})
    return lambda value: attributed(kind(*given), value)


def attributed(owner, value):
    owner.scale = value
    return owner


def member(value):
    return attributed(enum.Enum("Unit", {"a": 1}).a, value)


# Attributes of what is written down as a plain value.
ATTRIBUTED = {
    "a deque": derived(collections.deque, [1]),
    "a path": derived(pathlib.PosixPath, "a"),
    "a date": derived(datetime.date, 2000, 1, 1),
    "a time": derived(datetime.time, 1),
    "a number of decimals": derived(decimal.Decimal, 1),
    "a number of numpy": derived(np.float64, 1.0),
    "an enum": member,
    "a tensor": lambda value: attributed(torch.zeros(2), value),
    "a parameter": lambda value: attributed(torch.nn.Parameter(torch.zeros(2), False), value),
}
for name, make in ATTRIBUTED.items():
    KINDS[f"an attribute of {name}"] = (make, lambda one: setattr(one, "scale", 9.0), lambda one: one.scale)
for size, edit in (2, edit_column), (2, edit_element), (5000, edit_element):
    KINDS[f"{edit.__name__} of {size}"] = (
        lambda value, size=size: pandas().DataFrame({"a": np.arange(size) + value}),
        edit,
        lambda one: float(one["a"].iloc[0]),
    )


@pytest.mark.one_in(5)
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


def path_class(value):
    class Scaled(pathlib.PosixPath):
        def scale(self):
            return value

    path = Scaled("a")
    return lambda: path.scale()


def table_of_names(value):
    names = np.array([(1, None)], dtype=[(f"{value}", "f8"), ("", object)])
    return lambda: float(names.dtype.names[0])


def ufunc(value):
    scale = np.frompyfunc(lambda number: number * value, 1, 1)
    return lambda: scale(1.0)


def abstract(value):
    made = type("Made", (abc.ABC,), {"scale": value})()
    return lambda: made.scale


def made_by_types(value):
    made = types.new_class("Made", (), {}, lambda names: names.update(scale=value))()
    return lambda: made.scale


@pytest.mark.parametrize("make", [path_class, table_of_names, ufunc, abstract, made_by_types])
def test_code_and_names_that_stand_in_no_file_or_attribute_count(make):
    def cached(scale):
        return torchcache(lambda x: x * scale())

    scaled, other = cached(make(2.0)), cached(make(3.0))
    assert torch.equal(scaled(X), 2 * X)
    assert torch.equal(other(X), 3 * X)
    assert cache_of(scaled).module_hash != cache_of(other).module_hash


def test_an_attribute_that_a_weight_is_given_later_counts():
    module = torch.nn.Linear(3, 3)
    scaled = torchcache(lambda x: x * getattr(module.weight, "scale", 2.0))
    assert torch.equal(scaled(X), 2 * X)
    module.weight.scale = 3.0
    assert torch.equal(scaled(X), 3 * X)


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


def test_a_large_image_is_not_read_at_every_call(monkeypatch):
    reads, state = [], Image.Image.__getstate__
    monkeypatch.setattr(Image.Image, "__getstate__", lambda image: reads.append(1) or state(image))
    held = Image.new("RGB", (64, 64), (2, 2, 2))
    scaled = torchcache(lambda x: x * held.getpixel((0, 0))[0], ignore="reads")
    for _ in range(3):
        assert torch.equal(scaled(X), 2 * X)
    known = len(reads)
    assert torch.equal(scaled(X), 2 * X) and len(reads) == known > 0


class Table:
    """Has an open file of HDF5, whose pickle in C is a pointer and a handle."""

    def __init__(self, path):
        with h5py.File(path.with_suffix(".h5"), "w") as file:
            file["a"] = np.frombuffer(path.read_bytes(), np.uint8)
        self.file = h5py.File(path.with_suffix(".h5"))

    def first(self):
        return int(self.file["a"][0])


def test_handles_that_may_stand_for_another_file_count_in_this_process_only(tmp_path, log):
    for number in (2, 3):  # both files may get the same handle
        (path := tmp_path / str(number)).write_bytes(bytes([number]))
        table = Table(path)
        scaled = torchcache(lambda x, table=table: x * table.first(), persistent_cache_dir=tmp_path / "rows")
        assert torch.equal(scaled(X), X * number)
        scaled.cache_instance.flush()
        del scaled, table
        assert all(part in warnings_in(log)[-1] for part in ("table.f", "this process only"))


POINTING = """
import ctypes
class Booster:
    def __init__(self, scale, size=1):
        self.values = (ctypes.c_double * size)(scale)
        self.handle = ctypes.pointer(self.values)
        del self.values
    def __getstate__(self):
        return {"handle": bytes(self.handle.contents)}
    def scale(self):
        return self.handle.contents[0]
    def update(self, scale):
        self.handle.contents[0] = scale
"""


def test_an_object_behind_a_pointer_counts_by_what_its_class_pickles(installed, log):
    package, hashes = installed("written_booster", POINTING), []

    def model(x):
        return x * booster.scale()

    booster = package.Booster(2)
    cached = torchcache(model)
    x = torch.rand(4, 3)
    for scale in (2, 3, 2):
        booster.update(scale)
        assert torch.equal(cached(x), x * scale)
        hashes.append(cached.cache_instance.module_hash)
    assert hashes[0] == hashes[2] != hashes[1]
    assert cached.cache_instance.stats().hits == len(x)
    booster = package.Booster(2)  # another one that is equal
    assert torch.equal(cached(x), x * 2) and cached.cache_instance.module_hash == hashes[0]
    assert warnings_in(log) == []
    booster = package.Booster(2, size=10_000)  # too large to be looked at before every call
    assert torch.equal(cached(x), x * 2) and cached.cache_instance.module_hash != hashes[0]
    assert "cannot read" in warnings_in(log)[0] and "booster.handle" in warnings_in(log)[0]
