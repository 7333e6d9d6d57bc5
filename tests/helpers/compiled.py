"""Compiles the kernels of digests for GPUs, where there is none, and runs nothing.

This is a program, as kernels are compiled only where TRITON_INTERPRET is not set when Triton is imported.
Its arguments are the widths of words that the kernels read, in bytes.
"""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from torchcache2.identity import kernels
from torchcache2.identity.xxh3 import DeviceDigests, secrets, start

CAPABILITIES = {8: 90, 4: 80, 2: 100, 1: 90}
POINTERS = {torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}


class Compiled:
    """Takes the place of a kernel: what would run it on a GPU prints what it was compiled to."""

    def __init__(self, kernel, capability):
        self.kernel, self.target = kernel, GPUTarget("cuda", capability, 32)

    def __getitem__(self, grid):
        def run(*arguments, num_warps=4, enable_fp_fusion=False, **constants):
            kinds = [POINTERS[a.dtype] if isinstance(a, torch.Tensor) else "i32" for a in arguments]
            signature = dict.fromkeys(self.kernel.arg_names, "constexpr")
            signature |= dict(zip(self.kernel.arg_names, kinds, strict=False))
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            source = ASTSource(self.kernel, signature, constants)
            text = triton.compile(source, target=self.target, options=options).asm["ptx"]
            print(f"{self.kernel.__name__}: {text.count('.entry')} kernel for sm_{self.target.arch}")

        return run


if __name__ == "__main__":
    plain = kernels.block_sums, kernels.digests
    for width in map(int, sys.argv[1:]):
        kernels.block_sums, kernels.digests = (Compiled(kernel, CAPABILITIES[width]) for kernel in plain)
        batch = torch.zeros(
            5, 5000 + width, dtype=torch.uint8
        )  # an odd multiple of the width: no wider words fit
        start(batch, torch.from_numpy(secrets()), DeviceDigests.tiles)
