"""`IndexFile`: the index of many segments, in one sorted file that is searched on disk.

It has an entry for each row of some segments: key, segment, number of the row, and the row's checksum. All
processes share its pages through the system's cache, and each keeps in memory only the first key of each
block. docs/format.md specifies the file. All its data is also in the segments' heads: a lost or damaged one
is made again.

`write_index_files` keeps few index files, and few segments outside them, in each namespace, like an LSM tree.
When enough rows are in none, they become one. Some of similar size are merged into one; so each key is
written two to four times, and a look-up searches few files. Who writes segments does this, and nothing waits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from xxhash import xxh3_64_intdigest

from torchcache2.core.errors import DamagedError, NewerFormatError, OptionError, UnreadableError
from torchcache2.core.keys import Array, Positions, Words
from torchcache2.files.directory import INDEX_FILES_LOCK, CacheDirectory
from torchcache2.files.filesystem import Descriptor, Descriptors, FileSystem, open_to_lock, ulid, write_whole
from torchcache2.files.layout import INDEX_FILE, SEGMENT, TEMPORARY
from torchcache2.files.segment import Segment

INDEX_VERSION = 1
_MAGIC = b"tc2 run\n"
_ROWS = 127  # entries of a page
ENTRY = np.dtype([("low", "<u8"), ("high", "<u8"), ("checksum", "<u8"), ("segment", "<u4"), ("row", "<u4")])
_PAGE = np.dtype([("checksum", "<u8"), ("unused", "V24"), ("entries", ENTRY, (_ROWS,))])
TABLE = np.dtype(
    [("name", "S26"), ("unused", "V2"), ("rows", "<u4"), ("head", "<u8"), ("digest", "<u8")]
)  # of a segment: the ULID of its name, its entries here, bytes up to its index, and xxh3-64 of these
_END = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("pages_per_block", "<u4"),
        ("namespace", "V16"),
        ("blocks", "<u8"),
        ("segments", "<u8"),
        ("checksum", "<u8"),
    ]
)
_NO_SEGMENT = 0xFFFFFFFF  # of padding entries
_MOST_BLOCKS = 1 << 20  # their first keys take at most 8 MB
_AT_ONCE = 1 << 20  # entries that are sorted and written together, 32 MB
_READ_AT_ONCE = 8 << 20  # bytes of blocks that are searched together
_TIMED, _SLOW = 4, 50e-6  # time so many reads; faster than this (seconds each): pages are in memory


class IndexFile:
    """An open index file; raises `DamagedError` where its bytes are damaged.

    Attributes
    ----------
    path : str
    namespace : bytes
    table : ndarray of TABLE
        The segments; an entry's `segment` is a position in it.
    """

    def __init__(self, fs: FileSystem, descriptors: Descriptors, path: str) -> None:
        self.path = path
        self._fs, self._descriptors = fs, descriptors
        file = descriptors.get(path)
        size = fs.size(file)
        if size < _END.itemsize:
            raise DamagedError(f"an index file of {size} bytes")
        end = np.frombuffer(fs.read_bytes(file, size - _END.itemsize, _END.itemsize), _END)[0]
        if end["magic"] != _MAGIC.rstrip(b"\0"):
            raise DamagedError("not an index file")
        if end["version"] != INDEX_VERSION:
            raise NewerFormatError(f"an index file of version {end['version']}")
        self.namespace = bytes(end["namespace"])
        self._pages_per_block = per_block = int(end["pages_per_block"])
        blocks, segments = int(end["blocks"]), int(end["segments"])
        start = blocks * per_block * _PAGE.itemsize
        if start + 8 * blocks + TABLE.itemsize * segments + _END.itemsize != size or not blocks:
            raise DamagedError(f"an index file of {size} bytes that says it has {blocks} blocks")
        tail = fs.read_bytes(file, start, size - start)
        if xxh3_64_intdigest(tail[:-8]) != end["checksum"]:
            raise DamagedError("another checksum")
        self._first_keys = np.frombuffer(tail, "<u8", blocks)
        self.table = np.frombuffer(tail, TABLE, segments, 8 * blocks)

    @property
    def names(self) -> list[str]:
        """The names of its segments, without suffix."""
        return [name.decode("ascii", "replace") for name in self.table["name"].tolist()]

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return int(self._first_keys.nbytes + self.table.nbytes)

    def find(self, words: Words) -> tuple[Positions, Array]:
        """The entries of keys, ``(n, 2)``, and the position of each entry's key.

        A key may have none, or several; an entry's segment may be none of the table.
        """
        step = max(1, _READ_AT_ONCE // (self._pages_per_block * _PAGE.itemsize))
        if len(words) > max(step, len(self._first_keys)):
            return self._find_in_all(words)
        if len(words) > step:
            some = [self.find(words[first : first + step]) for first in range(0, len(words), step)]
            positions = [found + number * step for number, (found, _) in enumerate(some)]
            return np.concatenate(positions), np.concatenate([entries for _, entries in some])
        pages = self._read(np.maximum(self._first_keys.searchsorted(words[:, 0], side="right") - 1, 0))
        left, low, numbers = np.arange(len(words)), words[:, 0], pages.view("<u8").reshape(-1)
        page = left * self._pages_per_block + (pages["entries"]["low"][:, 1:, 0] <= words[:, :1]).sum(axis=1)
        at = page * (_ROWS + 1)  # a page is as large as so many entries: one for its head, and its own
        for step in (64, 32, 16, 8, 4, 2, 1):
            at += step * (numbers.take(4 * (at + step)) < low)
        entries, positions, slots = pages.view(ENTRY).reshape(-1), [left[:0]], [left[:0]]
        while len(left):  # a key may have several entries
            at += 1
            is_alike = (numbers.take(4 * at, mode="clip") == low[left]) & (at < len(entries))
            left, at = left[is_alike], at[is_alike]
            is_same = numbers.take(4 * at + 1) == words[left, 1]
            positions.append(left[is_same])
            slots.append(at[is_same])
        where = np.concatenate(positions)
        _check(pages, page[where].tolist())
        return where, entries.take(np.concatenate(slots))

    def _find_in_all(self, words: Words) -> tuple[Positions, Array]:
        """The same for more keys than there are blocks: read the index file from start to end."""
        order = np.argsort(words[:, 0], kind="stable")
        sorted_words = words[order]
        positions, found = [np.empty(0, np.int64)], [np.empty(0, ENTRY)]
        for first, end in _ranges(int(self.table["rows"].sum(dtype=np.int64))):
            begin = int(np.searchsorted(sorted_words[:, 0], np.uint64(first)))
            stop = int(np.searchsorted(sorted_words[:, 0], np.uint64(end - 1), side="right"))
            entries = self.between(first, end)
            least = np.searchsorted(entries["low"], sorted_words[begin:stop, 0])
            counts = np.searchsorted(entries["low"], sorted_words[begin:stop, 0], side="right") - least
            which = np.repeat(np.arange(begin, stop), counts)  # a key may have several entries
            at = np.arange(len(which)) + np.repeat(least - np.cumsum(counts) + counts, counts)
            is_same = entries["high"][at] == sorted_words[which, 1]
            positions.append(order[which[is_same]])
            found.append(entries[at[is_same]])
        return np.concatenate(positions), np.concatenate(found)

    def between(self, first: int, end: int) -> Array:
        """The entries whose keys' first 8 bytes are at least `first` and less than `end`."""
        least, most = np.uint64(first), np.uint64(end - 1)
        begin = max(0, int(np.searchsorted(self._first_keys, least, side="left")) - 1)
        stop = int(np.searchsorted(self._first_keys, most, side="right"))
        if stop <= begin:
            return np.empty(0, ENTRY)
        pages = np.empty((stop - begin) * self._pages_per_block, _PAGE)
        offset = begin * self._pages_per_block * _PAGE.itemsize
        self._fs.read_all(self._descriptors.get(self.path), [pages.view(np.uint8).data], offset)
        _check(pages, range(len(pages)))
        entries = pages["entries"].reshape(-1)
        low = entries["low"]
        inside: Array = entries[(low >= least) & (low <= most) & (entries["segment"] != _NO_SEGMENT)]
        return inside

    def check(self) -> None:
        """Read all of it."""
        for first, end in _ranges(int(self.table["rows"].sum(dtype=np.int64))):
            if (self.between(first, end)["segment"] >= len(self.table)).any():
                raise DamagedError("entries of a segment that is not in the table")

    def close(self) -> None:
        """Close the file once no thread reads it any more."""
        self._descriptors.forget(self.path)

    def _read(self, blocks: Array) -> Array:
        """The pages of some blocks, ``(n, pages of a block)``; reads ahead if the disk is slow."""
        pages = np.empty((len(blocks), self._pages_per_block), _PAGE)
        size = self._pages_per_block * _PAGE.itemsize
        view, file, fs = pages.view(np.uint8).reshape(-1).data, self._descriptors.get(self.path), self._fs
        offsets: list[int] = (blocks * size).tolist()
        places = list(zip(range(0, len(view), size), offsets, strict=True))
        is_slow, read = fs.is_away(file), fs.read
        for some in (places[:_TIMED], places[_TIMED:]):
            begun = time.perf_counter()
            for _, offset in some if is_slow else ():
                fs.will_need(file, offset, size)
            for start, offset in some:
                if read(file, [view[start : start + size]], offset) != size:
                    fs.read_all(file, [view[start : start + size]], offset)
            is_slow = time.perf_counter() - begun > _TIMED * _SLOW
        return pages


def _check(pages: Array, which: Iterable[int]) -> None:
    """Raise `DamagedError` if one of some pages differs from its checksum."""
    view, sums, size = pages.view(np.uint8).reshape(-1).data, pages["checksum"].reshape(-1), _PAGE.itemsize
    for number in which:
        if xxh3_64_intdigest(view[number * size + 8 : number * size + size]) != sums.item(number):
            raise DamagedError("a page with another checksum")


@dataclasses.dataclass(frozen=True)
class Part:
    """Input of a new index file: sorted entries of segments, or another index file.

    Attributes
    ----------
    source : IndexFile or ndarray of ENTRY
        Sorted by the first 8 bytes of the key.
    table : ndarray of TABLE
        The segments of its entries.
    """

    source: IndexFile | Array
    table: Array

    def between(self, first: int, end: int) -> Array:
        """Like `IndexFile.between`."""
        if isinstance(self.source, IndexFile):
            return self.source.between(first, end)
        low = self.source["low"]
        bounds = np.array([first, end - 1], np.uint64)
        return self.source[np.searchsorted(low, bounds[0]) : np.searchsorted(low, bounds[1], side="right")]


def size_of(rows: int, segments: int) -> int:
    """The approximate size of an index file in bytes; slightly less if it is large."""
    pages = -(-rows // _ROWS)
    return pages * (_PAGE.itemsize + 8) + segments * TABLE.itemsize + _END.itemsize


def entries_of(keys: Array, checksums: Array, segment: int) -> Array:
    """The entries of all rows of a segment with these keys, uint8 ``(n, 16)``; not sorted."""
    entries = np.empty(len(keys), ENTRY)
    words: Words = keys.view("<u8")
    entries["low"], entries["high"] = words[:, 0], words[:, 1]
    entries["checksum"], entries["segment"], entries["row"] = checksums, segment, np.arange(len(keys))
    return entries


def by_key(entries: Array) -> Array:
    """Entries in the order of an index file."""
    ordered: Array = entries[np.argsort(entries["low"], kind="stable")]
    return ordered


def write_index_file(
    fs: FileSystem, folder: str, namespace: bytes, parts: Sequence[Part], alive: set[str]
) -> str:
    """Write one index file from other index files and heads; returns its path.

    Leaves out segments whose names are not in `alive`.
    """
    path = os.path.join(folder, ulid() + INDEX_FILE)
    index: dict[bytes, int] = {}
    tables, targets = [], []
    for part in parts:
        names = part.table["name"].tolist()
        here = np.array([name.decode("ascii", "replace") in alive for name in names], bool)
        new = [place for place, name in enumerate(names) if here[place] and name not in index]
        for place in new:
            index[names[place]] = len(index)
        tables.append(part.table[new])
        targets.append(np.array([index.get(name, _NO_SEGMENT) for name in names] + [_NO_SEGMENT], np.uint32))
    table = np.concatenate(tables)
    most = sum(int(part.table["rows"].sum(dtype=np.int64)) for part in parts)
    per_block = -(-most // (_ROWS * _MOST_BLOCKS))

    def write(file: Descriptor) -> None:
        counts, first_keys, offset = np.zeros(len(table), np.int64), [], 0
        for blocks in _blocks(_merged(parts, targets, most), per_block * _ROWS):
            entries = blocks["entries"].reshape(len(blocks), -1)
            first_keys.append(entries["low"][:, 0].copy())
            segments = entries["segment"][entries["segment"] != _NO_SEGMENT]
            counts += np.bincount(segments, minlength=len(table))
            _seal(blocks)
            offset = fs.write_all(file, [blocks.view(np.uint8).reshape(-1).data], offset)
        if not first_keys:
            raise FileNotFoundError(path)  # all segments are gone by now
        table["rows"] = counts
        firsts = np.concatenate(first_keys)
        end = np.zeros(1, _END)
        end["magic"], end["version"], end["pages_per_block"] = _MAGIC, INDEX_VERSION, per_block
        end["namespace"], end["blocks"], end["segments"] = np.void(namespace), len(firsts), len(table)
        tail = firsts.tobytes() + table.tobytes() + end.tobytes()[:-8]
        tail += xxh3_64_intdigest(tail).to_bytes(8, "little")
        fs.write_all(file, [memoryview(tail)], offset)

    write_whole(fs, path, write, stem=os.path.join(folder, ""), suffix=INDEX_FILE + TEMPORARY)
    return path


def _ranges(rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of the first 8 bytes of keys, as numbers, each with about `_AT_ONCE` of `rows` entries."""
    pieces = -(-max(1, rows) // _AT_ONCE)
    bounds = [(1 << 64) * piece // pieces for piece in range(pieces + 1)]
    return pairwise(bounds)


def _merged(parts: Sequence[Part], targets: Sequence[Array], rows: int) -> Iterator[Array]:
    """All entries in order, in pieces, with the numbers of their segments in the new table."""
    for first, end in _ranges(rows):
        pieces = []
        for part, target in zip(parts, targets, strict=True):
            entries = part.between(first, end).copy()
            entries["segment"] = target[np.minimum(entries["segment"], len(target) - 1)]
            pieces.append(entries[entries["segment"] != _NO_SEGMENT])
        yield by_key(np.concatenate(pieces)) if len(parts) > 1 else pieces[0]


def _blocks(pieces: Iterator[Array], rows: int) -> Iterator[Array]:
    """Entries as pages, ``(n, pages of a block)``, `rows` entries to a block; the last may have fewer."""
    left = np.empty(0, ENTRY)
    while True:
        piece = next(pieces, None)
        entries = left if piece is None else np.concatenate([left, piece])
        full = len(entries) // rows if piece is not None else -(-len(entries) // rows)
        if full:
            padded = entries[: full * rows]
            if len(padded) < full * rows:
                rest = np.zeros(full * rows - len(padded), ENTRY)
                rest["low"], rest["segment"] = (1 << 64) - 1, _NO_SEGMENT
                padded = np.concatenate([padded, rest])
            pages = np.zeros((full, rows // _ROWS), _PAGE)
            pages["entries"] = padded.reshape(full, rows // _ROWS, _ROWS)
            yield pages
        left = entries[full * rows :]
        if piece is None:
            return


def _seal(pages: Array) -> None:
    """Write each page's checksum into it."""
    flat = pages.reshape(-1)
    view, size = flat.view(np.uint8).data, _PAGE.itemsize
    starts = range(0, len(flat) * size, size)
    flat["checksum"] = [xxh3_64_intdigest(view[start + 8 : start + size]) for start in starts]


_LEAST_ROWS = 1 << 19  # of an index file; up to as many newer rows are in memory of each process
_MOST_SEGMENTS = 1024  # outside of index files, however few rows they have
_ALIKE = 2  # index files are similar if the ratio of their sizes is below this
_MERGED = 4  # similar index files that are merged


def is_due(segments: int, rows: int) -> bool:
    """Whether so many segments and rows outside of index files are enough for another index file."""
    return rows >= _LEAST_ROWS or segments >= _MOST_SEGMENTS


def write_index_files(
    directory: CacheDirectory, namespace: bytes, limit: int, has_room: Callable[[int], bool]
) -> bool:
    """Write index files of segments that are in none, and merge some; returns whether anything changed.

    A row may have up to `limit` bytes. ``has_room(size)`` returns whether a file of `size` bytes may be
    written, and may make room. Does nothing while another process does this. May raise `OSError`.
    """
    fs = directory.fs
    path = os.path.join(directory.path, INDEX_FILES_LOCK)
    with contextlib.suppress(FileExistsError):
        fs.create(path)
    lock = open_to_lock(fs, path)
    if fs.lock(lock, exclusive=True) is False:
        return False
    try:
        return _Merger(directory, namespace, limit, has_room).work()
    finally:
        fs.unlock(lock)


class _Merger:
    def __init__(
        self, directory: CacheDirectory, namespace: bytes, limit: int, has_room: Callable[[int], bool]
    ) -> None:
        self._directory, self._namespace = directory, namespace
        self._limit, self._has_room = limit, has_room
        self._path = directory.folder(namespace)
        self._files = Descriptors(directory.fs)
        contents = directory.contents(namespace.hex())
        self._alive = {info.name.removesuffix(SEGMENT) for info in contents.segments}
        self._index_files: list[IndexFile] = []
        self._changed = False
        self._covered: set[str] = set()
        for info in contents.index_files:
            with contextlib.suppress(FileNotFoundError, UnreadableError):
                one = IndexFile(directory.fs, self._files, os.path.join(self._path, info.name))
                if one.namespace == namespace:
                    self._index_files.append(one)
                    self._covered.update(one.names)

    def work(self) -> bool:
        for one in [one for one in self._index_files if not self._rows_of(one)]:
            self._remove([one])
        group, tables, rows = list[Array](), list[Array](), 0
        for name in sorted(self._alive - self._covered):
            found = self._head(name, len(tables))
            if found is None:
                continue
            table, entries = found
            tables.append(table)
            group.append(entries)
            rows += len(entries)
            if is_due(len(tables), rows):
                if not self._add(by_key(np.concatenate(group)), np.concatenate(tables)):
                    break
                group, tables, rows = [], [], 0
        return self._changed

    def _head(self, name: str, number: int) -> tuple[Array, Array] | None:
        """An index file's entry for a segment, and those for its rows; None if the segment cannot be read."""
        fs, path = self._directory.fs, os.path.join(self._path, name + SEGMENT)
        try:
            segment = Segment.open(fs, self._files, path, limit=self._limit, structured=False)
            head = 8 + int.from_bytes(fs.read_bytes(self._files.get(path), 0, 8), "little")
            first = fs.read_bytes(self._files.get(path), 0, head)
        except (FileNotFoundError, OptionError, UnreadableError):
            return None  # readers of its rows report this
        finally:
            self._files.forget(path)
        if segment.layout.namespace != self._namespace or segment.keys is None or segment.checksums is None:
            return None
        table = np.zeros(1, TABLE)
        table[0] = name.encode(), b"", len(segment), head, xxh3_64_intdigest(first)
        return table, entries_of(segment.keys, segment.checksums, number)

    def _add(self, entries: Array, table: Array) -> bool:
        """Write an index file of newer rows, merged with similar index files; False if there is no room."""
        self._index_files.sort(key=self._rows_of, reverse=True)
        count = kept_index_files([self._rows_of(one) for one in self._index_files], len(entries))
        merged = self._index_files[count:]
        rows = len(entries) + sum(map(self._rows_of, merged))
        segments = len(table) + sum(len(one.table) for one in merged)
        if not self._has_room(size_of(rows, segments)):
            return False
        parts = [Part(entries, table), *(Part(one, one.table) for one in merged)]
        try:
            path = write_index_file(self._directory.fs, self._path, self._namespace, parts, self._alive)
        except DamagedError:
            self._remove(merged)  # these are made again from the segments' heads
            return False
        self._changed = True
        self._remove(merged)
        self._index_files.append(IndexFile(self._directory.fs, self._files, path))
        return True

    def _rows_of(self, one: IndexFile) -> int:
        here = np.array([name in self._alive for name in one.names], bool)
        return int(one.table["rows"][here].sum(dtype=np.int64))

    def _remove(self, index_files: Sequence[IndexFile]) -> None:
        """Delete index files; readers have them open, or look again."""
        for one in index_files:
            self._index_files.remove(one)
            one.close()
            with contextlib.suppress(FileNotFoundError):
                self._directory.fs.remove(one.path)
            self._changed = True


def kept_index_files(sizes: Sequence[int], rows: int) -> int:
    """How many index files (`sizes`, largest first) stay unmerged when one of `rows` rows is written.

    The others are merged with the new one.
    """
    kept = len(sizes)
    while True:
        first = kept
        while first and sizes[first - 1] < rows * _ALIKE:
            first -= 1
        if first == kept or (kept - first + 1 < _MERGED and sizes[first] * _ALIKE >= rows):
            return kept
        rows += sum(sizes[first:kept])
        kept = first
