"""Heads: the bytes of a segment that come before its rows. They tell which rows it has, and where.

A file ``<ulid>.safetensors.head`` has exactly these bytes. It is in the local folder in front of a bucket,
and says that the bucket has the segment: rows can be read from there without asking what there is.
"""

from __future__ import annotations

import os

import numpy as np

from torchcache2.core.keys import Array
from torchcache2.files.encode import SEGMENT, TEMPORARY
from torchcache2.files.errors import DamagedError, TooLargeError
from torchcache2.files.filenames import HEAD
from torchcache2.files.filesystem import FileSystem
from torchcache2.files.header import checked, parse, read_size, stated
from torchcache2.files.layout import Layout
from torchcache2.files.whole import write_whole

_FIRST_READ = 64 << 10  # so many bytes are read at once, as most heads are shorter
_MOST_EXTENT = 1 << 48


def head_size(first: bytes, size: int) -> int:
    """How many bytes a head has, as far as the `first` bytes of a segment of `size` bytes tell.

    If these are fewer, so many bytes have to be read, and asked again. `DamagedError` if it is no segment.
    """
    end = 8 + read_size(first[:8], size)
    return end if end > len(first) else stated(first[8:end], size)[0]


def read_head(fs: FileSystem, path: str) -> tuple[bytes, int]:
    """The head of a segment, not checked yet, and the size of the file."""
    file = fs.open(path)
    size = fs.size(file)
    first = fs.read_bytes(file, 0, min(size, _FIRST_READ))
    while (needed := head_size(first, size)) > len(first):
        first += fs.read_bytes(file, len(first), needed - len(first))
    return first[:needed], size


def write_head(fs: FileSystem, path: str, head: bytes) -> None:
    """Write the head of the segment that has, or would have, a path; one that is there is replaced.

    Nothing waits for the disk: what a power cut leaves is seen to be damaged, and fetched again.
    """
    stem = os.path.join(os.path.dirname(path), "")
    content = [memoryview(head)]
    write_whole(fs, path + HEAD, content, stem=stem, suffix=SEGMENT + TEMPORARY, sync=False, sync_name=False)


def parse_head(
    head: bytes, size: int | None, limit: int, *, structured: bool = True
) -> tuple[Layout, dict[str, Array]]:
    """The layout of a segment, and the tensors of its index. A row may have `limit` bytes.

    The segment must have `size` bytes; None: as many as it states. Raises what `parse` raises.
    """
    end = 8 + read_size(head[:8], len(head) if size is None else size)
    start, checksum, size = stated(head[8:end], size)
    if start != len(head) or not checked(head, checksum):
        raise DamagedError("another checksum")
    layout = parse(head[8:end], size, limit, structured=structured)
    index, position = {}, end
    for name, (dtype, shape) in layout.index.items():
        kind = {"U8": "<u1", "U64": "<u8", "I64": "<i8"}[dtype]
        array = np.frombuffer(head, kind, int(np.prod(shape)), position).reshape(shape)
        index[name] = array.copy()  # a view would keep all of the head in memory
        position += array.nbytes
    _check_index(layout, index, limit)
    return layout, index


def _check_index(layout: Layout, index: dict[str, Array], limit: int) -> None:
    """Raise if offsets or shapes are impossible, as anybody may have written them."""
    if "offsets" in index:
        offsets = index["offsets"]
        if offsets[0] != 0 or offsets[-1] != layout.payload_bytes or (offsets[1:] < offsets[:-1]).any():
            raise DamagedError("offsets that do not grow")
    if "shapes" in index:
        shapes = index["shapes"]
        if (shapes < 0).any() or (shapes > _MOST_EXTENT).any():
            raise DamagedError("impossible shapes")
        column = 0
        sizes = np.zeros(layout.count)
        with np.errstate(over="ignore", invalid="ignore"):
            for leaf in layout.schema.leaves:
                sizes_of_leaf = np.full(layout.count, float(leaf.stored.itemsize))
                for extent in leaf.shape:
                    sizes_of_leaf *= shapes[:, column] if extent < 0 else extent
                    column += extent < 0
                sizes += sizes_of_leaf
        if not (sizes <= limit).all():
            raise TooLargeError(f"a row of more than {limit} bytes")
