"""Handles misses whose weights are absent: in a `LazyModule`, or in a module on another device.

A `LazyModule` is loaded when it first must compute something. Other modules may be moved away once their
items are cached, because hits need no weights. But a miss does, and torch's error mentions neither the cache
nor a remedy: see `with_device_hint`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import os
import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from torchcache2.core.errors import DeviceError, OptionError
from torchcache2.core.logs import WarnOnce, listed, logger, shown
from torchcache2.core.private import COMPILER_ERRORS
from torchcache2.core.process import ProcessLock
from torchcache2.core.settings import CacheSettings
from torchcache2.engine.randomness import RandomState
from torchcache2.engine.running import opaque
from torchcache2.files.contents import RECENT, FileDigests
from torchcache2.files.directory import Notes
from torchcache2.identity.arguments import BoundCall
from torchcache2.identity.encoding import digest
from torchcache2.identity.libraries import ShardedError, weights_of
from torchcache2.identity.marks import LAZY_ATTRIBUTE
from torchcache2.identity.names import names_of, resolved
from torchcache2.identity.namespace import NamespaceKeeper, Snapshot, namespace_of
from torchcache2.identity.walk import Lazy

_WHY: ContextVar[str] = ContextVar("torchcache2_why", default="it is called without the cache")
_Status = list[tuple[Any, ...]]


def lazies_of(keeper: NamespaceKeeper, call: BoundCall) -> list[Lazy]:
    """The lazy modules in a cached module or function, and in the arguments of a call."""
    return [*keeper.lazies, *[lazy for one in call.objects for lazy in one.keeper.lazies]]


def devices_apart(call: BoundCall, root: Any, seen: Snapshot) -> tuple[str, str] | None:
    """The devices of the batch and of the weights, if they have none in common."""
    weights = list(weights_of(root)) or seen.tensors.tensors  # a `LazyModule` itself has none
    here, there = {tensor.device for _, tensor in call.leaves}, {tensor.device for tensor in weights}
    if not (here and there and here.isdisjoint(there)):
        return None
    return " and ".join(sorted(map(str, here))), " and ".join(sorted(map(str, there)))


@contextlib.contextmanager
def with_device_hint(
    name: str, call: BoundCall, root: Any, seen: Snapshot, positions: Tensor
) -> Iterator[None]:
    """Encloses the forward of some items: explains torch's error if the weights are on another device.

    The forward runs as usual: it may move its weights or inputs itself. Modules loaded meanwhile log this as
    the reason.
    """
    token = _WHY.set(f"{len(positions)} of {call.batch_size} items of a call have to be computed")
    try:
        yield
    except RuntimeError as error:
        apart = devices_apart(call, root, seen)
        if apart is None or not _is_torchs(error):
            raise
        here, there = apart
        moved = "" if there == "meta" else f", or the batch to {there}"  # meta tensors have no content
        said = str(error).partition("\n")[0]
        raise DeviceError(
            f"{name}: {len(set(positions.tolist()))} of the {call.batch_size} items of this call have to be "
            f"computed, but they are on {here}, and all weights on {there}. Move the module to "
            f"{here}{moved}. Only a call whose items are all found needs no weights. (The forward: {said})"
        ) from error
    finally:
        _WHY.reset(token)


def _is_torchs(error: RuntimeError) -> bool:
    """Whether torch may have raised it for tensors of differing devices: its texts name devices or types."""
    kind = type(error)
    is_known = kind in (RuntimeError, NotImplementedError) or kind.__module__ == COMPILER_ERRORS
    return is_known and re.search("device|type|backend|cpu|cuda|meta", str(error), re.IGNORECASE) is not None


class LazyModule(nn.Module):
    """A module that is loaded only when it must compute an item.

    With a persistent cache, a run that finds all items never loads it. The cache identifies it by its
    loader's code and the content of the files, wherever they are.

    The loaded module gets the mode of this one, initially that of ``eval()``, and ``requires_grad_(False)``.
    Loading does not advance random generators. ``parameters()`` and ``state_dict()`` of this module are
    empty: the weights are in the files.

    Parameters
    ----------
    load : callable
        Returns the module; takes no arguments. Its closure is part of the key, except the paths in `files`,
        which it should keep in variables.
    files : path or sequence of paths
        Every file that `load` reads, or folders with all of their files.

    Raises
    ------
    OptionError
        If `load` is not a function, or a file does not exist.

    Examples
    --------
    >>> import os, tempfile
    >>> from torchcache2 import LazyModule, torchcache
    >>> path = os.path.join(tempfile.mkdtemp(), "encoder.pt")
    >>> torch.save(nn.Linear(4, 2).state_dict(), path)
    >>> def load():
    ...     encoder = nn.Linear(4, 2)
    ...     encoder.load_state_dict(torch.load(path, weights_only=True))
    ...     return encoder
    >>> encoder = torchcache(LazyModule(load, files=path))
    >>> encoder.is_loaded
    False
    >>> encoder(torch.rand(3, 4)).shape
    torch.Size([3, 2])
    >>> encoder.is_loaded
    True
    """

    def __init__(
        self,
        load: Callable[[], nn.Module],
        files: str | os.PathLike[str] | list[str | os.PathLike[str]] | tuple[str | os.PathLike[str], ...],
    ) -> None:
        super().__init__()
        self.training = False
        if isinstance(load, nn.Module) or not callable(load):
            raise OptionError(f"load={shown(load)}: expected a function that loads and returns the module")
        paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
        if not paths:
            raise OptionError(
                "files is empty: name the files that the loader reads, as their content says which weights "
                "the module has"
            )
        self.__dict__[LAZY_ATTRIBUTE] = _Lazy(load, tuple([os.fspath(path) for path in paths]))
        self._lazy.status()

    @property
    def _lazy(self) -> _Lazy:
        return self.__dict__[LAZY_ATTRIBUTE]  # type: ignore[no-any-return]

    @property
    def is_loaded(self) -> bool:
        """Whether the module is in memory."""
        return self._lazy.module is not None

    @property
    def module(self) -> nn.Module:
        """The module; loads it if necessary."""
        return self._lazy.load("it is asked for")

    def unload(self) -> None:
        """Free the module. The next miss loads it again, without any edits."""
        self._lazy.unload()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; load it first if necessary."""
        return self._lazy.load(_WHY.get())(*args, **kwargs)

    def method(self, name: str) -> Callable[..., Any]:
        """A function that calls a method of the module, loading it first if necessary."""
        return functools.partial(_call_method, self, name)

    def train(self, mode: bool = True) -> LazyModule:
        """Set the mode, also for the loaded module."""
        super().train(mode)
        self._lazy.training = mode
        if self._lazy.module is not None:
            self._lazy.module.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LazyModule:
        """Move or convert the module. A move happens when it is loaded; anything else loads it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        lazy = self._lazy
        if lazy.module is not None or not lazy.moves(fn):
            module: Any = lazy.load("it is converted, as by .half(): do that in the loader")
            module._apply(fn)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Libraries probe modules for such names: that must not load it.
            if name.startswith(("_", "torchcache_")) or name == "cache_instance":
                raise
            return getattr(self._lazy.load(f"its attribute {name!r} is read"), name)

    def extra_repr(self) -> str:
        """The files, and whether they are loaded."""
        return f"files={list(self._lazy.files)}, is_loaded={self.is_loaded}"


LazyModule.__module__ = "torchcache2"  # the path that pickles name, wherever this file is


def _call_method(module: LazyModule, name: str, /, *args: Any, **kwargs: Any) -> Any:
    return getattr(module._lazy.load(_WHY.get()), name)(*args, **kwargs)


_call_method.__module__ = "torchcache2"


class _Lazy:
    """The loader of a `LazyModule`, and the loaded module. Thread-safe."""

    def __init__(
        self,
        loader: Callable[[], nn.Module],
        files: tuple[str, ...],
        training: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.loader = loader
        self.files = files
        self.module: nn.Module | None = None
        self.training = training
        self.tokens: dict[int, tuple[object, bytes]] = {}
        self.watchers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = ProcessLock(threading.RLock)
        self._device = device  # where to move it after loading
        self._loaded_from: _Status = []  # the files' status at loading
        self._fresh = b""  # its namespace right after loading
        self._mode = b""
        self._read: tuple[_Status, bytes] | None = None  # status of files, and digest of their content
        self._expected: dict[bytes, bytes] = {}
        self._told = WarnOnce()
        self._has_imported = False

    def places(self) -> dict[str, int]:
        """See `Lazy`. Imports what the loader imports, so that the walk can read its code."""
        if not self._has_imported:
            self._has_imported = True
            scope = getattr(self.loader, "__globals__", {})
            code = getattr(self.loader, "__code__", None)
            for name in names_of(code).imports if code is not None else ():
                for full in resolved(name, scope.get("__package__")):
                    with contextlib.suppress(Exception):  # the loader itself will raise this
                        importlib.import_module(full)
        return {os.path.abspath(path): number for number, path in enumerate(self.files)}

    def status(self) -> _Status:
        """The system's facts about each file; `OptionError` if one does not exist."""
        found: _Status = []
        for number, path in enumerate(map(os.path.abspath, self.files)):
            if not os.path.exists(path):
                raise OptionError(f"files: {path!r} does not exist")
            names = _names_in(path) if os.path.isdir(path) else [""]
            if not names:
                raise OptionError(f"files: {path!r} is an empty folder")
            for name in names:
                place = os.path.join(path, name) if name else path
                one = os.stat(place)
                if not stat.S_ISREG(one.st_mode):
                    raise OptionError(f"files: {place!r} is not a regular file")
                state = one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_dev
                found.append((number, name.replace(os.sep, "/"), place, *state))
        return found

    def content(self, settings: CacheSettings | None) -> bytes:
        """See `Lazy`. Random if files change while they are read, or have changed since they were loaded."""
        if settings is not None and settings.persistent_module_hash is not None:
            return b""
        with self._lock():
            try:
                status = self._loaded_from if self.module is not None else self.status()
                if self._read is not None and self._read[0] == status:
                    return self._read[1]
                is_recent = time.time() - max(max(one[4:6]) for one in status) / 1e9 < RECENT
                found = _digest(status, FileDigests(None if settings is None else settings.folder))
                if self.status() != status:
                    found = os.urandom(16)
            except (OSError, OptionError):
                # A file was deleted: the earlier digest still identifies what was loaded.
                return os.urandom(16) if self._read is None else self._read[1]
            self._read = None if is_recent else (status, found)
            return found

    def expected(self, loader: bytes, content: bytes, settings: CacheSettings) -> bytes:
        """See `Lazy`: with a folder, all processes expect the module that the first one loaded.

        A loader may make a different module each time, such as with randomly initialised weights. Their rows
        must not mix. With a `code_version`, that stands for the loader.
        """
        with self._lock():
            if settings.code_version is not None:
                return self._fresh
            key = digest([b"loaded", loader, content, self._mode])
            if key not in self._expected:
                self._expected[key] = Notes(settings.folder).put(key, self._fresh)
            if self._expected[key] != self._fresh:
                self._told(
                    self._fresh.hex(),
                    "the loader of %s made a different module than before, so their rows are kept apart. "
                    "Check that it sets all weights and reads no other file",
                    listed(self.files),
                )
            return self._expected[key]

    @opaque
    def load(self, why: str) -> nn.Module:
        """The module; loads it if necessary, logging the reason `why`."""
        module = self.module
        if module is not None:
            return module
        with self._lock():
            if self.module is not None:
                return self.module
            start, random = time.perf_counter(), RandomState([])
            status = self.status()
            try:
                with torch.inference_mode(False):
                    module = self.loader()
                if not isinstance(module, nn.Module):
                    raise OptionError(
                        f"the loader of {listed(self.files)} returned {shown(module)}, expected a module"
                    )
                module.train(self.training).requires_grad_(False)
                module = module if self._device is None else module.to(self._device)
            finally:
                random.restore()
            self.tokens.clear()
            try:
                self._fresh = namespace_of(module, self.tokens)
            except ShardedError:
                self._fresh = os.urandom(16)
            self._loaded_from, self._mode = status, str(self.training).encode()
            if self.status() != status:
                logger.warning("%s changed while it was loaded", listed(self.files))
                self._read = status, os.urandom(16)
            self.module = module
            logger.info(
                "%s was loaded from %s in %.1f s, as %s",
                *(type(module).__name__, listed(self.files), time.perf_counter() - start, why),
            )
            return module

    def unload(self) -> None:
        """Let go of the module."""
        with self._lock():
            self.module = None
        for keeper in list(self.watchers):
            keeper.reset()

    def moves(self, fn: Callable[[Tensor], Tensor]) -> bool:
        """Whether a function only moves tensors, or does nothing; notes the device."""
        dtypes = torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64
        for dtype, shape in itertools.product(dtypes, ((), (2, 2, 2, 2), (2, 2, 2, 2, 2))):
            tensor = torch.ones(shape, dtype=dtype, device="cpu")
            moved = fn(tensor)
            same = moved.dtype == dtype and moved.stride() == tensor.stride()
            if not same or moved.is_meta or not torch.equal(moved.cpu(), tensor):
                return False
        try:
            moved = fn(torch.ones((), device="meta")) if moved.device.type == "cpu" else moved
        except NotImplementedError:  # meta tensors cannot move to the CPU
            self._device = torch.device("cpu")
        except RuntimeError:  # it does more than move
            return False
        else:
            self._device = self._device if moved.is_meta else moved.device
        return True

    def device(self) -> torch.device:
        """Where the weights are, or will be; loads the module if that is unknown."""
        if self.module is None and (self._device is not None or torch.cuda.device_count() == 0):
            return self._device or torch.device("cpu")
        module = self.load("a call without tensors does not say on which device its output is")
        return next((one.device for one in weights_of(module)), torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lazy:
        twin = _Lazy(self.loader, self.files, self.training, self._device)
        with self._lock():
            twin.module = copy.deepcopy(self.module, memo)
            twin._loaded_from, twin._fresh, twin._mode = self._loaded_from, self._fresh, self._mode
            twin._read, twin._expected = self._read, dict(self._expected)
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        if self.module is not None and namespace_of(self.module, self.tokens) != self._fresh:
            raise TypeError(
                f"the module loaded from {listed(self.files)} was edited, and a pickle would lose the edits: "
                "make them in the loader, or pickle .module"
            )
        return _Lazy, (self.loader, self.files, self.training, self._device)


def _names_in(folder: str) -> list[str]:
    """The files in a folder and its subfolders, following links, by relative name."""
    walk = os.walk(folder, followlinks=True, onerror=_raise)  # a loop of links is an error
    return sorted(
        os.path.relpath(os.path.join(path, name), folder) for path, _, names in walk for name in names
    )


def _raise(error: OSError) -> None:
    raise error


def _digest(status: _Status, files: FileDigests) -> bytes:
    """A digest of the files' content, and of their names in the given folders."""
    parts = []
    for number, name, path, *_ in status:
        content = files.of(path, os.stat(path))
        parts += [f"{number} {name}".encode("utf-8", "surrogateescape"), content]
    return digest(parts)
