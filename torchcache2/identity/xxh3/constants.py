"""The constants of XXH3, laid out for the kernels.

They are those of the xxHash specification: the default secret of 192 bytes, of which each stripe of a block
takes 64 at another place, and the accumulators at the start.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["SHORTEST", "secrets"]

SHORTEST = 241  # bytes; shorter inputs have other formulas

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_STRIPES = range(0, 128, 8)  # where in the secret the words of each stripe of a block begin
_SCRAMBLE, _LAST, _LOW, _HIGH = (
    128,
    121,
    11,
    117,
)  # likewise: scramble, last stripe, both halves of the digest
_START = (
    0x00000000C2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x0000000085EBCA77,
    0x27D4EB2F165667C5,
    0x000000009E3779B1,
)


def secrets() -> NDArray[np.int64]:
    """168 words: 8 for each stripe, the scramble, the last stripe and the halves; and the accumulators."""
    places = (*_STRIPES, _SCRAMBLE, _LAST, _LOW, _HIGH)
    words = np.frombuffer(b"".join(_SECRET[at : at + 64] for at in places), "<u8")
    return np.concatenate([words, np.array(_START, np.uint64)]).astype(np.uint64).view(np.int64)
