"""`read`: reads the rows of a batch from a bucket, as ranges of its objects that are fetched at once."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Parts, merged
from torchcache2.files.errors import DamagedError
from torchcache2.files.filesystem import Descriptors
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.arrivals import Arrivals
from torchcache2.tiers.bucket.known import Known, Sought
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.ranges import Ranges
from torchcache2.tiers.disk.reading import read_rows


def read(objects: Objects, known: Known, keys: Keys, arrivals: Arrivals) -> Parts:
    """The rows of those keys that the bucket has. Damaged rows are left out, and not asked for again."""
    sought = known.sought(keys)
    if len(sought.positions) == 0:
        return []
    arrivals.wait(_sizes(sought.segments, sought))
    here, there = _come_down(sought)
    ranges = Ranges(objects, keys.namespace.hex())
    segments = {number: one.through(ranges, ranges) for number, one in there.items()}
    for number, segment in segments.items():
        segment.read_ahead(sought.rows[sought.numbers == number])
    begun = time.monotonic()
    ranges.fetch()
    arrivals.took(sum(_sizes(there, sought).values()), time.monotonic() - begun)
    parts, failed = read_rows(segments, sought.numbers, sought.rows, sought.positions)
    parts = merged([*here, *parts]) if here else parts
    if not failed:
        return parts
    bad: dict[int, list[int]] = {}
    for number, error in failed.items():
        if isinstance(error, MemoryError):
            known.fault(error, objects.bucket.url)
        elif isinstance(error, DamagedError):
            some, bad[number] = _good({number: _fetched_again(objects, keys, number, sought)}, sought)
            parts = merged([*parts, *some])
            if not bad[number]:
                continue
            objects.corrupt += len(bad[number])
            where = f"{objects.bucket.url}/{keys.namespace.hex()}/{os.path.basename(segments[number].path)}"
            message = "%s is damaged (%s): such rows are not used, and it is left alone"
            objects.tell("corrupt", message, where, str(error))
    gone = [number for number, error in failed.items() if isinstance(error, FileNotFoundError)]
    known.forget(keys.namespace, gone, bad)
    return parts


def _sizes(segments: Mapping[int, Segment], sought: Sought) -> dict[str, float]:
    """About how many bytes are sought of each segment, by its path."""
    counts = {number: int((sought.numbers == number).sum()) for number in segments}
    return {one.path: one.nbytes * counts[number] / max(1, len(one)) for number, one in segments.items()}


def _come_down(sought: Sought) -> tuple[Parts, dict[int, Segment]]:
    """Rows of segments that have come down since the disk tier looked, and the segments that have not."""
    fs = next(iter(sought.segments.values())).fs
    files = Descriptors(fs)
    here = {n: one.through(fs, files) for n, one in sought.segments.items() if fs.is_file(one.path)}
    parts, failed = read_rows(here, sought.numbers, sought.rows, sought.positions) if here else ([], {})
    files.clear()  # a file that is deleted takes room as long as it is open
    return parts, {n: one for n, one in sought.segments.items() if n not in here or n in failed}


def _fetched_again(objects: Objects, keys: Keys, number: int, sought: Sought) -> Segment:
    """A segment with damage, whose rows are fetched once more: the object may be good, and the line not."""
    ranges = Ranges(objects, keys.namespace.hex())
    segment = sought.segments[number].through(ranges, ranges)
    segment.read_ahead(sought.rows[sought.numbers == number])
    ranges.fetch()
    return segment


def _good(segments: Mapping[int, Segment], sought: Sought) -> tuple[Parts, list[int]]:
    """The good rows of a segment with damage, and the numbers of the others."""
    parts, bad = Parts(), set[int]()
    for i in np.flatnonzero(sought.numbers == next(iter(segments))).tolist():
        one = slice(i, i + 1)
        found, failed = read_rows(segments, sought.numbers[one], sought.rows[one], sought.positions[one])
        parts += found
        if failed:
            bad.add(int(sought.rows[i]))
    return parts, sorted(bad)
