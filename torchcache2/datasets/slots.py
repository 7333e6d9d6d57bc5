"""`SharedCache`: a tensor for each sample, in memory that the processes of a machine share.

It has the names, exceptions and states of stocaching 0.2.1's class, so that changing the import suffices.

The memory is a file without a name, which the system frees when the last process that maps it ends, however
it ends: first the rows, then one byte of state for each sample. Forked processes inherit the mapping. Others
get a pickled handle, which names the pickling process, through which they open the file.

**Why readers need no lock.** A row is written first, and its state is set when the row is whole. The state is
one byte, which is read whole. So a reader finds no row, or all of it, and a writer that is killed leaves an
empty slot. x86 keeps the order of writes and of reads. For other processors, both sides make and free a
tensor between state and row: torch's atomic counters, which acquire and release, keep the order. While a row
is overwritten, its slot is empty. Readers that checked the state before may see a mixture of both rows.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchcache2.core.errors import OptionError
from torchcache2.core.keys import Array
from torchcache2.core.logs import logger, shown
from torchcache2.core.sizes import free_memory, size_text
from torchcache2.tiers.shared.region import Region

_BITS = {"8-bit": torch.uint8, "16-bit": torch.uint16, "32-bit": torch.uint32, "64-bit": torch.uint64}
_OF_NUMPY = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


def checked_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype, also by name; `OptionError` if plain tensors cannot have it."""
    found = _BITS.get(dtype) if isinstance(dtype, str) else dtype
    try:
        if isinstance(found, torch.dtype) and not str(found).startswith("torch.q"):  # those are quantized
            one, other = (torch.from_numpy(np.zeros(1, numpy_name(found))).view(found) for _ in range(2))
            one.copy_(other)
            return found
    except RuntimeError:  # torch cannot copy it
        pass
    raise OptionError(
        f"dtype={shown(dtype)}: expected a dtype of plain tensors, or one of {', '.join(_BITS)}"
    )


def numpy_name(dtype: torch.dtype) -> str:
    """NumPy's name of a dtype, or of ints of the same size if it has none."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _OF_NUMPY else f"i{dtype.itemsize}"


def get_shm_size() -> int:
    """The size of ``/dev/shm`` in whole GiB.

    `SharedCache` takes no memory from there, so this does not limit its size.
    """
    status = os.statvfs("/dev/shm")
    return status.f_frsize * status.f_blocks // _GIB


get_shm_size.__module__ = "torchcache2"  # the path in pickles, wherever this file is


def reserved(size: int) -> Region:
    """A file in memory with all pages allocated."""
    if not hasattr(os, "memfd_create"):
        raise NotImplementedError(
            "SharedCache shares memory on Linux only; elsewhere use torch.zeros(...).share_memory_()"
        )
    free = free_memory(torch.device("cpu"))
    reason = ""
    if free is None or size <= free:
        try:
            region = Region.create(size)
            region.reserve(0, size)
            return region
        except OSError as error:
            reason = f" ({error})"
    available = "an unknown number" if free is None else f"{free:,}"
    raise MemoryError(
        f"a SharedCache of {size:,} bytes does not fit in memory, of which {available} are available{reason}"
        ": use a smaller size_limit_gib, which caches fewer samples, or free memory"
    )


_GIB = 1 << 30
_EMPTY, _SET, _OUTSIDE = 0, 1, 2  # states of a sample; the last one: it has no slot


class SharedCache:
    """One tensor for each of the first samples of a dataset, in memory that processes share.

    A drop-in for the class of the same name of stocaching 0.2.1. Make it in the dataset's ``__init__``:
    the workers of a `DataLoader`, however they are started, then read and write the same slots.

    Parameters
    ----------
    size_limit_gib : float
        GiB for rows and states. The first samples, as many as fit, have a slot; 0 turns the cache off.
    dataset_len : int
        Samples of the dataset; one byte of the limit goes to the state of each.
    data_dims : tuple of int
        The shape of a sample.
    dtype : torch.dtype or str
        The dtype of a sample, or ``"8-bit"``, ``"16-bit"``, ``"32-bit"``, ``"64-bit"`` for unsigned ints.

    Raises
    ------
    OptionError
        If a size is negative, or a tensor cannot have this dtype.
    MemoryError
        If less memory is free. The constructor takes all of it, so that no later write fails.
    NotImplementedError
        If this is not Linux.

    Notes
    -----
    `get_slot` returns a view, as in stocaching: editing it edits the cache. A pickle holds no data: it finds
    the memory as long as the pickling process keeps the cache.

    Two processes that set one slot at the same time must set the same value, and no process may set a slot
    during `clear`: otherwise the row may be a mixture.

    Examples
    --------
    >>> import torch
    >>> from torch.utils.data import Dataset
    >>> from torchcache2 import SharedCache

    >>> class Images(Dataset):
    ...     def __init__(self):
    ...         self.cache = SharedCache(0.001, len(self), (3, 32, 32), dtype=torch.uint8)
    ...
    ...     def __len__(self):
    ...         return 500
    ...
    ...     def __getitem__(self, index):
    ...         image = self.cache.get_slot(index)
    ...         if image is None:
    ...             print("decoded", index)
    ...             image = torch.full((3, 32, 32), index % 256, dtype=torch.uint8)
    ...             self.cache.set_slot(index, image)
    ...         return image

    >>> images = Images()
    >>> len(images.cache)  # 0.001 GiB have room for so many
    349
    >>> for epoch in range(2):
    ...     batch = torch.stack([images[5], images[400]])
    decoded 5
    decoded 400
    decoded 400
    """

    __module__ = "torchcache2"

    def __init__(
        self,
        size_limit_gib: float,
        dataset_len: int,
        data_dims: Sequence[int],
        dtype: torch.dtype | str = torch.uint8,
    ) -> None:
        self._dims, self._dataset_len = tuple(map(operator.index, data_dims)), operator.index(dataset_len)
        self._dtype = checked_dtype(dtype)
        if not size_limit_gib >= 0 or self._dataset_len < 0 or min(self._dims, default=0) < 0:
            raise OptionError(
                f"size_limit_gib={size_limit_gib!r}, dataset_len={dataset_len!r}, data_dims={self._dims}: "
                "expected nothing below 0"
            )
        row_bytes = math.prod(self._dims) * self._dtype.itemsize
        left = max(0, size_limit_gib * _GIB - self._dataset_len)
        fit = left >= self._dataset_len * row_bytes
        self._cached = self._dataset_len if fit else int(left // row_bytes)
        size = self._cached * row_bytes + self._dataset_len
        logger.info(
            "SharedCache: %d of %d samples fit in %.4g GiB and take %s of shared memory",
            *(self._cached, self._dataset_len, size_limit_gib, size_text(size)),
        )
        self._map(reserved(max(1, size)))
        self._states[self._cached :] = _OUTSIDE

    def _map(self, region: Region) -> None:
        # Give each returned tensor a storage of its own, and keep none of the whole memory: when a tensor
        # goes through a queue, torch moves its storage, with all tensors that share it.
        self._region = region
        kind, row_items = numpy_name(self._dtype), math.prod(self._dims)
        self._rows = region.array(kind, 0, self._cached * row_items).reshape(self._cached, *self._dims)
        self._states = region.array("u1", self._cached * row_items * self._dtype.itemsize, self._dataset_len)
        self._state = self._states.data  # reading a number is several times faster than from an array

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_region", "_rows", "_states", "_state"):
            del state[name]
        return state | {"_found": tuple(self._region.place)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        place = state.pop("_found")
        region = Region.open(*place)
        if region is None:
            raise RuntimeError(
                f"the memory of a SharedCache cannot be found in /proc/{place[0]}: keep it in the process "
                f"that pickled it (same user, same machine) until all others have started. A SharedCache "
                f"cannot be saved to a file"
            )
        self.__dict__.update(state)
        self._map(region)

    @property
    def array(self) -> Tensor:
        """The rows, ``(len(self), *data_dims)``: a tensor in the shared memory."""
        return self._tensor(self._rows)

    @property
    def underlying_array(self) -> Tensor:
        """An alias of `array`: its name before stocaching 0.2."""
        return self.array

    @property
    def aux_array(self) -> Tensor:
        """The state of each sample, uint8 ``(dataset_len,)``, in the shared memory.

        0: its slot is empty. 1: its slot is set. 2: it has no slot, as it did not fit.
        """
        return torch.from_numpy(self._states)

    def __len__(self) -> int:
        """Samples that have a slot."""
        return self._cached

    def __getitem__(self, idx: Any) -> Tensor:
        """``array[idx]``, whether slots are set or not."""
        return self._tensor(self._rows[idx, ...]) if isinstance(idx, (int, np.integer)) else self.array[idx]

    def __setitem__(self, idx: Any, value: Any) -> None:
        """``array[idx] = value``; the states stay as they are: `set_slot` sets both."""
        if isinstance(value, Tensor):
            value = value.detach()
            if isinstance(idx, (int, np.integer)):
                self._check(value)
        self.array[idx] = value

    def get_slot(
        self,
        idx: int,
        allow_oob_idx: bool = True,
        allow_empty_slot: bool = True,
        *,
        copy: bool = False,
    ) -> Tensor | None:
        """The tensor in a slot.

        Parameters
        ----------
        idx : int
            Number of the sample in the dataset.
        allow_oob_idx : bool
            Return None for a sample that has no slot, rather than raise.
        allow_empty_slot : bool
            Return None for a slot that is not set, rather than raise.
        copy : bool
            Return a tensor that owns its memory, rather than a view of the shared memory.

        Raises
        ------
        IndexError
            If the dataset has no such sample; if it has no slot, and ``allow_oob_idx=False``.
        RuntimeError
            If the slot is empty, and ``allow_empty_slot=False``.
        """
        idx, state = self._look(idx, allow_oob_idx)
        if state == _SET:
            row = self._tensor(self._rows[idx, ...])
            return row.clone() if copy else row
        if state == _EMPTY and not allow_empty_slot:
            raise RuntimeError(f"slot {idx} of the SharedCache is empty, and allow_empty_slot=False")
        return None

    def set_slot(
        self, idx: int, value: Tensor, allow_oob_idx: bool = True, allow_overwrite: bool = False
    ) -> None:
        """Copy a tensor into a slot.

        Parameters
        ----------
        idx : int
            Number of the sample in the dataset.
        value : Tensor
            Of the shape and dtype of the slots: nothing is broadcast or converted.
        allow_oob_idx : bool
            Do nothing for a sample that has no slot, rather than raise.
        allow_overwrite : bool
            Replace what is in the slot, rather than raise.

        Raises
        ------
        IndexError
            If the dataset has no such sample; if it has no slot, and ``allow_oob_idx=False``.
        RuntimeError
            If the slot is set, and ``allow_overwrite=False``; if the value has another shape or dtype.
        TypeError
            If the value is not a tensor.
        """
        idx, state = self._look(idx, allow_oob_idx)
        if state == _OUTSIDE:
            return
        if state == _SET and not allow_overwrite:
            raise RuntimeError(f"slot {idx} of the SharedCache is set, and allow_overwrite=False")
        self._check(value)
        self._state[idx] = _EMPTY  # if the process is killed in between, the slot is empty, not a mixture
        self._tensor(self._rows[idx, ...]).copy_(value.detach())
        self._state[idx] = _SET

    def clear(self) -> None:
        """Empty all slots, and fill them with zeros, for all processes; none may set a slot meanwhile."""
        self._states[: self._cached] = _EMPTY
        self._rows.fill(0)

    def _look(self, idx: int, allow_oob_idx: bool) -> tuple[int, int]:
        """A sample's index as an int, and its state."""
        idx = operator.index(idx)
        if not 0 <= idx < self._dataset_len:
            raise IndexError(f"index {idx} is out of bounds for a dataset of length {self._dataset_len}")
        state = self._state[idx]
        if state == _OUTSIDE and not allow_oob_idx:
            raise IndexError(f"index {idx} is out of bounds for a SharedCache of length {self._cached}")
        return idx, state

    def _tensor(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype == self._dtype else tensor.view(self._dtype)

    def _check(self, value: Tensor) -> None:
        if not isinstance(value, Tensor):
            raise TypeError(f"a slot holds a tensor, not {type(value).__name__}: use torch.as_tensor")
        if value.shape != self._dims or value.dtype != self._dtype:
            raise RuntimeError(
                f"a value of shape {tuple(value.shape)} and {value.dtype} for slots of shape {self._dims} "
                f"and {self._dtype}: use .expand or .to to convert it first"
            )
