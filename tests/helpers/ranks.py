"""Ranks of a machine: processes that begin with a module that counts what it computes."""

import json

from tests.helpers import warm

PREAMBLE = """
import json, os, sys, threading, time
import torch
from torch import nn
from torchcache2 import torchcache

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ITEMS = torch.arange(192.0)[:, None] * torch.tensor([1.0, -0.5, 0.25])


class Backbone(nn.Module):
    \"\"\"Counts the items that it computes; may take its time, or fail.\"\"\"

    def __init__(self, seconds=0.0):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        with torch.no_grad():
            self.layer.weight.copy_(torch.arange(12.0).view(4, 3))
            self.layer.bias.zero_()
        self.requires_grad_(False).eval()

    def forward(self, x):
        pause(len(x))
        return self.layer(x)


SECONDS = 0.0
COUNTER = os.memfd_create("")  # a list that counts would be a state of the forward


def pause(count):
    os.write(COUNTER, bytes(count))
    time.sleep(SECONDS * count)


def computed():
    return os.lseek(COUNTER, 0, os.SEEK_CUR)


def expected(x):
    return x @ torch.arange(12.0).view(4, 3).T


def epoch(net, seed, size=16, shares=True):
    order = torch.randperm(len(ITEMS), generator=torch.Generator().manual_seed(seed))
    for indices in (order[RANK::WORLD] if shares else order).split(size):
        assert torch.equal(net(ITEMS[indices]), expected(ITEMS[indices]))


def report(net, **more):
    stats = net.cache_instance.stats()
    names = ("hits", "misses", "waited", "taken_over", "memory_rows", "memory_bytes", "disk_rows", "faults")
    counts = {name: getattr(stats, name) for name in names} | {"bypasses": dict(stats.bypasses)}
    print(json.dumps(counts | more))


"""


def start(script, job, *args, ranks=2, machine=0, machines=1, **env):
    """Start the ranks of a job, each with a script behind `PREAMBLE`; or those of one of some machines."""
    text = PREAMBLE + warm.dedented(script)
    started = []
    for local in range(ranks):
        of_rank = {"RANK": machine * ranks + local, "LOCAL_RANK": local, "GROUP_RANK": machine}
        of_rank |= {"WORLD_SIZE": machines * ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_WORLD_SIZE": machines}
        of_rank = {name: str(value) for name, value in of_rank.items()}
        started.append(warm.start(text, *args, env=of_rank | {"TORCHCACHE_JOB": job} | env))
    return started


def run(script, job, *args, **options):
    """What each rank has reported, when all have ended well."""
    return reports(start(script, job, *args, **options))


def reports(ranks):
    """What each rank has reported, when all have ended well."""
    return [json.loads(rank.done().out.splitlines()[-1]) for rank in ranks]
