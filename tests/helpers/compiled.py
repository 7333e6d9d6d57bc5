"""Kernels of Triton as they are compiled for GPUs, run by `tests.helpers.ptx` in place of a GPU."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.helpers.ptx import Kernel

POINTERS = {torch.uint8: "*u8", torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64"}


class Compiled:
    """Takes the place of a kernel, and runs what it is compiled to for a compute capability, such as 90."""

    def __init__(self, kernel, capability):
        self.kernel, self.target = kernel, GPUTarget("cuda", capability, 32)
        self.texts = {}

    def __getitem__(self, grid):
        def run(*arguments, num_warps=4, enable_fp_fusion=False, **constants):
            kinds = [POINTERS[a.dtype] if isinstance(a, torch.Tensor) else "i32" for a in arguments]
            variant = (*kinds, *constants.values())
            if variant not in self.texts:
                signature = dict.fromkeys(self.kernel.arg_names, "constexpr")
                signature |= dict(zip(self.kernel.arg_names, kinds, strict=False))
                source = ASTSource(self.kernel, signature, constants)
                options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
                self.texts[variant] = triton.compile(source, target=self.target, options=options).asm["ptx"]
            tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
            numbers = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
            Kernel(self.texts[variant]).run(grid[0], numbers, tensors)

        return run
