"""`compare`: explains why two ranks share no rows, if only values in their modules differ.

Each rank does this once per namespace, without waiting: it leaves the description of its namespace and reads
those of others. So of two ranks, the later one sees the earlier one's description.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torchcache2.core.logs import listed, logger
from torchcache2.core.process import ranks_here
from torchcache2.identity.fingerprint import differences_of_state, from_document
from torchcache2.tiers.shared.job import Job
from torchcache2.tiers.shared.space import Space
from torchcache2.tiers.shared.table import SharedTable

_COMPARED_AFTER = 60.0  # seconds after a rank's first rows: by then the others have kept some, too
_MOST_READ = 16  # namespaces of others


def compare_later(
    job: Job, table: SharedTable, namespace: bytes, description: Callable[[bytes], Mapping[str, Any]]
) -> None:
    """Compare a namespace once, in a call at least a minute after the first one."""
    if table.since is None:
        table.since = time.monotonic()
    if time.monotonic() - table.since > _COMPARED_AFTER:
        table.since = math.inf
        with contextlib.suppress(OSError):  # such as too many open files
            compare(job, table, namespace, description(namespace))


def compare(job: Job, table: SharedTable, namespace: bytes, description: Mapping[str, Any]) -> None:
    """Warn if another rank computes the same, except for values in its module.

    That means: the two ranks never had a namespace in common, their code and weights are equal, and they were
    started together (runs of a sweep differ on purpose). All ranks together warn once.
    """
    mine = from_document(namespace.hex(), description)
    if mine is None or job.board.ranks_of(table.file) >= ranks_here():
        return
    about = {"namespace": namespace.hex(), "launch": job.launch.hex(), "rank": job.rank, **description}
    table.space.tell(zlib.compress(json.dumps(about).encode()))
    for document in _of_others(job, table):
        other = from_document(document["namespace"], document)
        if other is None or document["launch"] != about["launch"]:
            continue
        lines = differences_of_state(other, mine)
        with job.lock():
            warns = bool(lines) and job.board.warns()
        if warns:
            logger.warning(
                "%s: rank %d and rank %d find none of each other's rows. What differs: %s. Use the device of "
                "the input instead, keep such values out of the module, or set persistent_module_hash. If "
                "the ranks are meant to differ, nothing is wrong",
                *(about["class"], document["rank"], about["rank"], listed(lines)),
            )
            return


def _of_others(job: Job, table: SharedTable) -> Iterator[dict[str, Any]]:
    """The descriptions left by ranks that never had a namespace in common with the ranks of `table`."""
    with job.lock():
        regions = [job.board.open(file) for file in job.board.strangers(table.file)[:_MOST_READ]]
    for region in filter(None, regions):
        text = zlib.decompressobj()
        with contextlib.suppress(ValueError, zlib.error):  # nothing there, or half written
            yield json.loads(text.decompress(Space(region, job.board, -1, job.lock).told()))
