"""`Watch`: notices at every call whether what a fingerprint was made of is still what it was.

Attributes, submodules, hooks, globals and closures are compared by identity. Tensors are compared
by storage address, shape, strides and version counter, and, because ``.data`` edits and numpy writes
move none of them, by the first bytes of each tensor and in turn by the first 4 KB of one. What this
does not see: an edit of a part of one tensor through ``.data``, until its turn comes and only if it is
within the first 4 KB, and a list or dict changed in place.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from xxhash import xxh3_64_digest

from torchcache2.digest import UnencodableError, tensor_digest
from torchcache2.fingerprint import GLOBAL_HOOKS, Walk

__all__ = ["TensorWatch", "Watch"]

_ALWAYS = (
    "training",
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_pre_hooks",
    "_forward_hooks",
)
_HEAD = 64
_PROBE = 4096
_COPIED = 16 << 20

# Arrays are buffers, which older type checkers do not know.
Bytes1D = Any

_Fields = Callable[[dict[str, Any]], tuple[Any, ...]]

_State = tuple[list[int], list[Any], list[Any], list[torch.dtype], list[int]]

_values: Callable[[Any], Iterable[Any]] = dict.values
_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")
_version: Callable[[Tensor], int] = attrgetter("_version")


class Watch:
    """What a walk has seen of code, attributes and modules.

    It refers to the root module only weakly, through what the caller passes: a strong reference to the
    module's attributes would make a cycle through the cache that is one of them.
    """

    def __init__(self, walk: Walk, root: nn.Module | None) -> None:
        self._root: _Fields = _no_fields
        self._root_left_out: set[str] = set()
        self._fields: list[tuple[_Fields, dict[str, Any]]] = []
        self._left_out: list[tuple[dict[str, Any], set[str]]] = []
        self.modules: list[nn.Module] = []
        dicts: list[Collection[Any]] = list(GLOBAL_HOOKS)
        contents: list[dict[Any, Any]] = list(GLOBAL_HOOKS)
        for module, names, left_out in walk.modules:
            fields = vars(module)
            found = [fields.get(name) for name in _ALWAYS[1:]]  # scripted modules have other kinds
            contents += [content for content in found if isinstance(content, dict)]
            # Wrappers of modules, such as compiled ones, keep some of these elsewhere.
            getter = itemgetter(*[name for name in _ALWAYS if name in fields], *names)
            if module is root:
                self._root, self._root_left_out = getter, left_out
                continue
            self.modules.append(module)
            self._fields.append((getter, fields))
            if left_out:
                self._left_out.append((fields, left_out))
            else:
                dicts.append(fields)
        self._dicts = [*dicts, *contents, *walk.dicts]
        self._filled = [content for content in contents if content]
        self._scopes = [(scope, name) for scope, name, _ in walk.scopes]
        self._cells = [cell for cell, _ in walk.cells]
        self._reads = walk.reads
        self._sizes = self._measure(root)
        self._seen = self._look(root)
        # What changed while it was walked was not seen as it is now.
        known = [value for _, _, value in walk.scopes] + [value for _, value in walk.cells]
        self._is_stale = not all(map(is_, self._seen, known))

    def same(self, root: nn.Module | None) -> bool:
        """Whether everything is still what it was."""
        if self._is_stale or self._measure(root) != self._sizes:
            return False
        try:
            now = self._look(root)
        except (AttributeError, KeyError, ValueError):  # an attribute or the content of a cell is gone
            return False
        return all(map(is_, now, self._seen))

    def _measure(self, root: nn.Module | None) -> list[int]:
        """How many attributes, parameters, submodules and hooks there are; changes with each new one."""
        sizes = list(map(len, self._dicts))
        for fields, left_out in self._left_out:
            sizes.append(len(fields) - len(left_out & fields.keys()))
        if root is not None:
            fields = vars(root)
            sizes.append(len(fields) - len(self._root_left_out & fields.keys()))
        return sizes

    def _look(self, root: nn.Module | None) -> list[Any]:
        now = [scope.get(name) for scope, name in self._scopes]
        now += [cell.cell_contents for cell in self._cells]
        if root is not None:
            now.append(type(root))
            now += self._root(vars(root))
        now += map(type, self.modules)
        now += chain.from_iterable([read(value) for read, value in self._reads])
        now += chain.from_iterable([getter(fields) for getter, fields in self._fields])
        now += chain.from_iterable(map(_values, self._filled))
        return now


def _no_fields(fields: dict[str, Any]) -> tuple[Any, ...]:
    return ()


class TensorWatch:
    """The content of some tensors: read once, and again when it may have changed.

    Attributes
    ----------
    digests : dict of str to bytes
        Digest of each tensor by its path, as of the last `refresh`.
    unreadable : list of str
        Tensors whose content cannot be read.
    dtypes : set of torch.dtype
        Of all tensors.
    generation : int
        How often `refresh` has been called.
    """

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.digests: dict[str, bytes] = {}
        self.unreadable: list[str] = []
        self.generation = 0
        self._named = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        self.tensors = list({id(tensor): tensor for tensor in self._named.values()}.values())
        self.dtypes = {tensor.dtype for tensor in self.tensors}
        self.has_lazy = len(self._named) < len(tensors)
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._state: _State | None = None
        self._follows = False
        self._heads: list[Bytes1D] = []
        self._head_bytes = b""
        self._probes: list[bytes] = []
        self._turn = 0

    def moved(self) -> bool:
        """Whether a tensor has other storage or another version than at the last `refresh`."""
        return self._look() != self._state

    def same(self) -> bool:
        """Whether every tensor seems to have the content that was read."""
        if self.moved() or b"".join(self._heads) != self._head_bytes:
            return False
        if self.tensors:
            self._turn = (self._turn + 1) % len(self.tensors)
            return _probe(self.tensors[self._turn]) == self._probes[self._turn]
        return True

    def refresh(self, *, read: bool = True) -> None:
        """Read every tensor; without `read`, only remember what could tell of a change."""
        if not self._follows and any(tensor.requires_grad for tensor in self.tensors):
            self._follow_optimizers()
        state, self._state = self._look(), None  # should reading be interrupted
        self.generation += 1
        self.unreadable = []
        digests: dict[int, bytes] = {}
        for name, tensor in self._named.items() if read else ():
            try:
                if id(tensor) not in digests:  # tied weights have several names
                    digests[id(tensor)] = tensor_digest(tensor)
            except (RuntimeError, TypeError, NotImplementedError, UnencodableError):
                self.unreadable.append(name)
                digests[id(tensor)] = os.urandom(16)
        self.digests = {n: digests[id(t)] for n, t in self._named.items() if id(t) in digests}
        self._heads = [_first_bytes(t, _HEAD) for t in self.tensors if t.device.type == "cpu"]
        self._head_bytes = b"".join(self._heads)
        self._probes = list(map(_probe, self.tensors))
        self._state = state

    def forget(self) -> None:
        """Have the next `same` say no, and let go of the storage that is watched."""
        self._heads, self._state = [], None

    def _look(self) -> _State:
        tensors = self.tensors
        return (
            list(map(_pointer, tensors)),
            list(map(Tensor.stride, tensors)),
            list(map(Tensor.size, tensors)),
            list(map(_dtype, tensors)),
            list(map(_version, self._counted)),
        )

    def small_buffers(self) -> list[Tensor]:
        """Tensors that a forward may write to and that are cheap to copy."""
        buffers = [tensor for tensor in self.tensors if type(tensor) is not nn.Parameter]
        return buffers if sum(tensor.nbytes for tensor in buffers) <= _COPIED else []

    def _follow_optimizers(self) -> None:
        # Fused ones move no version counter.
        watch = weakref.ref(self)

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            if (this := watch()) is not None:
                this.forget()

        self._follows = True
        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without storage
        return 0


def _first_bytes(tensor: Tensor, count: int) -> Bytes1D:
    """About `count` bytes where a tensor's storage starts; on the CPU a view that follows its content."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
        return np.empty(0, np.uint8)
    start, size = tensor.storage_offset(), tensor.element_size()
    end = min(start + -(-count // size), tensor.untyped_storage().nbytes() // size)
    view = tensor.detach().as_strided((max(0, end - start),), (1,), start)
    return view.view(torch.uint8).cpu().numpy()


def _probe(tensor: Tensor) -> bytes:
    return xxh3_64_digest(_first_bytes(tensor, _PROBE))
