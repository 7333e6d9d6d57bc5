"""The arguments of a call: the batched ones, and canonical bytes of all others.

`Signature` binds the arguments of a call to names, and an `ArgumentEncoder` reads them: tensors are batched,
sequences named in `item_args` have one entry per item, objects with state count by their current state and
code, and everything else counts, as bytes, for all items. `BoundCall.take` makes the call for some of the
items.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
import os
import pathlib
import re
import stat
import struct
import sys
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128, xxh3_128_digest

from torchcache2.core.errors import InputError, OptionError, UnhashableArgumentError, hint
from torchcache2.core.logs import listed
from torchcache2.core.memory import is_channels_last, select, sent
from torchcache2.core.private import has_version, modes, version
from torchcache2.core.process import ProcessLock
from torchcache2.core.settings import CacheSettings
from torchcache2.core.values import has_attributes, leaves_of, mapped, opened_or_none
from torchcache2.identity import encoding, sourcecode
from torchcache2.identity.encoding import Encoder, UnencodableError, sized, text_bytes
from torchcache2.identity.marks import cache_options
from torchcache2.identity.namespace import NamespaceKeeper, Snapshot
from torchcache2.identity.walk import has_plain_state

Digests = np.ndarray[Any, np.dtype[np.uint8]]
Content = Callable[[bytes, os.stat_result], bytes]

_ARRAYS = (np.ndarray, np.memmap)  # compared with the exact type, as a masked array also has a mask
_SHORT = 256  # bytes; copying so few is cheaper than hashing in two steps
_ENTRIES = "_encodings"  # the attribute of a tokenizer's output with one object per text
_MOST_KEEPERS = 64
_DEFAULT = b"default"
_ELEMENT = re.compile(r"(\w+)\[\d+\]")  # the path of a tensor in a list
_KINDS = inspect.Parameter
_LONGEST_SUFFIX = 13  # characters, with its dot
_LONGEST_PATH = 4096
_MOST_FILES = 1000  # in a folder among the arguments
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
_ONE = (str, bytes, os.PathLike)  # an argument that may be an item by itself
_UNCHANGING = (Tensor, torch.nn.Parameter, *_PLAIN)
_MISSING = object()


class UncachedArgumentError(Exception):
    """An argument for which the call bypasses the cache; the text says which one, and why."""


class Single(list[Any]):
    """One text, bytes or path, where a call has no batch: the call is one item. A longer one has several."""


# Sequences with one entry per item, and mappings other than dicts, such as the output of a tokenizer.


class _Column(NamedTuple):
    """Another library's class for a column of a table, by its module."""

    module: str
    name: str
    # A column's other state; the entries' type, as text, comes first.
    form: Callable[[Any], list[Any]]
    entries: Callable[[Any], Any]
    take: Callable[[Any, list[int]], Any]  # a column of the entries at some positions


def _is_numbered(series: Any) -> bool:
    """Whether the labels of a pandas series are just positions."""
    index = series.index
    return type(index).__name__ == "RangeIndex" and index.start == 0 and index.step == 1


def _series_entries(series: Any) -> list[Any]:
    entries = series.tolist()
    return entries if _is_numbered(series) else list(zip(series.index.tolist(), entries, strict=True))


def _of_series(series: Any, positions: list[int]) -> Any:
    taken = series.iloc[positions]
    return taken.reset_index(drop=True) if _is_numbered(series) else taken


def _of_dataset(column: Any, positions: list[int]) -> Any:
    if hasattr(column.source, "select"):
        return type(column)(column.source.select(positions), column.column_name)
    return column[positions]  # a nested column, as a list


_COLUMNS = (
    _Column("pandas", "Series", lambda c: [str(c.dtype), c.name, c.attrs], _series_entries, _of_series),
    *[
        _Column("pyarrow", name, lambda c: [str(c.type)], lambda c: c.to_pylist(), lambda c, at: c.take(at))
        for name in ("Array", "ChunkedArray")
    ],
    _Column(
        "datasets.arrow_dataset",
        "Column",
        lambda c: [repr(c.features), c.column_name],
        lambda c: c[:],
        _of_dataset,
    ),
)


def _column(value: Any) -> _Column | None:
    """How to read a column of a table; None for other values, and for categories."""
    for column in _COLUMNS:
        kind = getattr(sys.modules.get(column.module), column.name, None)
        # Only the library's own classes: a user's subclass may have state besides its entries.
        if kind is not None and isinstance(value, kind) and type(value).__module__.startswith(column.module):
            return None if column.form(value)[0].startswith(("category", "dictionary")) else column
    return None


def _is_sequence(value: Any) -> bool:
    """Whether a value may have one entry per item."""
    return value.ndim > 0 if isinstance(value, np.ndarray) else isinstance(value, (list, tuple))


def _is_plain_sequence(value: Any) -> bool:
    """Whether a value is a sequence with nothing but entries, so that some can be taken."""
    return (type(value) in (list, tuple, Single, *_ARRAYS) and _is_sequence(value)) or _column(
        value
    ) is not None


def _digests(value: Any, path: str, encode: Callable[[Any, str], bytes]) -> Digests:
    """A digest of each entry of a list, tuple, array or column of n entries, shape ``(n, 16)``."""
    head, entries = b"", value
    if isinstance(value, np.ndarray):
        head = text_bytes(f"{encoding.dtype_text(value)} {value.shape[1:]}")
        entries = value.tolist() if value.dtype.hasobject or value.dtype.kind == "U" else None
    elif (column := _column(value)) is not None:
        head, entries = encode(column.form(value), path), column.entries(value)
    if entries is not None:
        digests = [xxh3_128_digest(head + encode(one, f"{path}[{i}]")) for i, one in enumerate(entries)]
    elif value.ndim > 1 and value.nbytes > _SHORT * len(value):
        digests = [_digest_of(head, row) for row in value]
    else:
        digests = [xxh3_128_digest(head + row.tobytes()) for row in value]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16)


def _digest_of(head: bytes, row: Any) -> bytes:
    """The digest of a head and a row's bytes, which are not copied if contiguous."""
    state = xxh3_128(head)
    state.update(np.ascontiguousarray(row).reshape(-1).view(np.uint8).data)
    return state.digest()


def _take_entries(value: Any, positions: Tensor) -> Any:
    """The entries at some positions, in a sequence of the same kind."""
    if isinstance(value, np.ndarray):
        return value[positions.numpy()]
    if (column := _column(value)) is not None:
        return column.take(value, positions.tolist())
    # Copy containers: if a forward changes one, it runs again, and must change the caller's only once.
    taken = [mapped(_copied, value[i]) for i in positions.tolist()]
    return taken if type(value) is list else type(value)(taken)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if type(leaf) in (np.ndarray, set, bytearray) else leaf


def _mapping_entries(value: UserDict[Any, Any]) -> list[Any] | None:
    """The attribute of a mapping with one entry per item."""
    entries = vars(value).get(_ENTRIES)
    return entries if isinstance(entries, list) and entries else None


def argument_leaves(args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """All values except containers among the arguments of a call."""
    leaves = []
    for leaf in leaves_of((args, dict(kwargs))):
        leaves += argument_leaves((), leaf.data) if isinstance(leaf, UserDict) else [leaf]
    return leaves


# Objects.


class ObjectSeen(NamedTuple):
    """An object among the arguments of a call, its keeper, and its state as seen for this call."""

    value: Any
    keeper: NamespaceKeeper
    seen: Snapshot


class _ObjectKeepers:
    """A `NamespaceKeeper` for each object that calls get as an argument. Thread-safe.

    Holds modules weakly, so that a module passed for a while, such as a text encoder, can be freed.
    """

    def __init__(self, code_version: str | int | None = None) -> None:
        self._lock = ProcessLock()
        self._settings = CacheSettings(code_version=code_version)
        self._keepers: dict[int, tuple[Callable[[], Any], NamespaceKeeper]] = {}

    def look(self, value: Any, path: str) -> ObjectSeen:
        """The current state and code of an object; `UnencodableError` if they cannot be read."""
        keeper = self._keeper(value)
        # An object of a project class may hold data that changes between two calls.
        is_own = sourcecode.origin(type(value)) not in ("installed", "torch")
        if not isinstance(value, nn.Module):
            keeper.distrust_structure(large=is_own)
        seen = keeper.look(value)
        if keeper.unread:
            raise UnencodableError(path, value, f"of which {listed(sorted(keeper.unread))} cannot be read")
        if keeper.generators:
            raise UnencodableError(path, value, "that has a generator of random numbers")
        return ObjectSeen(value, keeper, seen)

    def _keeper(self, value: Any) -> NamespaceKeeper:
        keepers, key = self._keepers, id(value)
        with self._lock():
            reference, keeper = keepers.get(key, (None, None))
            if reference is None or keeper is None or reference() is not value:
                if len(keepers) >= _MOST_KEEPERS:
                    keepers.clear()
                keeper = NamespaceKeeper(type(value).__name__, self._settings, is_argument=True)
                try:
                    # A keeper keeps submodules and weights alive, so it must go with its module.
                    reference = weakref.ref(value, lambda _: keepers.pop(key, None) and None)
                except TypeError:
                    reference = lambda: value  # noqa: E731
                keepers[key] = reference, keeper
            return keeper


# The bytes of a call.


def _may_be_path(value: Any) -> bool:
    """Whether a value may name a file or folder: it has a suffix such as ``.safetensors``, or a slash.

    Most texts with a slash are prose: those with a space must begin like a path.
    """
    if type(value) not in (str, bytes):
        return hasattr(type(value), "__fspath__")
    if len(value) > _LONGEST_PATH:
        return False
    text = os.fsdecode(value)
    _, dot, suffix = text[-_LONGEST_SUFFIX:].rpartition(".")
    if dot and suffix.isalnum():
        return True
    return os.sep in text and (text[0] in "./" or " " not in text) and text.strip(os.sep) != ""


def _state_of(place: bytes) -> bytes:
    try:
        found = os.stat(place)
    except OSError:  # a link to nothing, or it is gone
        return sized(place)
    is_file = stat.S_ISREG(found.st_mode)
    return sized(place) + (struct.pack("<qq", found.st_size, found.st_mtime_ns) if is_file else b"")


class ValueEncoder(Encoder):
    """Canonical bytes of plain values, tensors and files by content, images, and folders with their state.

    ``content(path, status)`` returns a digest of a file's content.
    """

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def encode(self, value: Any, path: str) -> bytes:
        """The bytes of `value`, or of the file that it names."""
        return self._of_path(value, path) if _may_be_path(value) else super().encode(value, path)

    def _of_path(self, value: Any, path: str) -> bytes:
        """The bytes of what may be a path.

        A file counts by its content and, as readers choose by it, its suffix, wherever it is. A folder
        counts with its name, and the names, sizes and times of all that is in it; `UnencodableError` if that
        is too much.
        """
        data = super().encode(value, path)
        try:
            found, name = os.stat(value), os.path.abspath(os.fsencode(value))
        except (OSError, ValueError, TypeError):
            return data
        if stat.S_ISREG(found.st_mode):
            try:
                content = self._content(name, found)
            except OSError:  # its user may not read it either
                return data + _state_of(name)
            # An empty file says nothing, and other classes of paths may have more state.
            is_file_alone = found.st_size and isinstance(value, (str, bytes, pathlib.PurePath))
            kind, suffix = type(value).__name__, os.path.splitext(name)[1]
            head = b"file " + text_bytes(kind) + sized(suffix.lower())
            return (head if is_file_alone else data) + content
        if not stat.S_ISDIR(found.st_mode):
            return data
        places, folders = [name], [name]
        for folder in folders:  # grows meanwhile
            with contextlib.suppress(OSError), os.scandir(folder) as entries:
                inside = sorted(itertools.islice(entries, _MOST_FILES), key=attrgetter("path"))
                places += [one.path for one in inside]
                folders += [one.path for one in inside if one.is_dir(follow_symlinks=False)]
            if len(places) > _MOST_FILES:
                raise UnencodableError(path, value, f"a folder with more than {_MOST_FILES:,} files")
        return data + b"".join(map(_state_of, places))

    def other(self, value: Any, path: str) -> bytes:
        """Encode columns of tables, PIL images, and a tokenizer's encodings."""
        if (column := _column(value)) is not None:
            entries = [self.kind(type(value), path).hex(), column.form(value), list(column.entries(value))]
            return b"V" + self.encode(entries, path)
        images = sys.modules.get("PIL.Image")
        if images is not None and isinstance(value, images.Image):
            if getattr(value, "is_animated", False):
                raise UnencodableError(path, value, "with several frames, of which only one could count")
            value.load()  # an opened file's `info` is complete only now
            # Conversions of an image also read its palette and `info`.
            palette = value.palette and value.getpalette(value.palette.mode)
            head = [value.mode, value.size, palette, value.format, dict(value.info)]
            return b"B" + self.encode(head, path) + xxh3_128_digest(value.tobytes())
        if encoding.qualified_name(type(value)) == "tokenizers.Encoding":
            return b"N" + self.encode(value.__getstate__(), path)
        return super().other(value, path)


class ArgumentEncoder(ValueEncoder):
    """Collects arguments that are, or may be, batched, and encodes the rest.

    `elsewhere` is advice for objects that cannot be read; `keepers` read the others. With `takes_arrays`,
    arrays are batched like tensors.
    """

    def __init__(
        self, content: Content, elsewhere: str, keepers: _ObjectKeepers, *, takes_arrays: bool = False
    ) -> None:
        super().__init__(content)
        self.leaves: list[tuple[str, Tensor]] = []  # batched tensors
        self.shared: list[Tensor] = []  # tensors that count by content
        self.entries: list[tuple[str, Digests]] = []  # of sequences with one entry per item
        self.taken: set[int] = set()  # ids of those that are, or are in, arguments
        self.sequences: list[tuple[str, Any]] = []  # other sequences, which may have one entry per item
        self.objects: list[ObjectSeen] = []
        self._keepers, self._elsewhere, self._takes_arrays = keepers, elsewhere, takes_arrays
        self._is_shared = self._is_in_entry = False
        self._unregistered = ""

    def argument(self, value: Any, path: str, *, is_shared: bool, has_entries: bool) -> bytes:
        """Collect the batched parts of an argument; returns the bytes of the rest."""
        if has_entries and not _is_plain_sequence(value):
            raise InputError(
                f"argument {path} is a {type(value).__qualname__}: item_args expects a list, tuple, array or "
                "column with one entry per item. Pass a list of one to have one item"
            )
        self._is_shared = is_shared or has_entries
        try:
            return self._taken(value, path) if has_entries else self.encode(value, path)
        except UnencodableError as error:
            raise UnhashableArgumentError(
                f"argument {error.path} is a {type(error.value).__qualname__}"
                f"{f' ({error.reason})' if error.reason else ''}, which cannot be put in a key. Pass "
                f"tensors, numbers, texts, and containers of them; {self._elsewhere}{hint(error.value)}"
            ) from None

    def _taken(self, value: Any, path: str) -> bytes:
        self._add_entries(value, path)
        self.taken.add(id(value))
        return b"E" + self.kind(type(value), path)

    def _add_entries(self, value: Any, path: str) -> None:
        self._is_in_entry = True
        self.entries.append((path, _digests(value, path, self.encode)))
        self._is_in_entry = False

    def tensor(self, value: Tensor, path: str) -> bytes:
        """Collect a batched tensor, or encode the content of one that belongs to the whole batch."""
        if value.is_nested or value.layout != torch.strided or value.is_quantized:
            kind = "nested" if value.is_nested else "quantized" if value.is_quantized else str(value.layout)
            raise UnencodableError(path, value, f"{kind}, not dense")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise UncachedArgumentError(f"argument {path} is a {type(value).__qualname__}, a kind of Tensor")
        if value.is_meta:
            raise UncachedArgumentError(f"argument {path} is a meta tensor, without data")
        if self._is_shared:
            self.shared.append(value)
            # Convolutions pass on the memory format, so it counts as for batched tensors.
            is_last = value.dim() in (4, 5) and is_channels_last(value)
            return super().tensor(value, path) + (b"channels last" if is_last else b"")
        if self._unregistered:
            reason = (
                f"inside of {self._unregistered}, which is not a registered pytree node that can be rebuilt"
            )
            raise UnencodableError(path, value, reason)
        if has_attributes(value):
            raise UncachedArgumentError(f"argument {path} is a tensor with attributes of its own")
        for other, leaf in self.leaves:
            if leaf is value:
                return b"the same as " + other.encode()  # a forward may ask whether ``query is key``
        self.leaves.append((path, value))
        return path.encode()

    def other(self, value: Any, path: str) -> bytes:
        """Read modules, functions, tokenizers and other callable objects like closures.

        Objects that are not callable may be data, such as a model's state for its next call.
        """
        is_code = isinstance(value, (torch.nn.Module, types.FunctionType, types.MethodType))
        is_object = callable(value) and hasattr(value, "__dict__") and has_plain_state(value)
        if self._is_in_entry or not (is_code or is_object):
            return super().other(value, path)
        found = self._keepers.look(value, path)
        self.objects.append(found)
        options = cache_options(value) if isinstance(value, torch.nn.Module) else []
        return b"M" + found.seen.namespace + self.encode(options, path)

    def inside_itself(self, value: Any, path: str) -> bytes:
        """Refuse a container that contains itself: items cannot be taken from it."""
        raise UnencodableError(path, value, "that holds itself")

    def _encode_compound(self, value: Any, kind: type, path: str) -> bytes:
        is_array = isinstance(value, np.ndarray) and _is_plain_sequence(value)
        if is_array and self._takes_arrays and not (self._is_shared or self._unregistered):
            return self._taken(value, path)
        found, outer = len(self.leaves), self._unregistered
        is_rebuilt = kind in (tuple, list, dict) or isinstance(value, UserDict)
        if not is_rebuilt and opened_or_none(value) is None:  # `BoundCall.take` cannot rebuild it
            self._unregistered = kind.__qualname__
        data = super()._encode_compound(value, kind, path)
        self._unregistered = outer
        if _is_sequence(value) and not self._is_shared and len(self.leaves) == found:
            self.sequences.append((path, value))
        return data

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Encode the children of what `take` can rebuild: mappings and registered pytree nodes."""
        if isinstance(value, UserDict):
            state = {name: item for name, item in vars(value).items() if name != "data"}
            if (entries := _mapping_entries(value)) is not None:
                del state[_ENTRIES]
                self._add_entries(entries, f"{path}.entries")
            outer, self._unregistered = self._unregistered, kind.__qualname__
            head = self.kind(kind, path) + sized(self.encode(state, path))
            self._unregistered = outer
            return b"U" + head + Encoder.contents(self, value.data, path)
        node = opened_or_none(value)
        if node is None or node[0] is not kind:  # such as a named tuple
            return super().compound(value, kind, path)
        head = self.kind(kind, path) + sized(self.encode(node[1], path))
        return b"P" + head + self.items([(c, f"{path}[{i}]") for i, c in enumerate(node[2])])

    def batch_size(self) -> int:
        """How many items a call has; raises if nothing is batched, or batch sizes differ."""
        sizes = []
        for path, tensor in self.leaves:
            if tensor.dim() == 0:
                raise InputError(
                    f"argument {path} is a tensor without dimensions: the batch must be its first. Pass it "
                    "as a number, or name it in shared_args"
                )
            sizes.append((tensor.shape[0], path, f"shape {tuple(tensor.shape)}"))
        sizes += [(len(digests), path, f"{len(digests)} entries") for path, digests in self.entries]
        if not sizes:
            lists = [path for path, _ in self.sequences if path.isidentifier()]
            advice = "Name lists with one entry per item in item_args"
            if lists:
                advice = f"If {lists[0]} has one entry per item, pass item_args={lists[0]!r}"
            raise InputError(
                "no batched tensor among the arguments: the first dimension of at least one tensor or array "
                f"must be the batch, and its name not in shared_args. {advice}"
            )
        count, first, what = sizes[0]
        for size, path, other in sizes:
            if size != count:
                lists = [found[1] for one in (path, first) if (found := _ELEMENT.match(one))]
                advice = f", or pass item_args={lists[0]!r} if it has one entry per item" if lists else ""
                raise InputError(
                    f"batch sizes differ: {first} has {what}, {path} has {other}. Name arguments that belong "
                    f"to the whole batch in shared_args{advice}"
                )
        return count


@dataclasses.dataclass(eq=False)  # frozen ones are several times slower to make
class BoundCall:
    """One call of a forward."""

    args: tuple[Any, ...]  # as the caller gave them
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]  # the parameter of each of `args`
    leaves: list[tuple[str, Tensor]]  # batched tensors with their paths
    entries: list[tuple[str, Digests]]  # digests of the entries of arguments with one entry per item
    # Other sequences as long as the batch, not known to have one entry per item.
    maybe_per_item: list[tuple[str, Digests]]
    context: bytes  # canonical bytes of the other arguments, `maybe_per_item` ones included
    batch_size: int
    taken: set[int]  # ids of the sequences of `entries`
    maybe_per_item_ids: set[int]  # ids of those of `maybe_per_item`
    shared: tuple[str, ...]  # parameters whose tensors belong to the whole batch
    shared_tensors: list[Tensor]  # tensors that belong to the whole batch, or are in entries
    objects: list[ObjectSeen]  # modules and other objects with state

    def __post_init__(self) -> None:
        self._versions = self._versions_now()

    @property
    def is_one(self) -> bool:
        """Whether the call is one item, without a batch: see `Single`."""
        return len(self.taken) > 0 and any(type(one) is Single for one in (*self.args, *self.kwargs.values()))

    def _versions_now(self) -> list[int]:
        tensors = [*self.shared_tensors, *[tensor for _, tensor in self.leaves]]
        return [version(tensor) for tensor in tensors if has_version(tensor)]

    def was_written(self) -> bool:
        """Whether anything, such as another thread, has written to the caller's tensors since."""
        return self._versions_now() != self._versions

    @property
    def device(self) -> torch.device | None:
        """The device of the first batched tensor, else of the first in an object; None without any."""
        tensors = [tensor for _, tensor in self.leaves] or [
            t for one in self.objects for t in one.seen.tensors.tensors
        ]
        return tensors[0].device if tensors else None

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of batched tensors, and of the tensors of objects."""
        return {t.dtype for _, t in self.leaves}.union(*[one.seen.tensors.dtypes for one in self.objects])

    @property
    def requires_grad(self) -> bool:
        """Whether an argument requires grad."""
        tensors = [*self.shared_tensors, *(tensor for _, tensor in self.leaves)]
        return any(tensor.requires_grad for tensor in tensors)

    @property
    def can_change(self) -> bool:
        """Whether an argument other than a tensor may be changed in place."""
        return any(type(value) not in _UNCHANGING for value in (*self.args, *self.kwargs.values()))

    def take(
        self, positions: Tensor, *, maybe_per_item: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a call with the items at `positions` (int64, CPU) alone.

        With `maybe_per_item`, arguments as long as the batch are split too, as if each had an entry per item.
        """
        index = sent(positions, [tensor.device for _, tensor in self.leaves])
        picked = {id(t): select(t, index[t.device]) for _, t in self.leaves}
        taken = self.taken | self.maybe_per_item_ids if maybe_per_item else self.taken

        def has_entries(value: Any) -> bool:
            return id(value) in taken

        def replaced(leaf: Any) -> Any:
            if has_entries(leaf):
                return _take_entries(leaf, positions)
            if not isinstance(leaf, UserDict):
                return picked.get(id(leaf), leaf)
            copied = copy.copy(leaf)
            copied.data = {key: each(item) for key, item in leaf.data.items()}
            if (entries := _mapping_entries(leaf)) is not None:
                setattr(copied, _ENTRIES, _take_entries(entries, positions))
            return copied

        def each(value: Any) -> Any:
            return mapped(replaced, value, is_leaf=has_entries)

        def pick(name: str, value: Any) -> Any:
            if name in self.shared:
                return value
            return picked[id(value)] if isinstance(value, Tensor) else each(value)

        args = tuple([pick(name, value) for name, value in zip(self.names, self.args, strict=True)])
        return args, {name: pick(name, value) for name, value in self.kwargs.items()}

    def is_changed(self, now: BoundCall, positions: Tensor) -> bool:
        """Whether arguments taken at some positions have changed, according to `now`, their new binding."""
        entries = [digests[positions.numpy()] for _, digests in self.entries]
        same = len(entries) == len(now.entries) and all(
            np.array_equal(before, after) for before, (_, after) in zip(entries, now.entries, strict=True)
        )
        return not same or self.context != now.context


class Signature:
    """Names the arguments of a forward, which for a module is a bound method.

    `method` is part of the key, as two methods of an object may get equal arguments. Tensors of the
    parameters in `shared` belong to the whole batch, and those in `item_args` have one entry per item. Raises
    `OptionError` for names of no parameter. Those in `ignore` reach the forward as they are, and have no key.
    ``content(path, status)`` returns a digest of a file's content.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        shared: Iterable[str],
        item_args: Iterable[str] = (),
        method: str = "forward",
        ignore: Iterable[str] = (),
        code_version: str | int | None = None,
        content: Content,
    ) -> None:
        self._content = content
        self._head = [b"()", method.encode()] if method != "forward" else []
        self._signature = inspect.signature(function)
        parameters = list(self._signature.parameters.values())
        self._keepers = _ObjectKeepers(code_version)
        self._renamed: dict[str, Any] = {}  # new names of parameters, by older names
        self._starts: dict[tuple[str, ...], bytes | None] = {}  # see `_start`
        self._elsewhere = "have the function close over other objects"
        if inspect.ismethod(function):
            self._elsewhere = "keep other objects as attributes of the module"
        elif parameters and parameters[0].name == "self":
            self._elsewhere = "decorate the method in the body of its class, or of one object: object.method"
        positional = (_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)
        self._positional = tuple(p.name for p in parameters if p.kind in positional)
        self._variadic = next((p.name for p in parameters if p.kind is _KINDS.VAR_POSITIONAL), None)
        self._keywords = next((p.name for p in parameters if p.kind is _KINDS.VAR_KEYWORD), None)
        # Large models have dozens of such defaults, so encode them once.
        plain = [parameter for parameter in parameters if type(parameter.default) in _PLAIN]
        plain = [one for one in plain if not _may_be_path(one.default)]
        self._defaults: dict[str, tuple[bytes, ...]] = {
            p.name: (p.name.encode(), self._encode_default(p)) for p in plain
        }
        # How many arguments are required by position if none is given by name.
        required = [
            p
            for p in parameters
            if p.default is _KINDS.empty and p.name not in (self._variadic, self._keywords)
        ]
        is_simple = all(p.kind is not _KINDS.KEYWORD_ONLY for p in required)
        self._required = len(required) if is_simple else len(self._positional) + 1
        self._shared = self._options("shared_args", function, shared, method)
        names = [one for one in ignore if one in self._signature.parameters or self._keywords is not None]
        self.ignored = {one for one in names if one.isidentifier()}
        self._shared += tuple(self.ignored)
        self._defaults |= dict.fromkeys(self.ignored, ())
        self._item_args = self._options("item_args", function, item_args, method)
        if self._variadic in self._item_args:
            raise OptionError(f"item_args: *{self._variadic} is not one sequence with one entry per item")

    def _options(
        self, option: str, function: Callable[..., Any], given: Iterable[str], method: str
    ) -> tuple[str, ...]:
        """The parameters named by an option, and their new names if it has older ones."""
        names = list(self._signature.parameters)
        found = tuple(given)
        for name in found:
            if name not in names and (new := _new_name(function, name)) in names:
                self._renamed[name] = new
                found += (new,)
            elif name not in names and self._keywords is None:
                title = getattr(function, "__name__", method)
                raise OptionError(f"{option}: {title} has no parameter {name!r}; it has {', '.join(names)}")
        return found

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall:
        """Name the arguments of a call, and separate batched tensors from the rest.

        Raises
        ------
        TypeError
            If the arguments do not fit the signature, as in Python.
        InputError
            If nothing is batched, or batch sizes differ.
        UnhashableArgumentError
            If an argument cannot be put in a key.
        UncachedArgumentError
            If an argument is of a subclass of Tensor, or has no data.
        """
        is_short = self._required <= len(args) <= len(self._positional) and not kwargs
        if is_short and (call := self._bind_tensors(args)) is not None:
            return call
        is_plain = all(type(value) in _PLAIN for value in (*args, *kwargs.values()))
        if is_plain and (call := self._bind_one(args, kwargs)) is not None:
            return call
        if not is_short:
            named = {self._renamed.get(name, name): value for name, value in kwargs.items()}
            if len(named) < len(kwargs):
                raise TypeError("an argument by both of its names")
            arguments: Mapping[str, Any] = self._signature.bind(*args, **named).arguments
        else:
            arguments = dict(zip(self._positional, args, strict=False))
        # An array is batched only if no tensor or `item_args` is: beside these, it may be shared.
        is_told = self._item_args or any(
            isinstance(value, Tensor) and name not in self._shared for name, value in arguments.items()
        )
        encoder, parts = self._read(arguments, takes_arrays=not is_told)
        if not is_told and encoder.leaves and encoder.taken:
            encoder, parts = self._read(arguments, takes_arrays=False)
        may_be_one = not (encoder.leaves or encoder.entries or is_plain) and all(
            type(value) is tuple for _, value in encoder.sequences
        )
        if may_be_one and (call := self._bind_one(args, kwargs)) is not None:
            return call
        batch_size = encoder.batch_size()
        maybe_per_item = [(path, value) for path, value in encoder.sequences if len(value) == batch_size > 0]
        names = self._positional[: len(args)]
        names += (self._variadic or "",) * (len(args) - len(names))
        kinds = {tensor.device.type for _, tensor in encoder.leaves}
        return BoundCall(
            args,
            kwargs,
            names,
            encoder.leaves,
            encoder.entries,
            [
                (path, _digests(value, path, ValueEncoder(self._content).encode))
                for path, value in maybe_per_item
            ],
            b"".join(map(sized, [*parts, text_bytes(modes(kinds))])),
            batch_size,
            encoder.taken,
            {id(value) for _, value in maybe_per_item},
            self._shared,
            encoder.shared,
            encoder.objects,
        )

    def _bind_one(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> BoundCall | None:
        """Like `bind`, for a call without a batch that is one item; None if it has no text, bytes or path."""

        def single(name: str, value: Any) -> Any:
            is_one = isinstance(value, _ONE) and name not in self._shared
            return Single([value]) if is_one else value

        one = tuple(map(single, self._positional, args))
        named = {name: single(name, value) for name, value in kwargs.items()}
        is_one = any(type(value) is Single for value in (*one, *named.values()))
        return self.bind((*one, *args[len(one) :]), named) if is_one else None

    def _bind_tensors(self, args: tuple[Any, ...]) -> BoundCall | None:
        """Like `bind`, for the usual call with just batched tensors by position; None for others."""
        names = self._positional[: len(args)]
        start = self._starts[names] if names in self._starts else self._start(names)
        if start is None or not all(map(_is_dense, args)) or len({*map(id, args)}) < len(args):
            return None
        size, leaves = args[0].shape[0], [*zip(names, args, strict=True)]
        if len(args) > 1 and any(value.shape[0] != size for value in args[1:]):
            return None
        context = start + sized(text_bytes(modes({value.device.type for value in args})))
        return BoundCall(args, {}, names, leaves, [], [], context, size, set(), set(), (), [], [])

    def _start(self, names: tuple[str, ...]) -> bytes | None:
        """The start of the context of a call with batched tensors for these parameters; None if unknown."""
        parameters = self._signature.parameters
        plain = {*names, *self._defaults, self._variadic, self._keywords}
        if not names or self._shared or self._item_args or not parameters.keys() <= plain:
            self._starts[names] = None
            return None
        parts = [*self._head]
        for name in parameters:
            batched = [name.encode(), b"T" + sized(name.encode())]
            parts += batched if name in names else self._defaults.get(name, ())
        self._starts[names] = b"".join(map(sized, parts))
        return self._starts[names]

    def _read(
        self, arguments: Mapping[str, Any], *, takes_arrays: bool
    ) -> tuple[ArgumentEncoder, list[bytes]]:
        """What is batched among named arguments, and the bytes of the rest."""
        encoder = ArgumentEncoder(self._content, self._elsewhere, self._keepers, takes_arrays=takes_arrays)
        parts = [*self._head]
        for name, parameter in self._signature.parameters.items():
            value = arguments.get(name, _MISSING)
            if name in self.ignored or (value is _MISSING and name in self._defaults):
                parts += self._defaults[name]
            elif value is _MISSING:
                if parameter.default is _KINDS.empty:
                    continue  # *args or **kwargs without any
                data = self._encode_default(parameter)
                parts += [name.encode(), data]
                if _is_sequence(parameter.default) and name not in self._shared and data != _DEFAULT:
                    encoder.sequences.append((name, parameter.default))
            elif name == self._keywords:
                for keyword, argument in value.items():
                    if keyword in self.ignored:
                        continue
                    path = f"{name}[{keyword!r}]"
                    parts += [path.encode(), self._encode(encoder, keyword, argument, path)]
            else:
                parts += [name.encode(), self._encode(encoder, name, value, name)]
        return encoder, parts

    def count(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        """How many items a call that is not cached seems to have; 1 if that cannot be told."""
        named = dict(zip(self._positional, args, strict=False)) | dict(kwargs)
        listed = [named[name] for name in self._item_args if _is_plain_sequence(named.get(name))]
        if listed:
            return len(listed[0])
        values = [*args[len(self._positional) :], *[v for k, v in named.items() if k not in self._shared]]
        try:
            leaves = argument_leaves(values, {})
            direct = [*values, *leaves]
            sizes = [leaf.size(0) for leaf in direct if isinstance(leaf, Tensor) and leaf.dim()]
            sizes += [len(leaf) for leaf in leaves if type(leaf) in _ARRAYS and leaf.ndim]
            return next(iter(sizes), 1)
        except Exception:  # a list that contains itself, or a tensor whose class raises
            return 1

    def _encode(self, encoder: ArgumentEncoder, name: str, value: Any, path: str) -> bytes:
        # Beside a batch, a single text has no entries: all items share it. Without one, it is the item.
        is_listed = name in self._item_args and not isinstance(value, (Tensor, *_ONE, type(None)))
        has_entries = is_listed or type(value) is Single
        return encoder.argument(value, path, is_shared=name in self._shared, has_entries=has_entries)

    def _encode_default(self, parameter: inspect.Parameter) -> bytes:
        # The value is part of the namespace already. It is encoded so that a call that gives that value has
        # the same key.
        try:
            return ValueEncoder(self._content).encode(parameter.default, parameter.name)
        except UnencodableError:
            return _DEFAULT


def _is_dense(value: Any) -> bool:
    """Whether a value is a tensor of torch's own type, with a batch, its data, and nothing besides."""
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta or has_attributes(value))
        and value.dim() > 0
    )


def _new_name(function: Any, name: str) -> Any:
    """The parameter that a wrapper passes an argument of an older name to; None if it has none.

    The wrapper has a dict of such names, as sentence-transformers has ``{"sentences": "inputs"}``.
    """
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                if isinstance(cell.cell_contents, dict) and name in cell.cell_contents:
                    return cell.cell_contents[name]
        function = getattr(function, "__wrapped__", None)
    return None
