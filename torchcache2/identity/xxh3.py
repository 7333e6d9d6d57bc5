"""`DeviceDigests`: XXH3-128 of tensors on an accelerator, computed there.

The digests equal those of `xxhash`, bit for bit. To be sure, each kernel must first reproduce known digests
on each device. If it does not compile, fails, or differs, everything on this device is hashed on the host
from then on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from xxhash import xxh3_128_digest

from torchcache2.core.keys import Array
from torchcache2.core.logs import WarnOnce, logger
from torchcache2.core.memory import CUDA, Runtime, as_words, item_bytes

_SHORTEST = 241  # bytes; shorter inputs have other formulas
_BLOCK = 1024
_AHEAD = 16  # blocks whose sums are read at once
_KNOWN = (250, 1030, 5150, 18_440)  # approximate sizes of the rows with known digests

# The default secret of the xxHash specification. Each stripe of a block uses 64 bytes of it from another
# offset.
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
# Of the stripes, the scramble, the last stripe, and the halves of the digest.
_PLACES = (*range(0, 128, 8), 128, 121, 11, 117)
_START = (
    *(0x00000000C2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x0000000085EBCA77, 0x27D4EB2F165667C5, 0x000000009E3779B1),
)


class DeviceDigests:
    """XXH3-128 on the devices of this process.

    Thread-safe. Work starts on the current stream of a tensor's device, without waiting, except at the first
    use of a kernel, which compiles it (about a second, once per machine) and checks it.

    Parameters
    ----------
    runtime : Runtime
        Says which tensors are on an accelerator.
    """

    tiles: ClassVar[tuple[int, int]] = (8, 4)  # blocks and rows per program, powers of 2

    def __init__(self, runtime: Runtime = CUDA) -> None:
        self._runtime = runtime
        self._told = WarnOnce()
        self._refused: set[torch.device] = set()
        self._right: set[tuple[torch.device, int]] = set()  # word widths checked against `xxhash`
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
            On the tensor's device, perhaps still being computed. None if the items must be hashed on the
            host: there are none, they are short or not on an accelerator, or it has no working kernels.
        """
        return self._digests(tensor, tensor.shape[0]) if self._may(tensor) else None

    def of_tensors(self, tensors: Sequence[Tensor]) -> dict[int, bytes]:
        """The digest of each tensor's content, 16 bytes, by the tensor's id.

        Leaves out tensors that must be hashed on the host. Waits once per device.
        """
        started: dict[torch.device, dict[int, Tensor]] = {}
        for tensor in filter(self._may, tensors):
            digest = self._digests(tensor, 1)
            if digest is not None:
                started.setdefault(tensor.device, {})[id(tensor)] = digest
        found: dict[int, bytes] = {}
        for digests in started.values():
            found |= zip(digests, map(bytes, torch.cat([*digests.values()]).cpu().numpy()), strict=True)
        return found

    def _may(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a usable accelerator, and can be read there."""
        if not self._runtime.owns(tensor):
            if not (tensor.is_cpu or tensor.is_meta):
                self._tell(tensor.device, "there are kernels for CUDA and ROCm only")
            return False
        is_dense = tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)
        is_plain = is_dense and type(tensor) in (Tensor, nn.Parameter)
        return is_plain and tensor.device not in self._refused

    def _digests(self, tensor: Tensor, count: int) -> Tensor | None:
        """The digests of a tensor as `count` rows; None if they must be hashed on the host."""
        if not 0 < _SHORTEST * count <= tensor.nbytes:
            return None
        device = tensor.device
        try:
            rows = item_bytes(tensor.detach().reshape(count, -1))
            with self._runtime.current(device):
                if device not in self._secrets:
                    self._secrets[device] = torch.from_numpy(secrets()).to(device)
                is_right = self._is_right(device, as_words(rows).element_size())
                return start(rows, self._secrets[device], self.tiles) if is_right else None
        except torch.cuda.OutOfMemoryError:
            return None
        except Exception as error:  # Triton, and the compilers below it, raise errors of many kinds
            self._refused.add(device)
            hint = (
                ". Install it with: pip install 'torchcache2[gpu]'" if isinstance(error, ImportError) else ""
            )
            self._tell(device, f"{error!r}{hint}")
            return None

    def _is_right(self, device: torch.device, width: int) -> bool:
        """Whether the kernels agree with `xxhash` for this word width; if not, refuses the device."""
        if (device, width) in self._right:
            return True
        # Odd multiples of the width, so that no wider words fit. Seeded, to leave global generators alone.
        sizes = [size - size % (2 * width) + width for size in _KNOWN]
        known = [np.random.default_rng(size).integers(0, 256, (5, size), np.uint8) for size in sizes]
        there = [torch.from_numpy(rows).to(device) for rows in known]
        found = torch.cat([start(rows, self._secrets[device], self.tiles) for rows in there]).cpu().numpy()
        if found.tobytes() == b"".join(xxh3_128_digest(row.tobytes()) for rows in known for row in rows):
            self._right.add((device, width))
            return True
        self._refused.add(device)
        self._told(
            f"wrong {device}",
            "digests that are computed on %s are not those of xxhash, so keys are computed on the host. "
            "Please report this, with the name of the device and the versions of torch (%s) and Triton",
            *(device, torch.__version__),
        )
        return False

    def _tell(self, device: torch.device, why: str) -> None:
        text = "tensors on %s are copied to the host, where their keys are computed: %s"
        self._told(f"host {device}", text, device, why, log=logger.info)


def secrets() -> Array:
    """168 words: 8 for each stripe, the scramble, the last stripe and the halves; and the accumulators."""
    words = np.frombuffer(b"".join(_SECRET[at : at + 64] for at in _PLACES), "<u8")
    return np.concatenate([words, np.array(_START, np.uint64)]).astype(np.uint64).view(np.int64)


def start(rows: Tensor, secrets: Tensor, tiles: tuple[int, int]) -> Tensor:
    """Start the kernels on the current stream of the current device, which is that of the rows.

    Parameters
    ----------
    rows : Tensor of uint8, shape (n, bytes)
        Contiguous, of 241 bytes or more.
    secrets : Tensor of int64, shape (168,)
    tiles : (int, int)
        How many blocks, and how many rows, a program takes.

    Returns
    -------
    Tensor of uint8, shape (n, 16)
        The digests, when the kernels are done.
    """
    from torchcache2.identity import kernels  # imports Triton, which is optional

    if kernels.INTERPRETED and rows.device.type != "cpu":  # it would read device addresses on the host
        raise RuntimeError("TRITON_INTERPRET is set, and Triton's interpreter cannot read that memory")
    count, size = rows.shape
    words, blocks = as_words(rows), (size - 1) // _BLOCK  # the last block of a row is not among them
    sums = torch.empty((count * blocks, 8), dtype=torch.int64, device=rows.device)
    out = torch.empty((count, 16), dtype=torch.uint8, device=rows.device)
    # The kernels use integers only, but without this option, Triton warns about fusing float operations.
    options: dict[str, Any] = {"enable_fp_fusion": False, "parts": 8 // words.element_size()}
    if blocks:
        kernels.block_sums[(-(-count * blocks // tiles[0]),)](
            *(words, secrets, sums, size, blocks, count * blocks), tile=tiles[0], num_warps=2, **options
        )
    kernels.digests[(-(-count // tiles[1]),)](
        *(words, secrets, sums, out, count, size, blocks),
        **{"tile": tiles[1], "ahead": _AHEAD, "num_warps": 1, **options},
    )
    return out


# Devices' abilities belong to the machine: check them once per process.
DIGESTS = DeviceDigests()
