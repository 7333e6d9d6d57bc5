"""Ranks of one job: processes that run a script and talk to each other over gloo.

No such script ends with `destroy_process_group`: torch 2.4 then opens the file of its store once more, and
waits for minutes if another rank has deleted it by then. Processes of `warm` end without.
"""

from tests.helpers import warm

PREAMBLE = """
import os, sys
import torch
from torch import nn
from torch.utils import data
from torchcache2 import torchcache

STORE, *ARGUMENTS = sys.argv[1:]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join():
    torch.distributed.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=WORLD)


"""


def run_ranks(script, folder, *args, count=2, env=None, **options):
    """Run a script behind `PREAMBLE` in every rank of a job; the processes, when all have ended well."""
    text = PREAMBLE + warm.dedented(script)
    store = folder / "store"
    store.unlink(missing_ok=True)
    ranks = []
    for rank in range(count):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        ranks.append(warm.start(text, store, *args, env=of_rank | (env or {}), **options))
    return [rank.done() for rank in ranks]
