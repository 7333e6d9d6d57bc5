"""Identifies datasets and samples: everything that samples depend on, as named parts, and keys of indices.

Code of the dataset and of what it refers to counts by its source, attributes by their values. Files that the
dataset reads later do not count.
"""

from __future__ import annotations

import contextlib
import gc
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
from torch.utils.data import ConcatDataset, Dataset
from xxhash import xxh3_128_digest

from torchcache2.core.keys import Keys, int_keys
from torchcache2.core.logs import logger
from torchcache2.core.settings import CacheSettings
from torchcache2.datasets.options import check
from torchcache2.engine.cache import now as time_now
from torchcache2.engine.randomness import state_of
from torchcache2.identity.codewalk import place_of
from torchcache2.identity.encoding import Encoder, digest, qualified_name, readable, text_bytes, texts_of
from torchcache2.identity.fingerprint import Fingerprint
from torchcache2.identity.guard import MUTABLE, size_of
from torchcache2.identity.marks import __version__
from torchcache2.identity.names import has_fields
from torchcache2.identity.sourcecode import CompiledTexts, names_in
from torchcache2.identity.tensors import TensorWatch
from torchcache2.identity.walk import GENERATORS, Field, Walk

_FORMAT = 1
_MOST_LISTED = 64  # objects in longer containers have no parts
_MOST_PARTS = 5000
_LEAST_BY_KEY = 8  # samples: shorter lists may be sizes or means, and count
_NOT_ITS_OWN = (type, types.ModuleType, types.FunctionType)
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
    by_sample : list of str
        Paths of what was left out, as it has an entry for each sample, whose key says which sample it is.
    ignored : list of str
        Paths of what was left out because the user said so.
    """

    fingerprint: Fingerprint
    unread: list[str]
    generators: list[Any]
    unseeded: Sequence[str] = ()
    by_sample: Sequence[str] = ()
    ignored: Sequence[str] = ()

    @property
    def namespace(self) -> bytes:
        """16 bytes, equal in every process if `unread` is empty."""
        return self.fingerprint.namespace


def identify(
    dataset: Any,
    *,
    name: str | None = None,
    version: str | int | None = None,
    ignore: str | Sequence[str] | None = None,
    code_version: str | int | None = None,
    by_key: bool = False,
    is_mapped: bool = False,
) -> Identity:
    """Read everything that the samples of a dataset depend on, but no sample.

    Parameters
    ----------
    dataset : Dataset
        Any object with ``__getitem__``; stays unchanged. Its tensors and arrays are read whole.
    name : str, optional
        A name that identifies the dataset; then only its length is read.
    version : str or int, optional
        Change it when samples change although code and attributes do not, such as files. 1 is not ``"1"``.
    ignore : str or sequence of str, optional
        Paths of values that no sample depends on.
    code_version : str or int, optional
        Stands for source code and versions of packages.
    by_key : bool
        Whether each sample has a key. Then neither the length counts, nor what has an entry for each sample.
    is_mapped : bool
        Whether a map is made of the samples, which `ignore` may be about.

    Returns
    -------
    Identity
        Its namespace differs if any of these does.

    Raises
    ------
    OptionError
        If `name` is not a text, `version` or `code_version` neither text nor int, or `ignore` no texts.
    """
    check({"name": name, "version": version})
    # The length may depend on files that no attribute mentions.
    length = length_of(dataset)
    settings = CacheSettings(ignore=ignore or (), code_version=code_version)
    given: dict[str, Any] = {"name": name, "version": version, "ignore": settings.ignore or None}
    given |= {"keys": "given"} if by_key else {"length": length}
    if name is not None:
        return Identity(_named("dataset", given), [], _generators(dataset))
    if code_version is not None:
        given |= {"code_version": code_version, "class": place_of(dataset)}
    walk = _walked(dataset, settings, by_key=by_key)
    unmatched = walk.ignore.keys() - set().union(*walk.ignored.values())
    for text in () if is_mapped else unmatched:  # it may be a path of the map
        logger.warning("%s: ignore=%r matches nothing that counts", type(dataset).__name__, text)
    tensors = TensorWatch(walk.tensors)
    tensors.refresh()
    for one in walk.loaded:  # a lazy module that is loaded may have been edited
        walk.parts |= {f"loaded {one.path} {name}": data for name, data in one.parts.items()}
    walk.parts["format"] = f"dataset {_FORMAT}, walk {walk.parts['format'].decode()}".encode()
    unread = sorted({*walk.unread, *tensors.unreadable})
    fingerprint = _fingerprint(walk.parts, given, tensors)
    return Identity(fingerprint, unread, walk.generators, walk.draws, walk.by_sample, sorted(walk.ignored))


def _walked(dataset: Any, settings: CacheSettings, *, by_key: bool) -> _DatasetWalk:
    """A walk of a dataset, including the modules that its code imports at run time.

    Their content counts, even if this process has not imported them yet.
    """
    tried: set[str] = set()
    root = _Given(dataset, by_key=by_key)
    while True:
        walk = _DatasetWalk(root, {}, CompiledTexts(), settings=settings, ignore=settings.ignore)
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
    """The random generators among what a dataset refers to, and what that does, without a walk."""
    found, met, left = [], set[int](), [dataset]
    for value in left:  # grows meanwhile
        kind = type(value)
        if id(value) in met or len(met) >= _MOST_PARTS or issubclass(kind, _NOT_ITS_OWN):
            continue
        met.add(id(value))
        if issubclass(kind, GENERATORS):
            found.append(value)
        else:
            left += gc.get_referents(value)[: 2 * _MOST_LISTED]  # of a dict, keys and values
    return [generator for generator in found if not isinstance(generator, random.SystemRandom)]


class _Given:
    """The root of a walk: a dataset, and whether its samples have keys."""

    def __init__(self, dataset: Any, *, by_key: bool) -> None:
        self.dataset, self.by_key = dataset, by_key


class _DatasetWalk(Walk):
    """A walk with a part for each attribute of the dataset, of the datasets in it, and of other objects.

    Of an object that code uses only by some of its plain fields, such as a configuration, only these count.
    It runs once, without watching: so a dataset may have more objects than a module.

    If samples have keys, containers as long as the dataset, or as one in it, are left out in what is theirs.
    """

    most_objects = 1_000_000
    most_before_bulk = -1
    held_in_bulk = (tuple, list, dict)
    _is_listed = False  # whether an element of a long container is being read
    _is_code = False  # whether code is being read, which may name anything
    _length: int | None = None  # of the dataset being read, if its samples have keys
    _by_key = False
    _owner: type = object  # the class of the object being read

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
            self._by_key, self.by_sample, self._read_later = value.by_key, list[str](), set[str]()
            self._begin(value.dataset)
            return self.encode(value.dataset, path)
        data = super().other(value, path)
        if self.generators and self.generators[-1] is value:
            # The state counts, as a dataset may use a generator's seed without drawing from it.
            data += self.encode(state_of(value), f"{path} (state)")
        return data

    def encode(self, value: Any, path: str) -> bytes:
        """The bytes of `value`; nothing of it if it has an entry for each sample, whose key says it all."""
        if self._is_by_sample(value):
            self.by_sample.append(path or "the dataset")
            return b"-"
        return super().encode(value, path)

    def _is_by_sample(self, value: Any) -> bool:
        is_counted = self._length is None or self._is_code or self._is_listed
        return not is_counted and _entries_of(value) == self._length

    def _begin(self, dataset: Any) -> int | None:
        """Go on with what belongs to a dataset; returns the length of the one before."""
        before, length = self._length, length_of(dataset) if self._by_key else None
        self._length = None if length is None or length < _LEAST_BY_KEY else length
        return before

    def refused(self, value: Any, path: str, error: Exception) -> bytes:
        """Note an object that cannot be read."""
        return self.unreadable(value, path)

    def klass(self, kind: type, path: str) -> bytes:
        """Write down a class, and note which attributes the code of one of torch or Python may read."""
        if self.origins.of(kind) in ("torch", "builtin"):
            methods = [one for one in vars(kind).values() if isinstance(one, types.FunctionType)]
            self.uses.others |= set().union(*[names_in(one.__code__) for one in methods])
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
        before, self._owner = self._owner, kind
        try:
            return self._compound(value, kind, path)
        finally:
            self._owner = before

    def _compound(self, value: Any, kind: type, path: str) -> bytes:
        if not issubclass(kind, Dataset) or issubclass(kind, nn.Module):
            return self._with_fields(value, kind, path)
        if id(value) not in self._labels:
            label = self.label(value, f"dataset {path}".rstrip()).decode()
            length = self._begin(value)
            self.parts[label] = self._with_fields(value, kind, path)
            self._length = length
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
        if self._by_key and issubclass(self._owner, ConcatDataset):  # these are lengths
            state = {name: value for name, value in state.items() if name != "cumulative_sizes"}
        for name in sorted(state):
            where, value = f"{path}.{name}" if path else name, state[name]
            part = f"{kind} {where}"
            is_config = not self._is_code and has_fields(value, set()) and not isinstance(value, Dataset)
            is_config &= not self._is_by_sample(value) and where not in self._read_later
            if is_config:  # read once it is known what code takes of it
                self._read_later.add(where)
                self._attributes.append(Field(self._owner, name, where, value, [], set(), set()))
            else:
                part = self.write(part, self.encode(value, where))
            names.append(text_bytes(part))
        return b"attributes " + b"".join(names)

    def write(self, part: str, data: bytes) -> str:
        """Write a part; returns its name, which is another one if another object has the same path."""
        while self.parts.get(part, data) != data:
            part += "'"
        self.parts[part] = data
        return part


def _entries_of(value: Any) -> int | None:
    """How many entries a plain container, tensor or table of pandas has; None for others."""
    kind = type(value)
    is_plain = kind in (list, tuple, dict, np.ndarray) or issubclass(kind, torch.Tensor)
    is_table = kind.__module__.partition(".")[0] == "pandas" and hasattr(kind, "__len__")
    if not (is_plain or is_table):
        return None
    return None if getattr(value, "ndim", 1) == 0 else len(value)


def document(
    identity: Identity,
    dataset: Any,
    name: str | None = None,
    version: str | int | None = None,
    *,
    by_key: bool = False,
    made_of: Any = None,
    views: int = 1,
    **others: Any,
) -> dict[str, Any]:
    """The description of a dataset's namespace, as JSON for ``fingerprint.json``; options as for `identify`.

    If its samples have keys, datasets of any length have this namespace. `made_of` may be a `Map`.
    """
    said = {
        "length": None if by_key else length_of(dataset),
        "name": name,
        "version": None if version is None else str(version),
        **({"keys": True} if by_key else {}),
        **({} if made_of is None else {"map": made_of.name()}),
        **({} if views == 1 else {"views": views}),
    }
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
    if {*map(type, indices)} <= {int}:
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
