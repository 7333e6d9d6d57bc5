"""`TensorWatch`: reads the content of tensors once, and again when it may have changed.

Tensors are compared by storage address, dtype, shape, strides and version counter. Edits through ``.data`` or
NumPy change none of these. So each call also compares tiny tensors, and the first bytes of all others, and
reads the next 64 KB of all content again: this finds any edit after one round. On a GPU, a call copies the
first bytes of one tensor and the next 64 KB to the host without waiting, and they are compared once they have
arrived: with the keys of a batch on that GPU, else at a later call. Tensors made under `torch.inference_mode`
have no version counters: if they are small, all of their bytes are compared.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from xxhash import xxh3_64_digest, xxh3_128, xxh3_128_digest

from torchcache2.core.memory import CUDA, Arriving, Runtime
from torchcache2.core.private import form_check, has_version, version
from torchcache2.identity.encoding import UnencodableError, form, tensor_digest
from torchcache2.identity.xxh3 import DIGESTS

_HEAD = 64
_TINY = 256  # bytes; smaller tensors are compared whole at every call
_PROBE = 4096
_PIECE = 1 << 16  # bytes that a call reads again, some 4 µs
_SPREAD = 64  # further bytes compared before a digest is reused
_COPIED = 16 << 20
_MOST_UNCOUNTED = 500_000  # bytes, some 40 µs at every call

# Arrays are buffers, which older type checkers reject.
Bytes1D = Any

_form: Callable[[Tensor], tuple[Any, ...]] = attrgetter("dtype", "shape")


@dataclasses.dataclass(eq=False)
class _Read:
    """What was read from a tensor, and what would reveal a change of its content."""

    tensor: Tensor
    memory: Bytes1D | None  # its memory, if on the host
    mark: tuple[Any, ...] | None  # see `TensorWatch._marked`; None if it may miss changes
    sample: tuple[bytes, bytes]  # the bytes that each call compares, and further ones
    storage: StorageWeakRef | None  # if it is freed, another tensor may have its address
    digest: bytes = b""  # empty: not read yet
    content: bytes | None = None  # the digest of its memory span, if that was read

    def is_at(self, mark: tuple[Any, ...] | None) -> bool:
        """Whether this still describes the tensor that has this mark now."""
        is_same = self.storage is not None and mark is not None and self.mark == mark
        return is_same and not self.storage.expired()  # type: ignore[union-attr]

    @property
    def size(self) -> int:
        """Bytes that it spans."""
        return _span(self.tensor) if self.memory is None else len(self.memory)


class _Scan:
    """Reads tensors again, piece by piece; after the last piece of each, compares its digest."""

    def __init__(self) -> None:
        self.queue: list[_Read] = []
        self._turn = self._start = 0
        self._hasher = xxh3_128()

    def go_on(self, queue: list[_Read]) -> None:
        """Read these tensors from now on, continuing with the current one if it is among them."""
        if self.queue and self.queue[self._turn] in queue:
            self._turn = queue.index(self.queue[self._turn])
        else:
            self._turn %= max(1, len(queue))
            self._start, self._hasher = 0, xxh3_128()
        self.queue = queue

    def piece(self) -> Any:
        """The next piece to read: host memory, or a tensor elsewhere."""
        one = self.queue[self._turn]
        memory = _head(one.tensor, one.size) if one.memory is None else one.memory
        return memory[self._start : self._start + _PIECE]

    def read(self, piece: Bytes1D) -> bool:
        """Add the bytes of the piece; False if they complete a tensor that has changed."""
        one = self.queue[self._turn]
        self._hasher.update(piece)
        self._start += len(piece)
        if self._start < one.size:
            return True
        found = self._hasher.digest()
        self._turn = (self._turn + 1) % len(self.queue)
        self._start, self._hasher = 0, xxh3_128()
        return found == one.content


class TensorWatch:
    """The content of some tensors, by path: read once, and again when it may have changed.

    Does not read again what a watch `before` has read of these tensors.
    """

    def __init__(
        self, tensors: dict[str, Tensor], before: TensorWatch | None = None, runtime: Runtime = CUDA
    ) -> None:
        self.digests: dict[str, bytes] = {}  # as of the last `refresh`
        self.unreadable: list[str] = []  # paths of tensors whose content cannot be read
        self.generation = 0  # how often `refresh` has been called
        # Whether the last `refresh` found an edit that an earlier call may have missed.
        self.is_late = False
        self.with_grad: str | None = None  # the first path that requires grad, as of the last `same_forms`
        self._runtime = runtime
        self._named = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        self.tensors = list({id(tensor): tensor for tensor in self._named.values()}.values())
        self.dtypes = {tensor.dtype for tensor in self.tensors}
        self.has_lazy = len(self._named) < len(tensors)
        self._counted = [tensor for tensor in self.tensors if has_version(tensor)]
        self._uncounted = [tensor for tensor in self.tensors if not has_version(tensor)]
        total = sum(map(_span, self._uncounted))
        # Whether tensors without version counters are too large to compare at every call.
        self.is_blind = total > _MOST_UNCOUNTED or not all(map(_is_plain, self._uncounted))
        self._are_plain = all(map(_is_plain, self.tensors))
        self._forms: list[Any] = []
        self._has_forms: Callable[..., bool] | None = None
        self._state: list[list[Any]] | None = None  # what `_look` saw; None: read everything again
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._heads: list[Bytes1D] = []
        self._head_bytes = b""
        self._wholes: list[Any] = []  # tensors without version counters: host memory, or the tensor
        self._far: list[Tensor] = []
        self._turn = 0
        self._scan: _Scan = _Scan() if before is None else before._scan
        # Whether a tensor has changed without a change of its counter.
        self._is_doubtful: bool = before is not None and before._is_doubtful
        # The id of the tensor whose first bytes arrived from an accelerator for the last call, if any.
        self._compared = 0
        self._lags = False  # whether there was a call since bytes were sent
        # Bytes on their way to the host: the tensor's id, how many of its first bytes, and whether a piece of
        # the scan follows.
        self._arriving: tuple[int, int, bool, Arriving] | None = None
        known: dict[int, _Read] = {} if before is None else before._known
        mine = [id(tensor) for tensor in self.tensors]  # new tensors may get other ids
        self._known: dict[int, _Read] = {key: known[key] for key in mine if key in known}
        if self.tensors:
            self._follow_optimizers()
        self.same_forms()

    def same_forms(self) -> bool:
        """Whether each tensor has the same dtype, shape and strides as before; notes if any requires grad."""
        if self._has_forms is not None and self._has_forms(*self.tensors):
            return True
        forms = [(*_form(tensor), tensor.stride()) for tensor in self.tensors]
        self.with_grad = next((path for path, one in self._named.items() if one.requires_grad), None)
        self._has_forms = form_check(self.tensors) if self._are_plain else None
        before, self._forms = self._forms, forms
        if forms != before:
            self._state = None
        return forms == before

    def moved(self) -> bool:
        """Whether a tensor has got other storage, or was seen to be written to, since the last `refresh`."""
        is_same = self.same_forms() and self._look() == self._state
        return not is_same or b"".join(self._heads) != self._head_bytes

    def moved_names(self) -> list[str]:
        """The paths of the tensors that have moved, as far as known."""
        self.same_forms()
        now = self._marked(self._look())
        return [name for name, one in self._named.items() if now[id(one)] != self._marks.get(id(one))]

    def same(self) -> bool:
        """Whether every tensor seems to have the content that was read; call `same_forms` first."""
        if self._look() != self._state or b"".join(self._heads) != self._head_bytes or not self.holds():
            return False
        self._lags = self._arriving is not None
        return self._lags or self._read_on()

    def _read_on(self) -> bool:
        """Read the next piece, or start to send it; False if it shows an edit."""
        self._turn += 1
        piece: Any = self._scan.piece() if self._scan.queue else None
        is_far = isinstance(piece, Tensor)
        if piece is not None and not is_far and not self._scan.read(piece):
            return self._doubt()
        if self._far:
            tensor = self._far[self._turn % len(self._far)]
            sent = [_head(tensor, _PROBE)]
            if is_far and piece.device == tensor.device:
                sent.append(piece)
            # A copy, as a view would keep the tensor's memory until the bytes are compared.
            arriving = Arriving([torch.cat(sent)], self._runtime)
            self._arriving = id(tensor), len(sent[0]), len(sent) > 1, arriving
        return True

    def holds(self) -> bool:
        """Whether the bytes that have arrived since `same` are those read before; does not wait."""
        if self._arriving is None or not self._arriving[-1].has_arrived:
            return True
        (key, count, has_piece, arriving), self._arriving = self._arriving, None
        found: Bytes1D = arriving.wait()[0].numpy()
        if xxh3_64_digest(found[:count]) != self._known[key].sample[0]:
            return self._doubt()
        if has_piece and not self._scan.read(found[count:]):
            return self._doubt()
        self._compared = 0 if self._lags else key
        return True

    def _doubt(self) -> bool:
        """Make the next `same` return False, so that everything is read again; returns False."""
        self._is_doubtful, self._state = True, None
        return False

    def refresh(self, *, read: bool = True) -> None:
        """Read tensors that may have changed; without `read`, only remember what would reveal a change."""
        self.same_forms()
        whole = [] if self.is_blind else self._uncounted
        self._wholes = [t if t.device.type != "cpu" else memoryview(_content(t)) for t in whole]
        state, self._state, self._arriving = self._look(), None, None  # in case reading is interrupted
        self.generation += 1
        # Before reading the tensors, as other threads may write to them meanwhile.
        self._marks = self._marked(state)
        found = {id(tensor): self._sampled(tensor) for tensor in self.tensors} if read else {}
        before = {key: one for key, one in self._known.items() if key in found and one.is_at(found[key].mark)}
        self._known = {}
        # If one has changed without its counter, code writes through ``.data`` or NumPy, perhaps also
        # elsewhere: then read all.
        if not self._is_doubtful and all(one.sample == found[key].sample for key, one in before.items()):
            found |= before
        self._read(found)
        self.digests = {n: found[id(t)].digest for n, t in self._named.items() if id(t) in found}
        pairs = [(old, found[key]) for key, old in before.items() if old.digest != found[key].digest]
        # The last call compared the first bytes of these.
        compared = [one for one in pairs if one[1].memory is not None or id(one[1].tensor) == self._compared]
        self.is_late = pairs != [] and all(old.sample[0] == new.sample[0] for old, new in compared)
        # Reading memory views takes half as long as reading arrays.
        self._heads = [_first(one.memory) for one in found.values() if one.memory is not None]
        self._head_bytes = b"".join(self._heads)
        known = {key: one for key, one in found.items() if one.mark is not None}
        self._far = [one.tensor for one in known.values() if one.memory is None]
        self._compared, self._is_doubtful = 0, False
        due = [one for one in known.values() if one.content]
        self._scan.go_on([one for one in due if one.size > (0 if one.memory is None else _TINY)])
        self._known, self._state = known, state

    def _sampled(self, tensor: Tensor) -> _Read:
        is_near = tensor.device.type == "cpu" and not self._runtime.owns(tensor)
        memory = memoryview(_content(tensor)) if is_near else None
        mark = self._marks[id(tensor)] if has_version(tensor) and _is_plain(tensor) else None
        storage = None if mark is None else StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        return _Read(tensor, memory, mark, _sample(tensor, memory), storage)

    def _read(self, found: dict[int, _Read]) -> None:
        """Read the tensors that have no digest yet."""
        self.unreadable = []
        new = [one for one in found.values() if not one.digest]
        there = DIGESTS.of_tensors([one.tensor for one in new])  # on a GPU
        for one in new:
            content, in_order = there.get(id(one.tensor)), _is_in_order(one.tensor)
            try:
                if one.memory is not None:
                    content = one.content = xxh3_128_digest(one.memory)
                elif in_order:
                    content = one.content = content or xxh3_128_digest(_content(one.tensor))
                one.digest = tensor_digest(one.tensor, content if in_order else there.get(id(one.tensor)))
            except torch.cuda.OutOfMemoryError:
                raise  # it can be read once there is memory, when everything is read again
            except (RuntimeError, TypeError, NotImplementedError, UnencodableError):
                self.unreadable += [name for name, tensor in self._named.items() if tensor is one.tensor][:1]
                one.digest, one.mark = os.urandom(16), None

    def forms(self) -> dict[str, str]:
        """Dtype and shape of each tensor by its path, for people."""
        return {name: form(tensor.dtype, tensor.shape) for name, tensor in self._named.items()}

    def forget(self) -> None:
        """Make the next `same` return False, to read everything again, and keep no storage alive."""
        self._heads, self._wholes, self._known, self._state, self._arriving = [], [], {}, None, None
        self._scan = _Scan()

    def small_buffers(self) -> list[Tensor]:
        """Tensors that a forward may write to and that are cheap to copy."""
        buffers = [tensor for tensor in self.tensors if type(tensor) is not nn.Parameter]
        return buffers if sum(tensor.nbytes for tensor in buffers) <= _COPIED else []

    def _look(self) -> list[list[Any]]:
        try:
            pointers = list(map(Tensor.data_ptr, self.tensors))
        except RuntimeError:
            pointers = list(map(_pointer, self.tensors))
        wholes = [xxh3_64_digest(_content(one) if isinstance(one, Tensor) else one) for one in self._wholes]
        return [pointers, list(map(version, self._counted)), wholes]

    def _marked(self, state: list[list[Any]]) -> dict[int, tuple[Any, ...]]:
        """Values, by id, that change when a tensor is written to or replaced."""
        pointers, versions, wholes = state
        tensors = self._counted + self._uncounted
        written = {id(t): sign for t, sign in zip(tensors, versions + wholes, strict=False)}
        found = zip(self.tensors, pointers, self._forms, strict=True)
        return {id(t): (pointer, *form, written.get(id(t))) for t, pointer, form in found}

    def _follow_optimizers(self) -> None:
        # Fused optimizers write to tensors without moving their version counters, also between two looks at
        # which all are frozen. If one requires grad, every step counts, as it may write to a view of it.
        watch, mine = weakref.ref(self), set(map(id, self.tensors))

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            this = watch()
            if this is not None and (this.with_grad or any(map(mine.__contains__, _stepped(optimizer)))):
                this.forget()

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)


def _stepped(optimizer: Any) -> Iterator[int]:
    """The ids of the tensors of an optimizer."""
    return (id(tensor) for group in optimizer.param_groups for tensor in group.get("params", ()))


def _pointer(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a subclass without storage
        return 0


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _is_in_order(tensor: Tensor) -> bool:
    """Whether a tensor's memory equals its content."""
    return _is_plain(tensor) and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _span(tensor: Tensor) -> int:
    """Bytes of storage from a tensor's first element to its last."""
    if tensor.numel() == 0 or not _is_plain(tensor):
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _head(tensor: Tensor, count: int) -> Tensor:
    """About `count` bytes from the first element of a tensor on: a view of its memory."""
    if not _is_plain(tensor):
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    start, size = tensor.storage_offset(), tensor.element_size()
    end = min(start + -(-count // size), tensor.untyped_storage().nbytes() // size)
    view = tensor.detach().as_strided((max(0, end - start),), (1,), start)
    try:
        return view.view(torch.uint8)
    except RuntimeError:  # a lazy conjugate: view its storage instead
        stored = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return stored.set_(tensor.untyped_storage(), start, view.shape, (1,)).view(torch.uint8)


def _first_bytes(tensor: Tensor, count: int) -> Bytes1D:
    """Like `_head`, but on the host."""
    return _head(tensor, count).cpu().numpy()


def _content(tensor: Tensor) -> Bytes1D:
    return _first_bytes(tensor, _span(tensor))


def _sample(tensor: Tensor, memory: Bytes1D | None) -> tuple[bytes, bytes]:
    """Some bytes of a tensor: those that each call compares and, on the host, a few others."""
    if memory is None:
        return xxh3_64_digest(_first_bytes(tensor, _PROBE)), b""
    step = len(memory) // _SPREAD | 1  # an odd step reaches every byte of the numbers
    return bytes(_first(memory)), xxh3_64_digest(memory[:_PROBE]) + memory[::step].tobytes()


def _first(memory: Bytes1D) -> Bytes1D:
    """The bytes of a host tensor that every call compares."""
    return memory if len(memory) <= _TINY else memory[:_HEAD]
