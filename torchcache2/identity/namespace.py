"""`NamespaceKeeper`: the namespace of one module or function, kept up to date as it changes."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from torchcache2.core.logs import WarnOnce, listed, logger, shown
from torchcache2.core.private import autocast_keeps_weights, children_of
from torchcache2.core.process import ProcessLock
from torchcache2.core.settings import CacheSettings
from torchcache2.identity.encoding import UnencodableError, digest, texts_of
from torchcache2.identity.fingerprint import Fingerprint, changes, of_root
from torchcache2.identity.guard import Guard, Undo
from torchcache2.identity.libraries import ShardedError, UnsteadyLayer, sharding, unsteady
from torchcache2.identity.sourcecode import CompiledTexts
from torchcache2.identity.tensors import TensorWatch
from torchcache2.identity.walk import Lazy, Loaded, Walk

_NONE = bytes(16)
_MOST_REMEMBERED = 16


class Snapshot(NamedTuple):
    """A namespace, and the state of the tensors when it was computed.

    With `has_old_casts`, the forward may compute with autocast's copies of earlier weights.
    """

    namespace: bytes
    tensors: TensorWatch
    generation: int
    has_old_casts: bool = False


class Facts(NamedTuple):
    """Facts about a module that decide whether it may be cached; they hold until its structure changes."""

    has_lazy: bool = False  # a parameter is not initialised yet
    is_uncounted: bool = False  # tensors without version counters are too large to compare at every call
    is_parametrized: bool = False  # a submodule is parametrized
    unsteady: UnsteadyLayer | None = None  # the first layer that draws random numbers or mixes items
    names_grad: bool = False  # its code may turn grad mode on
    sharded: str | None = None  # the part that waits for other processes, as weights are sharded


class History:
    """The previous fingerprint of each one: of the same module, else of another module of its class."""

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._before: dict[bytes, Fingerprint] = {}
        self._last: Fingerprint | None = None

    def add(self, before: Fingerprint, now: Fingerprint) -> None:
        """Record a module's new fingerprint; `before` has no parts if there was none."""
        with self._lock():
            previous = before if before.parts else self._last
            if previous is not None and previous.namespace != now.namespace:
                self._before.pop(now.namespace, None)
                self._before[now.namespace] = previous
                while len(self._before) > _MOST_REMEMBERED:
                    del self._before[next(iter(self._before))]
            self._last = now

    def before(self, now: Fingerprint) -> Fingerprint | None:
        """The fingerprint before this one."""
        with self._lock():
            return self._before.get(now.namespace)


class NamespaceKeeper:
    """Walks a module when its structure has changed, and reads its tensors when their content may have.

    Thread-safe. Messages call the module `name`; other modules may share the `history`. All state of an
    object that `is_argument` counts, as unknown code reads it.
    """

    def __init__(
        self, name: str, settings: CacheSettings, history: History | None = None, *, is_argument: bool = False
    ) -> None:
        self.name = name
        self._is_argument = is_argument
        self.unread: list[str] = []  # what could not be read
        self.history = history if history is not None else History()
        self.fingerprint = Fingerprint(_NONE, {})  # as of the last look
        self.generators: list[Any] = []  # random generators that the module refers to
        # Namespaces that may have rows of other weights, as an edit was noticed late.
        self.mistaken: list[bytes] = []
        self.ignored: list[str] = []  # paths left out by the user's `ignore`
        self.arguments: set[str] = set()  # those that it may leave out
        self.walks = 0  # how often code and attributes have been read
        self.methods: set[str] = set()  # methods of an object that are called from outside
        self.lazies: list[Lazy] = []  # lazily loaded modules
        self.beside: dict[str, bytes] = {}  # parts that are not the module's, such as of samples
        self.texts: dict[str, str] = {}  # and their texts
        self._settings = settings
        self._lock = ProcessLock(threading.RLock)
        self._tokens: dict[int, tuple[object, bytes]] = {}
        self._texts = CompiledTexts()
        self._told = WarnOnce()
        self._with_grad: dict[str, str] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything read, so that the next look reads it anew."""
        with self._lock():
            self._guard: Guard | None = None
            # The part that prevents caching.
            self._sharded: Callable[[], nn.Module | None] = lambda: None
            self._loaded: list[Loaded] = []
            self._tensors = TensorWatch({})
            self._facts = Facts()
            self._parts: dict[str, bytes] = {}
            self._values: dict[str, str] = {}
            self._is_known = False
            self._has_old_casts = False
            self._weights: dict[str, bytes] = {}  # their digests as of the last look; namespaces with these
            self._namespaces: list[bytes] = []

    def facts(self, root: Any) -> Facts:
        """Facts about the module as it is now."""
        with self._lock():
            self._notice_structure(root)
            return self._facts

    def path_with_grad(self, root: Any) -> str | None:
        """The path of a tensor of the module that requires grad; None if none does; call `facts` first."""
        path = self._tensors.with_grad
        if path is not None and path not in self._with_grad:  # remembered: a loop asks at each call
            of = f" {path.partition('.')[0]} of "
            kinds = [part for part in self._parts if of in part and part.startswith(("global", "closure"))]
            name = f"{kinds[0].partition(' ')[0]} {path}" if kinds else of_root(_owner(root), path)
            self._with_grad = {path: name}
        return None if path is None else self._with_grad[path]

    def look(self, root: Any) -> Snapshot:
        """The current namespace; for a sharded module, the last one before."""
        with self._lock():
            self._notice_structure(root)
            if self._facts.sharded is not None:
                return Snapshot(self.fingerprint.namespace, self._tensors, self._tensors.generation)
            return self.look_at_tensors()

    def look_at_tensors(self) -> Snapshot:
        """The current namespace; call `facts` first, which checks everything else."""
        with self._lock():
            if not (self._is_known and self._tensors.same()):
                before = self.fingerprint.namespace
                self._read()
                is_new = before not in (_NONE, self.fingerprint.namespace)
                self._has_old_casts |= is_new and self._tensors.with_grad is not None
            self._has_old_casts = self._has_old_casts and autocast_keeps_weights()
            tensors = self._tensors
            namespace, generation = self.fingerprint.namespace, tensors.generation
            return Snapshot(namespace, tensors, generation, self._has_old_casts)

    def put_beside(self, name: str, data: bytes) -> None:
        """Set a part that is not the module's."""
        with self._lock():
            self._is_known &= self.beside.get(name) == data
            self.beside[name] = data

    def holds(self) -> bool:
        """Whether the bytes of tensors that arrived since the last check show no edit."""
        with self._lock():
            return self._tensors.holds()

    def changed_since(self, seen: Snapshot, root: Any) -> str | None:
        """What has changed since the module was read, by path; None if nothing has."""
        with self._lock():
            before, guard, module = self.fingerprint, self._guard, _owner(root)
            found: dict[str, str] = {}
            if seen.tensors.moved() or seen.tensors.generation != seen.generation:
                names = seen.tensors.moved_names()  # empty if another thread has read them
                found = {f"{of_root(module, name)} was written to": name for name in names} or {
                    "a tensor changed": ""
                }
            if before.namespace == seen.namespace:
                if guard is not None and guard.same(module) and guard.contents_same():
                    return _told(found)
                containers = {} if guard is None else guard.changed_containers()
                self._guard = None
                # An assigned value may equal the old one: pruning, for example, assigns weights each time.
                try:
                    if self.look(root).namespace == before.namespace:
                        return _told(found)
                except Exception as error:  # the next call is passed through as unreadable
                    return f"the module changed, and {reading(error)}"
                found |= changes(before, self.fingerprint, containers, module)
            elif (earlier := self.history.before(before)) is not None:  # another thread has looked
                found |= changes(earlier, before, {}, module)
            return _told(found or {"the module changed": ""})

    def undo(self, seen: Snapshot, root: Any) -> Undo:
        """What restores the state as it is now."""
        with self._lock():
            owners = list[Any](self._guard.modules) if self._guard else []
            owners += [root] if _owner(root) is root else []
            return Undo(self._guard, owners, seen.tensors.small_buffers())

    def distrust_tensors(self) -> None:
        """Read the tensors again next time: an optimizer may change them without their version counters."""
        with self._lock():
            self._tensors.forget()

    def distrust_structure(self, *, large: bool) -> None:
        """Read all again next time, unless each change is noticed; with `large`, also in large containers."""
        with self._lock():
            guard = self._guard
            if guard is not None and (guard.is_opaque or (large and guard.has_large)):
                self._guard = None

    def _notice_structure(self, root: Any) -> None:
        """Walk the module again if anything but the content of its tensors has changed."""
        if self._lock.was_torn():
            self.reset()
        module = _owner(root)
        guard = None if self._tensors.has_lazy else self._guard
        self._tensors.same_forms()
        if guard is not None and guard.same(module):
            return
        is_sharded = self._facts.sharded is not None
        if is_sharded and (part := self._sharded()) is not None and sharding(part) is not None:
            return
        self._guard = None  # in case the walk is interrupted
        self.walks += 1
        try:
            walk = Walk(
                root,
                self._tokens,
                self._texts,
                settings=self._settings,
                ignore=self._settings.ignore,
                reads_all=self._is_argument,
                methods=self.methods,
            )
        except ShardedError as stop:
            self._facts, self._sharded = Facts(sharded=str(stop)), stop.part
            self._tensors = TensorWatch({})  # a watched tensor cannot be freed
            return
        self._take(walk)
        self._tell_of(walk)
        self._guard = Guard(walk, module)

    def _take(self, walk: Walk) -> None:
        """Take over what a walk has found."""
        own = self._settings
        given = {"ignore": own.ignore or None, "version": own.version, "code_version": own.code_version}
        options = {"option cache_dtype": str(own.cache_dtype)}
        options |= {f"option {name}": str(value) for name, value in given.items() if value is not None}
        self._parts = {name: digest([data]) for name, data in walk.parts.items()}
        self._parts |= {name: text.encode() for name, text in options.items()}
        self._values = texts_of(walk.parts) | walk.texts() | options
        self._is_known = False
        self._tensors = TensorWatch(walk.tensors, self._tensors)
        self.ignored, self.unread, self.generators = sorted(walk.ignored), walk.unread, walk.generators
        self.lazies, self._loaded = walk.lazies, walk.loaded
        for lazy in self.lazies:
            lazy.watchers.add(self)
        parts = [part for part, _, _ in walk.modules if isinstance(part, nn.Module)]
        self._facts = Facts(
            self._tensors.has_lazy,
            self._tensors.is_blind and own.persistent_module_hash is None,
            any("parametrizations" in children_of(part) for part in parts),
            next(filter(None, map(unsteady, parts)), None),
            walk.names_grad,
        )

    def _tell_of(self, walk: Walk) -> None:
        """Tell of what a walk has left out or could not read."""
        matched = self.arguments.union(*walk.ignored.values())
        for text in walk.ignore.keys() - matched:
            self._tell(
                logger.warning,
                f"ignore={text!r} matches nothing that the key covers: the names of "
                ".cache_instance.fingerprint.parts show paths, such as encoder.0.weight",
            )
        for name in sorted(walk.assigned):
            self._tell(logger.info, f"{name} is assigned by forward and not part of the key")
        if walk.unread and self._settings.persistent_module_hash is None and not self._is_argument:
            names = listed(sorted(set(walk.unread)))
            self._tell(
                logger.warning,
                f"cannot read {names}: the cache is good for this process only, and changes there are "
                "not noticed. Keep such objects out of the module, or set persistent_module_hash",
            )

    def _read(self) -> None:
        """Read the tensors, and compute the namespace."""
        name = self._settings.persistent_module_hash
        self._is_known = False  # in case reading is interrupted
        self._tensors.refresh(read=name is None)
        if self._tensors.unreadable:
            self._tell(
                logger.warning,
                f"cannot read the tensors {listed(self._tensors.unreadable)}: they count as new whenever "
                "they may have changed, and the cache is good for this process only",
            )
        parts, digests = dict(self._parts), dict(self._tensors.digests)
        for one in self._loaded:
            inner = {one.names[path]: digests.pop(path) for path in one.names.keys() & digests.keys()}
            namespace = _with_weights(one.parts, inner).namespace
            if name is None and namespace != one.lazy.expected(one.loader, one.content, self._settings):
                parts[f"loaded {one.path or 'module'}"] = namespace  # edited, or not the loader's
        parts |= {f"weights {path}": data for path, data in digests.items()}
        values = self._values | {f"weights {path}": text for path, text in self._tensors.forms().items()}
        if name is not None:
            options = ("format", "option cache_dtype", "option version")
            parts = {part: self._parts[part] for part in options if part in self._parts}
            parts["persistent_module_hash"] = name.encode()
        fingerprint = Fingerprint.of_parts(parts | self.beside, values | self.texts)
        if self._tensors.is_late:
            self.mistaken += self._namespaces
        if self._tensors.digests != self._weights:
            self._weights, self._namespaces = self._tensors.digests, []
        self._namespaces = [*self._namespaces[-_MOST_REMEMBERED:], fingerprint.namespace]
        if fingerprint.namespace != self.fingerprint.namespace:
            logger.info("%s: namespace %s", self.name, fingerprint.namespace.hex())
            self.history.add(self.fingerprint, fingerprint)
        self.fingerprint = fingerprint
        self._is_known = True

    def _tell(self, log: Callable[[str, str, str], None], text: str) -> None:
        self._told(text, "%s: %s", self.name, text, log=log)


def namespace_of(module: nn.Module, tokens: dict[int, tuple[object, bytes]]) -> bytes:
    """A module's state and code as 16 bytes; `tokens` as for `CodeWalk`. `ShardedError` if it is sharded."""
    walk = Walk((module,), tokens, CompiledTexts())
    tensors = TensorWatch(walk.tensors)
    tensors.refresh()
    digests = dict(tensors.digests)
    for one in walk.loaded:
        for name in one.names.keys() & digests.keys():
            del digests[name]
    return _with_weights(walk.parts, digests).namespace


def _with_weights(walked: Mapping[str, bytes], digests: Mapping[str, bytes]) -> Fingerprint:
    parts = {name: digest([data]) for name, data in walked.items()}
    return Fingerprint.of_parts(parts | {f"weights {path}": data for path, data in digests.items()})


def _told(changes: Mapping[str, str]) -> str | None:
    """The changes, and the option that leaves them out; None for no changes."""
    named = dict.fromkeys(filter(None, changes.values()))
    inside = tuple([f"{path}{sign}" for path in named for sign in ".["])
    paths = tuple([path for path in named if not path.startswith(inside)])
    patterns = repr(paths if len(paths) > 1 else "".join(paths))
    advice = f"; if no output depends on it, ignore={patterns} leaves it out of the key" if paths else ""
    return listed(list(changes)) + advice if changes else None


def reading(error: Exception) -> str:
    """How reading a module has failed, for people."""
    if isinstance(error, UnencodableError):
        return f"reading {error.path or 'it'} raised {error.reason}"
    return f"reading it raised {shown(error)}"


def _owner(root: Any) -> Any:
    """The object whose methods are called; None for a function."""
    return None if isinstance(root, types.FunctionType) else root
