"""The Triton kernel that copies rows from anywhere to anywhere in the memory of a device."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# Triton compiles this function, so that the types of its parameters are none of Python's.

import triton
import triton.language as tl

__all__ = ["INTERPRETED", "copy_rows"]


@triton.jit(do_not_specialize=["sources", "targets", "unit", "rows", "units", "tiles"])
def copy_rows(
    sources,
    targets,
    unit,
    rows,
    units,
    tiles,
    per_unit: tl.constexpr,
    alignment: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_words: tl.constexpr,
):
    """Copy `rows` rows of `units` units each, from the addresses `sources` to the addresses `targets`.

    A unit is `per_unit` words of the dtype of `unit`, a tensor that is not read. All addresses are multiples
    of `alignment` bytes. A program copies `tile_words` words of `tile_rows` rows, and there are `tiles`
    programs for these rows.
    """
    row = (tl.program_id(0) // tiles).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    word = (tl.program_id(0) % tiles).to(tl.int64) * tile_words + tl.arange(0, tile_words)
    is_row = row < rows
    pointer: tl.constexpr = tl.pointer_type(unit.dtype.element_ty)
    # Without these hints the compiler would copy each word by itself.
    source = tl.multiple_of(tl.load(sources + row, mask=is_row, other=0).to(pointer), alignment)
    target = tl.multiple_of(tl.load(targets + row, mask=is_row, other=0).to(pointer), alignment)
    is_there = is_row[:, None] & (word < units * per_unit)[None, :]
    words = tl.load(source[:, None] + word[None, :], mask=is_there)
    tl.store(target[:, None] + word[None, :], words, mask=is_there)


INTERPRETED = not isinstance(copy_rows, triton.JITFunction)  # TRITON_INTERPRET=1: it runs on the CPU
