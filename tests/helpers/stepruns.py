"""Runs the scripts of cases for ranks in step: see `tests.helpers.steps`."""

import json

from tests.helpers import warm


def failures(script, folder, *names, ranks=4, killed=(), deadline=150.0, **env):
    """What has failed in a script of cases, by case and rank; all its cases, or those with these names.

    Ranks that are `killed` end so.
    """
    started = []
    for rank in range(ranks):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        store = folder / "store"
        started.append(warm.start(script, store, *names, env=of_rank | env))
    failed = {}
    for rank, process in enumerate(started):
        try:
            process.done(-9 if rank in killed else 0, timeout=deadline)
        except AssertionError:
            failed[f"rank {rank}"] = f"It has not ended well.\n{process.err}"
        for line in process.out.splitlines():
            name, text, _ = json.loads(line)
            if text:
                failed[f"{name} in rank {rank}"] = text
    return failed


def shown(failed):
    return "\n\n".join(f"{where}:\n{text}" for where, text in failed.items())
