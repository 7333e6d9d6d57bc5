"""Operators of torch: its own count by name, the user's by the functions that are registered for them."""

from __future__ import annotations

from typing import Any

import torch
from torch._library import custom_ops

__all__ = ["OPERATOR_FIELDS", "definition", "is_operator", "operator_name", "registered_otherwise"]

_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, custom_ops.CustomOpDef)
# What a custom operator's outputs depend on; the functions for gradients and for tracing are not among it.
OPERATOR_FIELDS = (
    *("_schema", "_init_fn", "_backend_fns", "_torch_dispatch_fns", "_vmap_fn"),
    *("_autocast_dtype", "_disabled_kernel"),
)
# What these keys are for is no part of an output.
_NO_KERNELS = ("Meta", "Autograd", "ADInplace", "Tracer", "Functionalize")
_OF_TORCH = ("aten", "prim", "prims", "quantized", "torch", "c10d", "_c10d_functional", "higher_order")


def is_operator(value: Any) -> bool:
    """Whether a value is an operator, or the definition of one."""
    return isinstance(value, _OPERATORS)


def operator_name(value: Any) -> str:
    """``namespace::name`` of an operator."""
    if isinstance(value, torch._ops.OpOverload):
        return str(value._schema.name)
    qualified = getattr(value, "_qualified_op_name", None) or getattr(value, "_qualname", None)
    return str(qualified or value)


def definition(value: Any) -> dict[str, Any] | None:
    """What has been registered for an operator of `torch.library.custom_op`; None if it is none."""
    name = operator_name(value)
    found = value if isinstance(value, custom_ops.CustomOpDef) else custom_ops.OPDEFS.get(name)
    return None if found is None else vars(found)


def registered_otherwise(name: str) -> bool:
    """Whether Python code has been registered for an operator that nothing tells any more."""
    namespace, _, short = name.partition("::")
    if namespace in _OF_TORCH:
        return False
    keys = [key.split("/") for key in getattr(torch.library, "_impls", ())]
    return any(
        key[0] == namespace and key[1].partition(".")[0] == short and not key[-1].startswith(_NO_KERNELS)
        for key in keys
        if len(key) > 2
    )
