"""`DeviceDigests`: XXH3-128 of what is on an accelerator, computed there.

The digests are those of `xxhash`, bit for bit. That is not taken for granted: before a kernel is used for the
first time on a device, it computes digests of rows that are known, and these are compared. A device whose
kernels cannot be compiled, fail, or differ is left alone from then on, and all is hashed on the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128_digest

from torchcache2.core.logs import ToldOnce, logger
from torchcache2.core.memory import CUDA, Runtime, item_bytes
from torchcache2.identity.xxh3.constants import SHORTEST, secrets
from torchcache2.identity.xxh3.launch import MOST_ROWS, Places, start

__all__ = ["DIGESTS", "DeviceDigests"]

_AT_ONCE = 1 << 30  # bytes of tensors: the sums of their blocks take a sixteenth of that
_KNOWN = (250, 1030, 5150, 18_440)  # about the sizes of the rows that are known


class DeviceDigests:
    """XXH3-128 on the devices of this process.

    Safe under threads. Work is started on the current stream of a tensor's device, and nothing waits for it
    but the first use of a kernel, which compiles it (about a second, once on a machine) and checks it.

    Parameters
    ----------
    runtime : Runtime
        Says which tensors are on an accelerator.
    """

    tiles: ClassVar[tuple[int, int]] = (8, 4)  # blocks and rows that a program takes, powers of 2

    def __init__(self, runtime: Runtime = CUDA) -> None:
        self._runtime = runtime
        self._told = ToldOnce()
        self._refused: set[torch.device] = set()
        self._right: set[tuple[torch.device, int, bool]] = set()  # variants that agree with `xxhash`
        self._secrets: dict[torch.device, Tensor] = {}

    def of_items(self, tensor: Tensor) -> Tensor | None:
        """The digest of each item of a batch.

        Parameters
        ----------
        tensor : Tensor
            Of shape ``(n, ...)`` and any dtype.

        Returns
        -------
        Tensor of uint8, shape (n, 16), optional
            On the device of the tensor, where it may not have been computed yet. None if the items are to be
            hashed on the host: there are none, they are short or not on an accelerator, or this cannot be
            done there.
        """
        if not self._may(tensor) or not 0 < SHORTEST * tensor.shape[0] <= tensor.nbytes:
            return None
        try:
            return self._digests(Places.of_array(item_bytes(tensor)))
        except torch.cuda.OutOfMemoryError:
            return None
        except Exception as error:  # Triton, and the compilers below it, raise errors of many kinds
            self._refuse(tensor.device, error)
            return None

    def of_tensors(self, tensors: Sequence[Tensor]) -> dict[int, bytes]:
        """The digest of the content of each of some tensors, 16 bytes, by the tensor's id.

        Left out are those that are to be hashed on the host. Waits for the device once for each GiB.
        """
        here = [tensor for tensor in tensors if self._may(tensor) and tensor.nbytes >= SHORTEST]
        digests: dict[int, bytes] = {}
        for device in {tensor.device for tensor in here}:
            for group in _groups([tensor for tensor in here if tensor.device == device]):
                try:
                    rows = [item_bytes(tensor.reshape(1, -1))[0] for tensor in group]
                    found = self._digests(Places.of_rows(rows, self._runtime))
                except torch.cuda.OutOfMemoryError:
                    continue
                except Exception as error:  # see `of_items`
                    self._refuse(device, error)
                    break
                if found is not None:
                    contents = found.cpu().numpy()
                    digests |= {id(t): row.tobytes() for t, row in zip(group, contents, strict=True)}
        return digests

    def _may(self, tensor: Tensor) -> bool:
        """Whether a tensor is on an accelerator that has not been refused, and can be read there."""
        if not self._runtime.owns(tensor):
            if tensor.device.type not in ("cpu", "meta"):
                self._tell(tensor.device, "there are kernels for CUDA and ROCm only")
            return False
        is_dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
        is_plain = is_dense and type(tensor) in (Tensor, nn.Parameter)
        return is_plain and tensor.device not in self._refused

    def _digests(self, places: Places) -> Tensor | None:
        device = places.data.device
        with self._runtime.current(device):
            if device not in self._secrets:
                self._secrets[device] = torch.from_numpy(secrets()).to(device)
            if places.variant not in self._right and not self._check(places):
                return None
            return start(places, self._secrets[device], self.tiles)

    def _check(self, like: Places) -> bool:
        """Whether the kernels for places `like` these agree with `xxhash`; otherwise refuses the device."""
        device, width, is_ragged = like.variant
        # Odd multiples of the width, so that no wider words fit. Nobody's random numbers are used.
        sizes = [size - size % (2 * width) + width for size in _KNOWN]
        known = [np.random.default_rng(size).integers(0, 256, (5, size), np.uint8) for size in sizes]
        there = [torch.from_numpy(rows).to(device) for rows in known]
        if is_ragged:
            batches = [Places.of_rows([row for rows in there for row in rows])]
        else:
            batches = [Places.of_array(rows) for rows in there]
        digests = [start(places, self._secrets[device], self.tiles).cpu().numpy() for places in batches]
        expected = b"".join(xxh3_128_digest(row.tobytes()) for rows in known for row in rows)
        if b"".join(found.tobytes() for found in digests) == expected:
            self._right.add(like.variant)
            return True
        self._refused.add(device)
        self._told(
            f"wrong {device}",
            "digests that are computed on %s are not those of xxhash, so that keys are computed on the host. "
            "Please report this, with the name of the device and the versions of torch (%s) and Triton",
            *(device, torch.__version__),
        )
        return False

    def _refuse(self, device: torch.device, error: Exception) -> None:
        self._refused.add(device)
        hint = ". Install it with: pip install 'torchcache2[gpu]'" if isinstance(error, ImportError) else ""
        self._tell(device, f"{error!r}{hint}")

    def _tell(self, device: torch.device, why: str) -> None:
        text = "keys of tensors on %s are computed on the host, to which they are copied: %s"
        self._told(f"host {device}", text, device, why, log=logger.info)


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in their order, in groups that are read at once."""
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and (size + tensor.nbytes > _AT_ONCE or len(group) == MOST_ROWS):
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group


# What a device can do is a fact about the machine, which is found out once in a process.
DIGESTS = DeviceDigests()
