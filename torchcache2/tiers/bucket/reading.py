"""`read`: reads the rows of a batch from the segments of a bucket, and responds to those that are bad."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np

from torchcache2.core.keys import Keys
from torchcache2.core.rows import Parts, merged
from torchcache2.files.errors import DamagedError
from torchcache2.files.segment import Segment
from torchcache2.tiers.bucket.known import Known, Sought
from torchcache2.tiers.bucket.objects import Objects
from torchcache2.tiers.bucket.sparse import BucketFolder
from torchcache2.tiers.disk.reading import read_rows


def read(objects: Objects, known: Known, folder: BucketFolder, keys: Keys) -> Parts:
    """The rows of those keys that the bucket has. Damaged rows are left out, and not asked for again."""
    sought = known.sought(keys)
    if len(sought.positions) == 0:
        return []
    try:
        return _read(objects, known, folder, keys, sought)
    finally:
        folder.done()
        known.files.clear()  # a file that is deleted takes room as long as it is open


def _read(objects: Objects, known: Known, folder: BucketFolder, keys: Keys, sought: Sought) -> Parts:
    for number, segment in sought.segments.items():
        segment.read_ahead(sought.rows[sought.numbers == number])
    folder.fetch()
    parts, failed = read_rows(sought.segments, sought.numbers, sought.rows, sought.positions)
    bad: dict[int, list[int]] = {}
    for number, error in failed.items():
        segment = sought.segments[number]
        if isinstance(error, MemoryError):
            known.fault(error, objects.bucket.url)
        elif isinstance(error, DamagedError):
            folder.doubt(segment.path)  # the object may be good, and the line or the disk not
            known.files.forget(segment.path)
            segment.read_ahead(sought.rows[sought.numbers == number])
            some, bad[number] = _good({number: segment}, sought)
            parts = merged([*parts, *some])
            if bad[number]:
                folder.doubt(segment.path)
                objects.corrupt += len(bad[number])
                where = f"{objects.bucket.url}/{keys.namespace.hex()}/{os.path.basename(segment.path)}"
                message = "%s is damaged (%s): such rows are not used, and it is left alone"
                objects.tell("corrupt", message, where, str(error))
    gone = [number for number, error in failed.items() if isinstance(error, FileNotFoundError)]
    if gone or bad:
        known.forget(keys.namespace, gone, bad)
    return parts


def _good(segments: Mapping[int, Segment], sought: Sought) -> tuple[Parts, list[int]]:
    """The good rows of a segment with damage, and the numbers of the others."""
    parts, bad = Parts(), set[int]()
    for i in np.flatnonzero(sought.numbers == next(iter(segments))).tolist():
        one = slice(i, i + 1)
        found, failed = read_rows(segments, sought.numbers[one], sought.rows[one], sought.positions[one])
        parts += found
        if any(isinstance(error, DamagedError) for error in failed.values()):
            bad.add(int(sought.rows[i]))
    return parts, sorted(bad)
