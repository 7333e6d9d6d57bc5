"""`Walk`: everything that the output of a forward depends on, written down as named parts.

Code counts by its source, attributes by their values. Hooks, closures, and the globals that code names count
too. Tensors are listed but not read, so that a walk is cheap: `NamespaceKeeper` reads them later.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, MutableSet
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchcache2.core.private import (
    GLOBAL_HOOKS,
    HOOKS,
    PRE_HOOKS,
    REPLICATE,
    SCRIPT,
    SCRIPT_FIELDS,
    buffers_of,
    has_version,
    modules_of,
    parameters_of,
    script_parts,
    version,
)
from torchcache2.core.settings import CacheSettings
from torchcache2.identity.encoding import (
    CONTAINERS,
    Encoder,
    UnencodableError,
    attributes,
    digest,
    qualified_name,
    readable,
    tensor_digest,
    text_bytes,
)
from torchcache2.identity.leftout import without_captures
from torchcache2.identity.libraries import ScriptState, script_code
from torchcache2.identity.marks import INIT_ATTRIBUTE, LAZY_ATTRIBUTE, cache_options, is_method, without_ours
from torchcache2.identity.objectwalk import ObjectWalk, has_plain_state
from torchcache2.identity.sharded import Shards
from torchcache2.identity.sourcecode import CompiledTexts
from torchcache2.identity.uses import unmangled

__all__ = ["Fingerprint", "Lazy", "Loaded", "Walk", "argument_digests"]

_FORMAT = 2
_INTERNAL = {*vars(nn.Module()), LAZY_ATTRIBUTE, REPLICATE}
_COMPILED = (  # attributes that the compiler, and Lightning around it, put on modules and tensors
    *("_dynamo", "_torchdynamo", "_is_torch_compile", "_compiled_call_impl", "_compile_kwargs"),
    *("dynamo_ctx", "get_compiler_config"),
)
_NOISE = ("torchcache_", *_COMPILED)
_PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
_SMALL = 1 << 16
_HOOKS = (PRE_HOOKS, HOOKS)
_WATCHED = (  # what `Watch` and `NamespaceKeeper` take of a walk, lists of which one may follow another
    *("modules", "scopes", "cells", "reads", "dicts", "written", "written_scopes", "written_cells"),
    *("generators", "lazies"),
)
_HOOK_FLAGS = ("with_kwargs", "always_called")


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The named parts behind a namespace.

    Attributes
    ----------
    namespace : bytes
        16 bytes.
    parts : mapping of str to bytes
        Digest of each part by its name, such as ``attribute blocks.0.heads``.
    values : mapping of str to str
        The text of each part that is a short value. The namespace does not depend on these texts.
    """

    namespace: bytes
    parts: Mapping[str, bytes]
    values: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def code(self) -> bytes:
        """A digest of everything but the content of tensors."""
        parts = {name: data for name, data in self.parts.items() if not name.startswith("weights ")}
        return Fingerprint.of_parts(parts).namespace

    @classmethod
    def of_parts(cls, parts: Mapping[str, bytes], values: Mapping[str, str] | None = None) -> Fingerprint:
        """The fingerprint made of some parts."""
        namespace = digest([data for name in sorted(parts) for data in (name.encode(), parts[name])])
        return cls(namespace, dict(parts), values or {})


@dataclasses.dataclass
class _Field:
    """An attribute of a module of the class `kind`, and which parts of it were read."""

    kind: type
    name: str
    path: str
    value: Any
    names: list[str]  # attributes of the module that are watched
    skipped: set[str]  # those that are not
    read: set[str] = dataclasses.field(default_factory=set)
    is_left_out: bool = False


class Lazy(Protocol):
    """What a walk asks of a module that need not be loaded; see `torchcache2.LazyModule`."""

    loader: Callable[[], nn.Module]
    module: nn.Module | None  # None: it is not loaded
    tokens: dict[int, tuple[object, bytes]]  # see `ObjectWalk`
    watchers: MutableSet[Any]  # the keepers that have walked it: they refer to what is loaded

    def places(self) -> dict[str, int]:
        """The files that the loader reads: the number of each by its absolute path."""
        ...

    def content(self, settings: CacheSettings | None) -> bytes:
        """A digest of what is in these files; if the module is loaded, of those that it was loaded from."""
        ...

    def device(self) -> torch.device:
        """Where its weights are, or will be."""
        ...

    def expected(self, loader: bytes, content: bytes, settings: CacheSettings) -> bytes:
        """The namespace that a module loaded by this loader from this content had at first."""
        ...


class Loaded(NamedTuple):
    """A module that was loaded, as a walk has found it."""

    path: str
    lazy: Lazy
    loader: bytes  # digests of the loader, and of the content of its files
    content: bytes
    parts: dict[str, bytes]
    names: dict[str, str]  # what a tensor is called in the walk around it → in the module


class Walk(ObjectWalk):
    """Everything that a module or function computes with, as named parts.

    `tokens` and `texts` are as for `ObjectWalk`. A walk inside of another one gets the `labels` of what that
    has met, by id. `shards` says what happens to sharded modules. What the patterns in `ignore` match is left
    out. With `reads_all`, nothing else is left out for the reason that no code reads it. `methods` are those
    of an object that are called: if there are others than forward, or it is no module, all of them count. The
    `settings` say where digests of files are remembered.
    """

    def __init__(
        self,
        root: Any,
        tokens: MutableMapping[int, tuple[object, bytes]],
        texts: CompiledTexts,
        labels: Mapping[int, bytes] | None = None,
        shards: Shards | None = None,
        settings: CacheSettings | None = None,
        reads_all: bool = False,
        ignore: Iterable[str] = (),
        methods: Collection[str] = (),
    ) -> None:
        super().__init__(tokens, texts)
        self._settings = settings
        self.lazies: list[Lazy] = []  # modules that need not be loaded
        self.loaded: list[Loaded] = []  # those that are
        self.names_grad = False  # whether code may turn grad mode on by itself
        self.uses.is_dynamic = reads_all
        for text in ignore:
            pattern = re.escape(text).replace(r"\*", ".*").replace(r"\?", ".")
            self.ignore[text] = re.compile(pattern, re.DOTALL)
        self._plain_root = root if methods and _has_fields_alone(root) else None  # it is read as a module is
        if set(methods) - {"forward"}:
            self.uses.root = type(root)
        self.shards = shards if shards is not None else Shards()
        self._is_inner = labels is not None
        self._labels.update(labels or {})
        self.tensors: dict[str, Tensor] = {}  # by path; their content becomes part of the namespace later
        self._tensor_names: dict[int, str] = {}
        # Every module that was met, the attributes of it that were read, and those that were left out. A root
        # that is a plain object is among them.
        self.modules: list[tuple[Any, list[str], set[str]]] = []
        self._attributes: list[_Field] = []
        self.parts["format"] = str(_FORMAT).encode()
        self.parts["root"] = self.encode(root, "")
        for hooks in GLOBAL_HOOKS:
            for number, hook in enumerate(hooks.values()):
                self.parts[f"hook (global) {number}"] = self.encode(hook, f"global hook {number}")
        self.finish()
        # To write down what code reads may meet more code, which reads more.
        while self.count_what_is_named() or any(map(self._read_field, self._attributes)) or self._distrust():
            self.finish()
        for field in self._attributes:
            if field.is_left_out:
                self.leave_out(f"{field.kind.__name__}.{field.name}", field.value)
            elif field.path not in field.read:  # what else the constructor took of it is in other attributes
                self.parts.pop(f"constructor argument {field.path}", None)
        for place in self.ignored:  # arguments were read when the module was made, with what is left out now
            for argument in accumulate(place.split("."), "{}.{}".format):
                self.parts.pop(f"constructor argument {argument}", None)
        self.reads += [(attrgetter("__class__", *sorted(names)), one) for one, names in self.taken.values()]
        self.names_grad |= any("enable_grad" in name or "grad_enabled" in name for name in self.parts)

    def compound(self, value: Any, kind: type, path: str) -> bytes:
        """Walk a dataclass or another object."""
        return self._module(value, path) if value is self._plain_root else super().compound(value, kind, path)

    def other(self, value: Any, path: str) -> bytes:
        """Walk modules, code and objects."""
        return self._module(value, path) if isinstance(value, nn.Module) else super().other(value, path)

    def tensor(self, value: Tensor, path: str) -> bytes:
        """List a tensor, to be read later."""
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            return b"s" + self.items(
                [(type(value), path), (context, path)]
                + [(getattr(value, name), f"{path}.{name}") for name in names]
            )
        if not is_lazy(value) and (value.layout != torch.strided or value.is_quantized or value.is_nested):
            return self._parts_of(value, path)
        if value.is_meta:
            return b"meta" + self.encode([value.dtype, tuple(value.shape)], path)
        if id(value) in self._tensor_names:
            return b"the same as " + text_bytes(self._tensor_names[id(value)])
        name = path
        while name in self.tensors:
            name += "'"
        self._tensor_names[id(value)] = name
        self.tensors[name] = value
        state = {k: v for k, v in attributes(value).items() if not k.startswith(_COMPILED)}
        return text_bytes(name) + (self.state(state, path) if state else b"")

    def _parts_of(self, value: Tensor, path: str) -> bytes:
        """A tensor that is not dense, as the dense ones that it is made of."""
        self.reads.append((_version, value))  # some of these are copies
        if value.layout == torch.sparse_coo and value.is_coalesced():
            stored = value.detach()
            parts: list[Any] = [stored.indices(), stored.values()]
        elif value.layout == torch.sparse_csr:
            parts = [value.crow_indices(), value.col_indices(), value.values()]
        elif value.is_quantized and value.qscheme() == torch.per_tensor_affine:
            parts = [value.q_scale(), value.q_zero_point(), value.int_repr()]
        elif value.is_quantized and value.qscheme() in _PER_CHANNEL:
            scales, points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
            parts = [scales, points, value.q_per_channel_axis(), value.int_repr()]
        else:
            return self.unreadable(value, path)
        return b"S" + self.encode([str(value.layout), tuple(value.shape), *parts], path)

    def rank(self, element: Any) -> bytes:
        """Bytes to sort by: an element's label, its content, or what a separate walk of it writes."""
        if id(element) in self._labels:
            return self._labels[id(element)]
        try:
            return Encoder().encode(element, "")
        except UnencodableError:
            pass
        if self._is_inner:
            return b""  # the element may contain this set, which would never end
        walk = Walk(element, self._tokens, self._texts, self._labels, self.shards)
        small = [tensor for tensor in walk.tensors.values() if tensor.nbytes <= _SMALL]
        return digest([Fingerprint.of_parts(walk.parts).namespace, *map(tensor_digest, small)])

    def _module(self, module: Any, path: str) -> bytes:
        if id(module) in self._labels:
            return self._labels[id(module)]
        before, self.is_foreign = self.is_foreign, self.origins.of(type(module)) == "installed"
        try:
            return self._new_module(module, path)
        finally:
            self.is_foreign = before

    def _new_module(self, module: Any, path: str) -> bytes:
        is_module = isinstance(module, nn.Module)
        if is_module and self.shards.takes(module):
            return self.label(module, f"module {path}")
        reference = self.label(module, f"module {path}")
        path = reference.decode().removeprefix("module ")  # labels are unique, so this path is unique too
        kind = type(module)
        where = f"{path}." if path else ""
        head = self.klass(kind, path)  # its code says which attributes are read
        if path:
            self._hooks(module, where)
        for tensors in (parameters_of(module), buffers_of(module)) if is_module else ():
            for name, tensor in tensors.items():
                if tensor is not None and not self.ignores(tensor, f"{where}{name}"):
                    self.parts[f"tensor {where}{name}"] = self.encode(tensor, f"{where}{name}")
        submodules = dict(modules_of(module).items()) if is_module else {}
        children = self.without_ignored(submodules, where)
        for name, child in children.items():
            if child is not None:
                self.parts[f"child {where}{name}"] = self._module(child, f"{where}{name}")
        # Attributes come after the submodules, so that one that refers to a submodule writes only its label.
        fields = {
            name: value
            for name, value in sorted(without_ours(self._made_by_tools(module, path)).items())
            if name not in _INTERNAL and not name.startswith(_NOISE)
        }
        kept = self.without_ignored(fields, where)
        # What stands in the place of the root's own methods refers to the cache, which would refer to itself.
        names = [name for name in kept if path or fields[name] is vars(module)[name]]
        if path and "cache_instance" in vars(module):
            names += ["cache_instance", *[name for name, one in vars(module).items() if is_method(one)]]
            names = list(dict.fromkeys(names))
        skipped = fields.keys() - kept.keys()
        self.modules.append((module, names, skipped))
        for name, value in self.without_skipped(kind, kept, path).items():
            field = _Field(kind, name, f"{where}{name}", value, names, skipped)
            self._attributes.append(field)
            self._read_field(field)
        if LAZY_ATTRIBUTE in vars(module):
            self._lazy(vars(module)[LAZY_ATTRIBUTE], path)
        if path and (options := cache_options(module)):
            self.parts[f"cached {path}"] = self.encode(options, path)
        init, unread = vars(module).get(INIT_ATTRIBUTE, ({}, ()))
        self.unread += unread
        self.parts |= {f"constructor argument {where}{name}": data for name, data in init.items()}
        self.parts[f"training {path}".rstrip()] = self.encode(getattr(module, "training", False), path)
        self.parts[reference.decode()] = head + Encoder().encode(list(children), path)
        if not path:  # hooks of the root run outside of the forward: what they collect does not matter
            containers = dict(self.containers)
            self._hooks(module, where)
            self.containers = containers
        return reference

    def _lazy(self, lazy: Lazy, path: str) -> None:
        """Write down how a module is loaded. If it is, it is watched as any other.

        What the module is counts only if that is not what the loader makes. So it has a walk of its own, in
        which it is no root, as its hooks run inside of the forward.
        """
        where = f"{path}." if path else ""
        self.lazies.append(lazy)
        self.reads.append((_module_of, lazy))
        loader = _LoaderWalk(lazy, self._tokens, self._texts, settings=self._settings)
        self.parts |= {f"loader {where}{name}": data for name, data in loader.parts.items()}
        self.unread += loader.unread
        self._take_over(loader, f"{where}loader")
        content = lazy.content(self._settings)
        self.parts[f"files {path}".rstrip()] = content
        if lazy.module is not None:
            inner = Walk(
                (lazy.module,), lazy.tokens, self._texts, shards=self.shards, settings=self._settings
            )
            names = self._take_over(inner, path)
            code = Fingerprint.of_parts(loader.parts).namespace
            self.loaded.append(Loaded(path, lazy, code, content, inner.parts, names))

    def _take_over(self, inner: Walk, path: str) -> dict[str, str]:
        """Have what another walk has met watched; the names of its tensors there, by those that they get."""
        mine: dict[str, str] = {}
        for name, tensor in inner.tensors.items():
            mine[name] = f"{path}.{name.removeprefix('[0]').removeprefix('.')}".strip(".")
            while mine[name] in self.tensors:
                mine[name] += "'"
            self.tensors[mine[name]] = tensor
        for field in _WATCHED:
            getattr(self, field).extend(getattr(inner, field))
        self.containers |= inner.containers
        self.not_imported |= inner.not_imported
        self.names_grad |= inner.names_grad
        for one in inner.loaded:
            self.loaded.append(one._replace(names={mine.pop(name): its for name, its in one.names.items()}))
        return {theirs: name for name, theirs in mine.items()}

    def _hooks(self, module: nn.Module, where: str) -> None:
        before, self.in_hook = self.in_hook, bool(where)
        for hooks in _HOOKS:
            for number, (key, hook) in enumerate(without_captures(vars(module).get(hooks, {}))):
                name = f"{where}{hooks}[{number}]"
                flags = [key in vars(module).get(f"{hooks}_{flag}", ()) for flag in _HOOK_FLAGS]
                self.parts[f"hook {name}"] = self.encode([hook, *flags], name)
        self.in_hook = before

    def _made_by_tools(self, module: nn.Module, path: str) -> dict[str, Any]:
        """The attributes of a module without those that stand for its code, which this writes down."""
        fields = vars(module)
        # Generated code may read any attribute.
        self.uses.is_dynamic |= isinstance(module, (torch.fx.GraphModule, torch.jit.ScriptModule))
        if isinstance(module, torch.fx.GraphModule):
            _ = module.code  # a lazy graph makes the code of its class when it is first read
            # The class may have the code of an earlier graph; an interpreter runs the graph as it is now.
            self.parts[f"graph {path}".rstrip()] = self.encode(module.graph, path)
        if not isinstance(module, torch.jit.ScriptModule) or SCRIPT not in fields:
            return fields
        part, parts = f"script {path}".rstrip(), script_parts(module)
        if parts is None:
            self.parts[part] = self.unreadable(module, path)
            return {name: value for name, value in fields.items() if name not in SCRIPT_FIELDS}
        state = ScriptState(parts)
        code = script_code(parts.methods) if state.is_plain else None
        if code is None:
            self.parts[part] = self.unreadable(module, path)
        else:
            tensors = {*parameters_of(module).keys(), *buffers_of(module).keys()}
            plain = {name: value for name, value in state.values.items() if name not in tensors}
            self.parts[part] = self.encode([code, parts.constants, plain], path)
            self.reads.append((state, module))
        own = SCRIPT_FIELDS.union(method.name for method in parts.methods)
        return {name: value for name, value in fields.items() if name not in own}

    def _distrust(self) -> bool:
        """Write down containers that code only adds to, if something may tell their content all the same."""
        catches = self.uses.of(object).catches
        doubted = [one for one in self.written if self.unread or (catches and isinstance(one[1], dict))]
        due = [one for one in doubted if id(one[1]) not in self.containers]
        for name, container in due:
            self.parts[f"global {name}"] = self.encode(container, name)
        return bool(due)

    def _read_field(self, field: _Field) -> bool:
        """Write down what code reads of an attribute; whether that is more than was known before."""
        key = f".{unmangled(field.name)}"
        uses = self.uses.of(field.kind)
        field.is_left_out = uses.only_writes(key, field.value)
        is_skipped = field.is_left_out and key in uses.assigned
        if is_skipped and field.name in field.names:
            field.names.remove(field.name)
            field.skipped.add(field.name)
        elif not is_skipped and field.name in field.skipped:
            field.names.append(field.name)
            field.skipped.remove(field.name)
        pairs = [] if field.is_left_out else self.read_of(uses, key, field.value, field.path)
        new = [(value, path) for value, path in pairs if path not in field.read]
        for value, path in new:
            field.read.add(path)
            self.parts[f"attribute {path}"] = self.encode(value, path)
        return bool(new)


def _has_fields_alone(value: Any) -> bool:
    """Whether an object, no module, has all of its state in its ``__dict__``."""
    odd = (nn.Module, types.FunctionType, *CONTAINERS)
    if isinstance(value, odd) or type(getattr(value, "__dict__", None)) is not dict:
        return False
    return has_plain_state(value) and attributes(value).keys() == vars(value).keys()


def _module_of(lazy: Lazy) -> tuple[nn.Module | None]:
    return (lazy.module,)


def _version(tensor: Tensor) -> tuple[str]:
    # The same object as long as it is equal.
    return (sys.intern(str(version(tensor))) if has_version(tensor) else "",)


class _LoaderWalk(Walk):
    """Walks a loader. The path of a file that it reads counts as that file's number: its content counts."""

    def __init__(self, lazy: Lazy, *args: Any, **kwargs: Any) -> None:
        self._places = lazy.places()
        super().__init__(lazy.loader, *args, **kwargs)

    def encode(self, value: Any, path: str) -> bytes:
        """Write down a path as a number."""
        place = os.path.abspath(value) if isinstance(value, (str, os.PathLike)) and value else None
        number = self._places.get(place) if isinstance(place, str) else None
        return super().encode(value, path) if number is None else b"file" + text_bytes(str(number))


class _Arguments(Walk):
    """Walks constructor arguments: tensors by content, modules by class, as these are walked elsewhere."""

    def tensor(self, value: Tensor, path: str) -> bytes:
        """Read a tensor at once."""
        if is_lazy(value):
            return b"lazy"
        try:
            return Encoder.tensor(self, value, path)
        except (UnencodableError, NotImplementedError, RuntimeError, TypeError):
            return self.unreadable(value, path)

    def _module(self, module: nn.Module, path: str) -> bytes:
        return text_bytes(qualified_name(type(module)))


def argument_digests(arguments: Mapping[str, Any]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """The bytes that stand for each constructor argument, and the names of those that cannot be read."""
    digests: dict[str, bytes] = {}
    unreadable: list[str] = []
    texts = CompiledTexts()
    for name, value in arguments.items():
        walk = _Arguments(value, {}, texts)
        root = walk.parts["root"]
        is_whole = walk.parts.keys() == {"format", "root"} and readable(root) is not None
        digests[name] = root if is_whole else b"#" + Fingerprint.of_parts(walk.parts).namespace
        unreadable += [f"argument {path or name}" for path in walk.unread]
    return digests, tuple(unreadable)
