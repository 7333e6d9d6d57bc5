"""Identifies datasets and samples: everything that samples depend on, as named parts, and keys of indices.

Code of the dataset and of what it refers to counts by its source, attributes by their values. Files that the
dataset reads later do not count.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import random
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset
from xxhash import xxh3_128_digest

from torchcache2.core.keys import Keys, int_keys
from torchcache2.datasets.options import check
from torchcache2.engine.cache import now as time_now
from torchcache2.engine.randomness import state_of
from torchcache2.identity.encoding import Encoder, digest, qualified_name, readable, text_bytes, texts_of
from torchcache2.identity.fingerprint import Fingerprint
from torchcache2.identity.guard import MUTABLE, size_of
from torchcache2.identity.marks import __version__
from torchcache2.identity.sourcecode import CompiledTexts
from torchcache2.identity.tensors import TensorWatch
from torchcache2.identity.walk import GENERATORS, Walk

_FORMAT = 1
_MOST_LISTED = 64  # objects in longer containers have no parts
_MOST_PARTS = 5000
_UNSEEDED = re.compile(r"\b(default_rng|RandomState|Random|SystemRandom)\((None)?\)")


class Identity(NamedTuple):
    """Everything that the samples of a dataset depend on.

    Attributes
    ----------
    fingerprint : Fingerprint
        The parts, such as ``attribute transform.size``.
    unread : list of str
        Paths of unreadable values. If there are any, the namespace is valid in this process only.
    generators : list
        The random generators that the dataset refers to.
    unseeded : list of str
        Its code that makes a generator without a seed.
    """

    fingerprint: Fingerprint
    unread: list[str]
    generators: list[Any]
    unseeded: Sequence[str] = ()

    @property
    def namespace(self) -> bytes:
        """16 bytes, equal in every process if `unread` is empty."""
        return self.fingerprint.namespace


def identify(dataset: Any, *, name: str | None = None, version: str | int | None = None) -> Identity:
    """Read everything that the samples of a dataset depend on, but no sample.

    Parameters
    ----------
    dataset : Dataset
        Any object with ``__getitem__``; stays unchanged. Its tensors and arrays are read whole.
    name : str, optional
        A name that identifies the dataset; then only its length is read.
    version : str or int, optional
        Change it when samples change although code and attributes do not, such as files. 1 is not ``"1"``.

    Returns
    -------
    Identity
        Its namespace differs if any of these does.

    Raises
    ------
    OptionError
        If `name` is not a text, or `version` neither text nor int.
    """
    check({"name": name, "version": version})
    # The length may depend on files that no attribute mentions.
    given: dict[str, Any] = {"name": name, "version": version, "length": length_of(dataset)}
    if name is not None:
        return Identity(_named("dataset", given), [], _generators(dataset))
    walk = _walked(dataset)
    tensors = TensorWatch(walk.tensors)
    tensors.refresh()
    for one in walk.loaded:  # a lazy module that is loaded may have been edited
        walk.parts |= {f"loaded {one.path} {name}": data for name, data in one.parts.items()}
    walk.parts["format"] = f"dataset {_FORMAT}, walk {walk.parts['format'].decode()}".encode()
    unread = sorted({*walk.unread, *tensors.unreadable})
    return Identity(_fingerprint(walk.parts, given, tensors), unread, walk.generators, walk.draws)


def _walked(dataset: Any) -> _DatasetWalk:
    """A walk of a dataset, including the modules that its code imports at run time.

    Their content counts, even if this process has not imported them yet.
    """
    tried: set[str] = set()
    while True:
        walk = _DatasetWalk(_Given(dataset), {}, CompiledTexts())
        new = walk.not_imported - tried
        if not new:
            return walk
        tried |= new
        for module in sorted(new):
            with contextlib.suppress(Exception):  # then the dataset cannot either
                importlib.import_module(module)


def identify_prefix(key_prefix: str, version: str | int | None = None) -> Identity:
    """The identity of a `CacheLoader`'s values, different from any dataset's."""
    check({"key_prefix": key_prefix, "version": version})
    return Identity(_named("loader", {"prefix": key_prefix, "version": version}), [], [])


def _named(kind: str, given: Mapping[str, Any]) -> Fingerprint:
    """A fingerprint from just a name and a version."""
    return _fingerprint({"format": f"{kind} {_FORMAT}".encode()}, given)


def _fingerprint(
    parts: dict[str, bytes], given: Mapping[str, Any], tensors: TensorWatch | None = None
) -> Fingerprint:
    said = {name: Encoder().encode(value, name) for name, value in given.items() if value is not None}
    digests = {name: digest([data]) for name, data in {**parts, **said}.items()}
    values = texts_of(parts) | {name: text for name in said if (text := readable(said[name])) is not None}
    if tensors is not None:
        digests |= {f"data {path}": data for path, data in tensors.digests.items()}
        values |= {f"data {path}": text for path, text in tensors.forms().items()}
    return Fingerprint.of_parts(digests, values)


def length_of(dataset: Any) -> int | None:
    """How many samples a dataset has; None if unknown. An array of Zarr 3 only has a shape."""
    try:
        if hasattr(dataset, "__len__"):
            return len(dataset)
        is_array = all(hasattr(dataset, name) for name in ("shape", "dtype", "ndim")) and dataset.ndim > 0
        return int(dataset.shape[0]) if is_array else None
    except Exception:  # not known yet
        return None


def _generators(dataset: Any) -> list[Any]:
    """The random generators among a dataset's attributes, and theirs, without a walk."""
    found, met, left = [], set[int](), [dataset]
    for value in left:  # grows meanwhile
        if id(value) in met or len(met) >= _MOST_PARTS:
            continue
        met.add(id(value))
        if issubclass(type(value), GENERATORS):
            found.append(value)
        elif type(value) in (tuple, list):
            left += value[:_MOST_LISTED]
        else:
            attributes = value if type(value) is dict else _fields(value)
            left += [item for item, _ in zip(list(attributes.values()), range(_MOST_LISTED), strict=False)]
    return [generator for generator in found if not isinstance(generator, random.SystemRandom)]


def _fields(value: Any) -> dict[str, Any]:
    """The attributes of an object, without running its code."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if type(fields) is dict else {}


class _Given:
    """The root of a walk."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


class _DatasetWalk(Walk):
    """A walk with a part for each attribute of the dataset, of the datasets in it, and of other objects.

    It runs once, without watching: so a dataset may have more objects than a module.
    """

    most_objects = 1_000_000
    most_before_bulk = -1
    held_in_bulk = (tuple, list, dict)
    _is_listed = False  # whether an element of a long container is being read
    _is_code = False  # whether code is being read, which may name anything

    @property
    def draws(self) -> list[str]:
        """Where project code makes a generator without a seed, for people; constructors may."""
        found = [
            (one, _UNSEEDED.search(text)) for one, text in self.sources.items() if one.__name__ != "__init__"
        ]
        return [f"{one.__qualname__} names {draw[0]}" for one, draw in found if draw]

    def other(self, value: Any, path: str) -> bytes:
        """Walk the root, and objects."""
        if isinstance(value, types.MemberDescriptorType):  # a slot, part of its class
            return b"u" + text_bytes(value.__name__)
        if type(value) is _Given:
            return self.encode(value.dataset, path)
        data = super().other(value, path)
        if self.generators and self.generators[-1] is value:
            # The state counts, as a dataset may use a generator's seed without drawing from it.
            data += self.encode(state_of(value), f"{path} (state)")
        return data

    def refused(self, value: Any, path: str, error: Exception) -> bytes:
        """Note an object that cannot be read."""
        return self.unreadable(value, path)

    def klass(self, kind: type, path: str) -> bytes:
        """Write down a class."""
        return self._coded(super().klass, kind, path)

    def function(self, function: types.FunctionType, path: str) -> bytes:
        """Write down a function."""
        return self._coded(super().function, function, path)

    def _coded(self, write: Callable[[Any, str], bytes], value: Any, path: str) -> bytes:
        before, self._is_code = self._is_code, True
        try:
            return write(value, path)
        finally:
            self._is_code = before

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Walk an object; a dataset once, even if several others refer to it."""
        if not issubclass(kind, Dataset) or issubclass(kind, nn.Module):
            return self._with_fields(value, kind, path)
        if id(value) not in self._labels:
            label = self.label(value, f"dataset {path}".rstrip()).decode()
            self.parts[label] = self._with_fields(value, kind, path)
        return self._labels[id(value)]

    def _with_fields(self, value: Any, kind: type, path: str) -> bytes:
        if not hasattr(kind, "__dataclass_fields__"):
            return super().compound(value, kind, path)
        fields = self.state(self.fields(value, path), path)
        return b"D" + self.kind(kind, path) + fields + self.besides(value, path)

    def contents(self, value: Any, path: str) -> bytes:
        """Read a container's elements; in a long one, their attributes do not become parts."""
        size = size_of(value) if isinstance(value, MUTABLE) else len(value)
        before, self._is_listed = self._is_listed, self._is_listed or size > _MOST_LISTED
        try:
            return super().contents(value, path)
        finally:
            self._is_listed = before

    def state(self, state: Mapping[str, Any], path: str) -> bytes:
        """Write each attribute of an object as a part; returns the parts' names."""
        if self._is_listed or len(self.parts) > _MOST_PARTS:
            return super().state(state, path)
        self._label_counts.setdefault(f"module {path}", 1)  # a module on this path gets another label
        names, kind = [], "value" if self._is_code else "attribute"
        for name in sorted(state):
            where = f"{path}.{name}" if path else name
            data = self.encode(state[name], where)
            part = f"{kind} {where}"
            while self.parts.get(part, data) != data:  # another object on the same path
                part += "'"
            self.parts[part] = data
            names.append(text_bytes(part))
        return b"attributes " + b"".join(names)


def document(
    identity: Identity,
    dataset: Any,
    name: str | None,
    version: str | int | None,
    made_of: Any = None,
    views: int = 1,
) -> dict[str, Any]:
    """The description of a dataset's namespace, as JSON for ``fingerprint.json``, perhaps with a `Map`."""
    said = (
        {
            "length": length_of(dataset),
            "name": name,
            "version": None if version is None else str(version),
        }
        | ({} if made_of is None else {"map": made_of.name()})
        | ({} if views == 1 else {"views": views})
    )
    return document_of(identity, qualified_name(type(dataset))) | {"dataset": said}


def document_of(identity: Identity, kind: str) -> dict[str, Any]:
    """The description of a namespace, as JSON for ``fingerprint.json``; `kind` is the name of its class."""
    return {
        "class": kind,
        "library": __version__,
        "torch": str(torch.__version__),
        "created": time_now(),
        "parts": {part: data.hex() for part, data in identity.fingerprint.parts.items()},
        "values": dict(identity.fingerprint.values),
    }


Index = int | str | bytes

_EXPECTED = (
    "a CachedDataset takes one int, str or bytes at a time; for several samples use a DataLoader, or "
    "[dataset[i] for i in indices]"
)
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


def as_index(index: Any, expected: str = _EXPECTED) -> Index:
    """An index as an int, str or bytes.

    An int may be one of NumPy, or a tensor without dimensions. For anything else, raises `TypeError` with
    `expected`.
    """
    kind = type(index)
    if kind is int or kind is str or kind is bytes:
        return index  # type: ignore[no-any-return]
    if isinstance(index, str):
        return str.__str__(index)  # `str(index)` drops trailing zeros of a NumPy text
    if isinstance(index, bytes):
        return bytes(index)
    if not getattr(index, "shape", ()):  # else a tensor (1,) would count as an int
        with contextlib.suppress(TypeError):
            return int(operator.index(index))
    raise TypeError(f"an index of type {kind.__name__}: {expected}")


def as_array(indices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Indices as `as_index` makes them: of int64 if they fit there, else of objects; shape ``(n,)``."""
    if {*map(type, indices)} != {int}:
        indices = [as_index(index) for index in indices]
    if all(isinstance(index, int) for index in indices):
        with contextlib.suppress(OverflowError):
            return np.array(indices, np.int64)
    found = np.empty(len(indices), object)
    found[:] = indices
    return found


def keys_of(namespace: bytes, indices: Sequence[Index] | np.ndarray[Any, Any]) -> Keys:
    """The keys of n indices from `as_index`, or from `as_array`."""
    if isinstance(indices, np.ndarray):
        if indices.dtype == np.int64:
            return int_keys(namespace, indices)
        indices = indices.tolist()
    if all(type(index) is int for index in indices):
        with contextlib.suppress(OverflowError):
            return int_keys(namespace, np.array(indices, np.int64))
    data = b"".join(map(_key, indices))
    return Keys(namespace, np.frombuffer(data, np.uint8).reshape(-1, 16))


def _key(index: Index) -> bytes:
    if isinstance(index, int):
        if _LEAST <= index <= _MOST:
            return int_keys(bytes(16), np.array([index], np.int64)).data.tobytes()
        return xxh3_128_digest(b"i" + str(index).encode())
    if isinstance(index, bytes):
        return xxh3_128_digest(b"b" + index)
    return xxh3_128_digest(b"s" + index.encode("utf-8", "surrogatepass"))
