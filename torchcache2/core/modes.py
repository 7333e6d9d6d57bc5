"""The global modes of torch that change results, as part of a key.

These are autocast, the default dtype and device, deterministic algorithms, denormal numbers, and the
precision of float32 products. A mode that is as it is when torch starts adds nothing to the key, so that keys
do not depend on which modes a version of torch knows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch

from torchcache2.core.private import PRODUCT_PRECISION, default_device

__all__ = ["autocast_keeps_weights", "modes", "product_precision"]

_UNITS = [(place, kind) for place in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]
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
    if (device := default_device()) != "cpu":
        state.append(f"device {device}")
    if sys.float_info.min / 2 == 0.0:  # torch does not say what `torch.set_flush_denormal` has set
        state.append("flush denormal")
    return "; ".join(state)


def _precision() -> str:
    if PRODUCT_PRECISION is None:
        return torch.get_float32_matmul_precision()
    # The public function raises if a program has used both the old and the new way to set it.
    found = [(unit, PRODUCT_PRECISION(*unit)) for unit in _UNITS]
    unusual = [
        f"{place}.{kind}={value}" for (place, kind), value in found if value not in _USUAL[place, kind]
    ]
    return ",".join(unusual) or "highest"


def product_precision() -> float:
    """The relative precision of the coarsest float32 product that is allowed on a device in use."""
    if PRODUCT_PRECISION is None:
        values = {_EPS[torch.get_float32_matmul_precision()]}
    else:
        places = {"cuda"} if torch.cuda.is_initialized() else {"mkldnn"}  # type: ignore[no-untyped-call]
        values = {_EPS[PRODUCT_PRECISION(*unit)] for unit in _UNITS if unit[0] in places}
    return max(values)


def autocast_keeps_weights(devices: Iterable[str]) -> bool:
    """Whether autocast may compute with copies of weights that it has made before they changed."""
    return torch.is_autocast_cache_enabled() and any(map(torch.is_autocast_enabled, devices))
