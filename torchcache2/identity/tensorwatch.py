"""`TensorWatch`: reads the content of tensors once, and again when it may have changed.

Tensors are compared by storage address, shape, strides and version counter. Edits through ``.data`` and by
numpy change none of these: so the first bytes of each tensor are compared too and, in turn, the first 4 KB of
one of them. An edit through ``.data`` of a part of one tensor is thus noticed only when its turn comes, and
only within its first 4 KB. On a GPU, these bytes are compared when they have arrived, as no call waits for
them: with the keys of a batch that is there too, else at a later call. Tensors made under
`torch.inference_mode` have no version counters: if they are small, all of their bytes are compared.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from xxhash import xxh3_64_digest

from torchcache2.core.private import has_version, version
from torchcache2.core.transfer import CUDA, Arriving, Runtime
from torchcache2.identity.encoding import UnencodableError, tensor_digest
from torchcache2.identity.readable import form
from torchcache2.identity.xxh3.device import DIGESTS

__all__ = ["TensorWatch"]

_HEAD = 64
_PROBE = 4096
_SPREAD = 64  # so many further bytes are compared before a digest is used again
_COPIED = 16 << 20
_MOST_UNCOUNTED = 500_000  # bytes, some 40 µs at every call

# Arrays are buffers, which older type checkers do not know.
Bytes1D = Any

_State = tuple[list[int], list[Any], list[Any], list[torch.dtype], list[int], list[bytes]]

_dtype: Callable[[Tensor], torch.dtype] = attrgetter("dtype")


class _Known(NamedTuple):
    """The digest of a tensor's content, and what would show that the content has changed."""

    digest: bytes
    mark: tuple[Any, ...]
    sample: bytes
    is_gone: Callable[[], bool]  # whether its storage is freed, so that another tensor may have its address


class TensorWatch:
    """The content of some tensors, by path: read once, and again when it may have changed.

    What a watch `before` of some of these tensors has read is not read again.
    """

    def __init__(
        self, tensors: dict[str, Tensor], before: TensorWatch | None = None, runtime: Runtime = CUDA
    ) -> None:
        self.digests: dict[str, bytes] = {}  # as of the last `refresh`
        self.unreadable: list[str] = []  # paths of tensors whose content cannot be read
        self.generation = 0  # how often `refresh` has been called
        self._named = {name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)}
        self.tensors = list({id(tensor): tensor for tensor in self._named.values()}.values())
        self.dtypes = {tensor.dtype for tensor in self.tensors}
        self.has_lazy = len(self._named) < len(tensors)
        self._counted = [tensor for tensor in self.tensors if has_version(tensor)]
        self._uncounted = [tensor for tensor in self.tensors if not has_version(tensor)]
        total = sum(map(_span, self._uncounted))
        # Whether tensors without version counters are too large to compare at every call.
        self.is_blind = total > _MOST_UNCOUNTED or not all(map(_is_plain, self._uncounted))
        self._state: _State | None = None
        self._follows = False
        self._heads: list[Bytes1D] = []
        self._head_bytes = b""
        self._wholes: list[Bytes1D] = []
        self._away: list[Tensor] = []
        self._probes: list[bytes] = []
        self._turn = 0
        self._runtime = runtime
        # The first bytes of a tensor, on their way to the host, behind the digest that they should have.
        self._arriving: tuple[bytes, Arriving] | None = None
        known: dict[int, _Known] = {} if before is None else before._known
        mine = [id(tensor) for tensor in self.tensors]  # other ids may soon be those of new tensors
        self._known: dict[int, _Known] = {key: known[key] for key in mine if key in known}
        if before is not None and before._follows:
            self._follow_optimizers()

    def moved(self) -> bool:
        """Whether a tensor has other storage, or was written to, since the last `refresh`."""
        return self._look() != self._state

    def moved_names(self) -> list[str]:
        """The tensors that `moved` is about, by path, as far as that can be told."""
        owners: Any = [self.tensors] * 4 + [self._counted]
        states: Any = self._state or (), self._look()
        moved = {
            id(tensor)
            for tensors, before, now in zip(owners, *states, strict=False)
            for tensor, old, new in zip(tensors, before, now, strict=True)
            if old != new
        }
        return [name for name, tensor in self._named.items() if id(tensor) in moved]

    def same(self) -> bool:
        """Whether every tensor seems to have the content that was read."""
        if self.moved() or b"".join(self._heads) != self._head_bytes or not self.holds():
            return False
        if self.tensors and self._arriving is None:
            self._turn = turn = (self._turn + 1) % len(self.tensors)
            tensor, probe = self.tensors[turn], self._probes[turn]
            if not self._runtime.owns(tensor):
                return _probe(tensor) == probe
            # A copy, as a view would keep the memory of the tensor until its bytes are compared.
            self._arriving = probe, Arriving([_head(tensor, _PROBE).clone()], self._runtime)
        return True

    def holds(self) -> bool:
        """Whether what has arrived since `same` is what was read; waits for nothing."""
        arriving = self._arriving
        if arriving is None or not arriving[1].has_arrived:
            return True
        self._arriving = None
        head: Bytes1D = arriving[1].wait()[0].numpy()
        return bool(xxh3_64_digest(head) == arriving[0])

    def refresh(self, *, read: bool = True) -> None:
        """Read tensors that may have changed; without `read`, only remember what would show a change."""
        if not self._follows and any(tensor.requires_grad for tensor in self.tensors):
            self._follow_optimizers()
        whole = [] if self.is_blind else self._uncounted
        self._wholes = [memoryview(_content(tensor)) for tensor in whole if tensor.device.type == "cpu"]
        self._away = [tensor for tensor in whole if tensor.device.type != "cpu"]
        state, self._state, self._arriving = self._look(), None, None  # in case reading is interrupted
        self.generation += 1
        self.unreadable = []
        # These are taken before the tensors are read, because other threads may write to them meanwhile.
        marks = self._marks()
        samples = {id(tensor): _sample(tensor) for tensor in self.tensors} if read else {}
        known, self._known = self._still_known(marks, samples), {}
        digests: dict[int, bytes] = {}
        unknown = [tensor for tensor in self.tensors if read and id(tensor) not in known]
        contents = DIGESTS.of_tensors(unknown)  # of those that are on a GPU
        for name, tensor in self._named.items() if read else ():
            key = id(tensor)
            if key in digests:  # tied weights have several names
                continue
            try:
                is_known = key in known
                digests[key] = known[key].digest if is_known else tensor_digest(tensor, contents.get(key))
            except torch.cuda.OutOfMemoryError:
                raise  # it can be read once there is memory: all is read again then
            except (RuntimeError, TypeError, NotImplementedError, UnencodableError):
                self.unreadable.append(name)
                digests[key] = os.urandom(16)
                continue
            if key in marks:
                known[key] = _Known(digests[key], marks[key], samples[key], _storage_is_gone(tensor))
        self.digests = {n: digests[id(t)] for n, t in self._named.items() if id(t) in digests}
        # To read memory views takes half of the time that arrays take.
        self._heads = [memoryview(_first_bytes(t, _HEAD)) for t in self.tensors if t.device.type == "cpu"]
        self._head_bytes = b"".join(self._heads)
        self._probes = list(map(_probe, self.tensors))
        self._known, self._state = known, state

    def forms(self) -> dict[str, str]:
        """Dtype and shape of each tensor by its path, for people."""
        return {name: form(tensor.dtype, tensor.shape) for name, tensor in self._named.items()}

    def forget(self) -> None:
        """Make the next `same` return False, so that all is read again, and keep no storage alive."""
        self._heads, self._wholes, self._known, self._state, self._arriving = [], [], {}, None, None

    def small_buffers(self) -> list[Tensor]:
        """Tensors that a forward may write to and that are cheap to copy."""
        buffers = [tensor for tensor in self.tensors if type(tensor) is not nn.Parameter]
        return buffers if sum(tensor.nbytes for tensor in buffers) <= _COPIED else []

    def _look(self) -> _State:
        tensors = self.tensors
        return (
            list(map(_pointer, tensors)),
            list(map(Tensor.stride, tensors)),
            list(map(Tensor.size, tensors)),
            list(map(_dtype, tensors)),
            list(map(version, self._counted)),
            [*map(xxh3_64_digest, self._wholes), *[xxh3_64_digest(_content(t)) for t in self._away]],
        )

    def _marks(self) -> dict[int, tuple[Any, ...]]:
        """For tensors with a version counter, by id: what changes when one is written to or replaced."""
        plain = [tensor for tensor in self._counted if _is_plain(tensor)]
        return {
            id(t): (_pointer(t), t.storage_offset(), t.stride(), t.size(), t.dtype, version(t)) for t in plain
        }

    def _still_known(self, marks: dict[int, tuple[Any, ...]], samples: dict[int, bytes]) -> dict[int, _Known]:
        """The tensors that need not be read again.

        There are none if one tensor has changed without its counter: somebody writes through ``.data`` or
        numpy, and may also have written where no sample is taken.
        """
        known = {key: self._known[key] for key in marks if key in self._known}
        known = {key: one for key, one in known.items() if one.mark == marks[key] and not one.is_gone()}
        is_honest = all(one.sample == samples.get(key) for key, one in known.items())
        return known if is_honest else {}

    def _follow_optimizers(self) -> None:
        # Fused optimizers write to tensors without moving their version counters.
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


def _storage_is_gone(tensor: Tensor) -> Callable[[], bool]:
    """Whether the storage that a tensor has now is gone."""
    expired: Callable[[], bool] = StorageWeakRef(tensor.untyped_storage()).expired  # type: ignore[no-untyped-call]
    return expired


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided


def _span(tensor: Tensor) -> int:
    """How many bytes of storage there are from the first element of a tensor to its last."""
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
    except RuntimeError:  # it is a conjugate that is not computed yet: its storage is viewed instead
        stored = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return stored.set_(tensor.untyped_storage(), start, view.shape, (1,)).view(torch.uint8)


def _first_bytes(tensor: Tensor, count: int) -> Bytes1D:
    """The same on the host."""
    return _head(tensor, count).cpu().numpy()


def _content(tensor: Tensor) -> Bytes1D:
    return _first_bytes(tensor, _span(tensor))


def _probe(tensor: Tensor) -> bytes:
    return xxh3_64_digest(_first_bytes(tensor, _PROBE))


def _sample(tensor: Tensor) -> bytes:
    """Some of the bytes of a tensor: the first, and on the CPU a few that are spread over it."""
    if tensor.device.type != "cpu":
        return _probe(tensor)
    content = _content(tensor)
    step = len(content) // _SPREAD | 1  # an odd step meets every byte of the numbers
    spread: bytes = content[::step].tobytes()
    return xxh3_64_digest(content[:_PROBE]) + spread
