"""Jobs of several ranks.

Each rank is a process that imports this package anew, as `torchrun` starts them; they meet through gloo.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

SECONDS = 0.010  # of an item
COUNTER = os.memfd_create("")  # its length; a number that counts would be a state of the forward
ROOT = Path(__file__).parents[2]


class Backbone(nn.Module):
    """Takes 10 ms for an item, and no processor: so ranks do not take turns."""

    def forward(self, x):
        take_time(len(x))
        return x * 2


def take_time(count):
    os.write(COUNTER, bytes(count))
    time.sleep(SECONDS * count)


def computed():
    """How many items this process has computed."""
    return os.fstat(COUNTER).st_size


def run_job(module, part, ranks, argument="", *, nodes=1, killed=None):
    """What each rank has returned from a function in `PARTS` of a module, but the one that is killed.

    The function gets its rank, the number of ranks, the argument, a function in which all ranks meet, and the
    path of a folder. Ranks of one of the `nodes` share memory.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        started = []
        for rank in range(ranks):
            node, local = divmod(rank, ranks // nodes)
            env = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks // nodes}
            env = {name: str(value) for name, value in env.items()} | {"OMP_NUM_THREADS": "1"}
            env |= {"TORCHCACHE_JOB": folder if nodes == 1 else f"{folder} {node}"}
            command = [sys.executable, "-m", __name__, module, part, argument, folder]
            process = subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE)
            stack.callback(process.kill)
            started.append(process)
        found = []
        for rank, process in enumerate(started):
            out, _ = process.communicate(timeout=300)
            assert process.returncode == (-signal.SIGKILL if rank == killed else 0), (part, rank)
            if rank != killed:
                found.append(json.loads(out.splitlines()[-1]))
        return found


def main(module, part, argument, folder):
    """One rank."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder, f"pid {rank}").write_text(str(os.getpid()))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks
    )
    parts = importlib.import_module(module).PARTS
    with torch.no_grad():
        found = parts[part](rank, ranks, argument, torch.distributed.barrier, folder)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
