"""The Triton kernel that copies rows from anywhere to anywhere in the memory of a device."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "copy_rows"]


@triton.jit(do_not_specialize=["rows", "units", "tiles"])
def copy_rows(
    sources,
    targets,
    unit,
    rows,
    units,
    tiles,
    PER_UNIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy `rows` rows of `units` units each, from the addresses `sources` to the addresses `targets`.

    A unit is `PER_UNIT` words of the dtype of `unit`, a tensor that is not read. All addresses are multiples
    of `ALIGNMENT` bytes. A program copies `WORDS` words of `ROWS` rows, and there are `tiles` programs for
    these rows.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    word = (tl.program_id(0) % tiles).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    is_row = row < rows
    pointer: tl.constexpr = tl.pointer_type(unit.dtype.element_ty)
    # Without these hints the compiler would copy each word by itself.
    source = tl.multiple_of(tl.load(sources + row, mask=is_row, other=0).to(pointer), ALIGNMENT)
    target = tl.multiple_of(tl.load(targets + row, mask=is_row, other=0).to(pointer), ALIGNMENT)
    is_there = is_row[:, None] & (word < units * PER_UNIT)[None, :]
    words = tl.load(source[:, None] + word[None, :], mask=is_there)
    tl.store(target[:, None] + word[None, :], words, mask=is_there)


INTERPRETED = not isinstance(copy_rows, triton.JITFunction)  # TRITON_INTERPRET=1: it runs on the CPU
