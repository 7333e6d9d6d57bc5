"""Our own servers under `torchrun`: the ranks of a node share one, and those of two nodes use both."""

import socket

import pytest

from tests.helpers import warm

LAUNCHER = """
import sys
from torch.distributed.run import main
main(["--start-method", "fork", *sys.argv[1:]])
"""
# Each rank loads its part; then each finds all samples, of which it has loaded its own only.
TRAIN = """
import torch
import torch.distributed as dist
from torchcache2 import CachedDataset, CacheLoader


class Squares:
    loaded = 0

    def __len__(self):
        return 60

    def __getitem__(self, index):
        self.loaded += 1
        return {"square": torch.tensor(index**2), "name": f"{index}"}


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
source = Squares()
data = CachedDataset(source, backend="redis", dataset_name="squares", capacity_per_node="50MB")
loader = CacheLoader("redis", "texts", capacity_per_node="50MB")
for index in range(rank, 60, world):
    data[index]
    loader.get(index, str)
data.flush()
loader.flush()
dist.barrier()
for index in range(60):
    assert data[index]["square"].item() == index**2 and data[index]["name"] == str(index)
assert loader.get_many(range(60), lambda key: 1 / 0) == [str(i) for i in range(60)]
assert loader.num_keys() == 60
dist.barrier()
print("rank", rank, "loaded", source.loaded, "faults", data.stats().faults, loader, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def train(warmed, place):
    """Runs the script on so many nodes; what the ranks of each have printed."""

    def run(*arguments, nodes):
        script = place.path / "train.py"
        script.write_text(TRAIN)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        master = ["--master-addr", "127.0.0.1", "--master-port", port, "--nnodes", nodes]
        env = {"TMPDIR": str(place.path), "OMP_NUM_THREADS": "1", "TORCHCACHE_JOB": ""}
        launchers = []
        for node in range(nodes):
            if nodes > 1:
                env["TORCHCACHE_JOB"] = f"node {node}"
            options = [*master, "--nproc-per-node", 2, "--node-rank", node, *arguments, "--run-path", script]
            launchers.append(warm.start(LAUNCHER, *options, env=env))
        lines = [launcher.done().out.splitlines() for launcher in launchers]
        place.all_ended()
        return [[line for line in of_node if line.startswith("rank")] for of_node in lines]

    return run


def test_ranks_of_a_node_share_a_server(train):
    (lines,) = train(nodes=1)
    assert sorted(line.split(" <")[0] for line in lines) == [f"rank {i} loaded 30 faults 0" for i in (0, 1)]
    assert len({line.split(" on ")[1] for line in lines}) == 1 and all(" on unix:" in line for line in lines)


@pytest.mark.slow
def test_ranks_of_two_nodes_use_both_servers(train):
    lines = [line for of_node in train(nodes=2) for line in of_node]
    assert sorted(line.split(" <")[0] for line in lines) == [f"rank {i} loaded 15 faults 0" for i in range(4)]
    (servers,) = {line.split(" on ")[1] for line in lines}
    assert servers.count("127.0.0.1:") == 2
