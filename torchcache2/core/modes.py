"""The global modes of torch that change results, as part of a key.

These are autocast, the default dtype and device, deterministic algorithms, denormal numbers, and the
precision of float32 products. A mode that is as it is when torch starts adds nothing to the key, so that keys
do not depend on which modes a version of torch knows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack as _function_modes
from torch.utils._device import DeviceContext

__all__ = ["autocast_keeps_weights", "modes", "product_precision"]

_UNITS = [(place, kind) for place in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
_PRODUCTS: Any = getattr(torch._C, "_get_fp32_precision_getter", None)
_EPS = {"none": 0.0, "ieee": 0.0, "tf32": 2.0**-10, "bf16": 2.0**-7} | {
    "highest": 0.0,
    "high": 2.0**-10,
    "medium": 2.0**-7,
}
# At the start the mode is "none", which is full precision. "highest" sets "ieee", which is the same.
_USUAL = {unit: {"none", "ieee"} for unit in _UNITS} | {
    ("cuda", "conv"): {"tf32"},
    ("cuda", "rnn"): {"tf32"},
}


def modes(devices: Iterable[str]) -> str:
    """The modes in force for operations on these types of devices."""
    state = [f"default {torch.get_default_dtype()} {_precision()}"]
    for kind in sorted({"cpu", "cuda", *devices}):
        if torch.is_autocast_enabled(kind):
            state.append(f"{kind} {torch.get_autocast_dtype(kind)}")
    if not torch.backends.mha.get_fastpath_enabled():
        state.append("no fast path of attention")
    if torch.are_deterministic_algorithms_enabled():
        state.append("deterministic")
    # `torch.get_default_device` is wrong in old versions of torch.
    contexts = [mode for mode in _function_modes() if isinstance(mode, DeviceContext)]  # type: ignore[no-untyped-call]
    if contexts and contexts[-1].device.type != "cpu":
        state.append(f"device {contexts[-1].device.type}")
    if sys.float_info.min / 2 == 0.0:  # torch does not say what `torch.set_flush_denormal` has set
        state.append("flush denormal")
    return "; ".join(state)


def _precision() -> str:
    if _PRODUCTS is None:
        return torch.get_float32_matmul_precision()
    # The public function raises if a program has used both the old and the new way to set it.
    found = [(unit, _PRODUCTS(*unit)) for unit in _UNITS]
    unusual = [
        f"{place}.{kind}={value}" for (place, kind), value in found if value not in _USUAL[place, kind]
    ]
    return ",".join(unusual) or "highest"


def product_precision() -> float:
    """The relative precision of the coarsest float32 product that is allowed on a device in use."""
    if _PRODUCTS is None:
        values = {_EPS[torch.get_float32_matmul_precision()]}
    else:
        places = {"cuda"} if torch.cuda.is_initialized() else {"mkldnn"}  # type: ignore[no-untyped-call]
        values = {_EPS[_PRODUCTS(*unit)] for unit in _UNITS if unit[0] in places}
    return max(values)


def autocast_keeps_weights(devices: Iterable[str]) -> bool:
    """Whether autocast may compute with copies of weights that it has made before they changed."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, devices))
