"""How much memory is free."""

import pytest
import torch

from tests.helpers import warm
from torchcache2 import CachedDataset, CacheSettings, torchcache
from torchcache2.core import sizes

CPU = torch.device("cpu")
GROUP = "4:hugetlb,memory:{0}\n1:name=systemd:/other\n0::{0}\n"  # version 1 of control groups, and 2
SPACE = "Limit  Soft Limit  Hard Limit  Units\nMax address space  {}  5  bytes\nMax processes 5 5 processes\n"
V1 = {"limit": "limit_in_bytes", "used": "usage_in_bytes", "files": "total_inactive_file"}
V2 = {"limit": "max", "used": "current", "files": "inactive_file"}


def group(folder, limit, kind):
    """The files of a group that uses 3.9 MB, of which 2.5 MB are files: given up when memory is needed."""
    folder = f"sys/fs/cgroup{folder}/memory."
    stat = f"inactive_anon 7\ninactive_file 5\n{kind['files']} 2000000\n"
    stat += f"active_file 5\n{kind['files'].replace('in', '', 1)} 500000\n"
    return {folder + kind["limit"]: limit, folder + kind["used"]: "3900000\n", folder + "stat": stat}


STEP = group("/slurm/job_2/step_0", "max\n", V2) | group("/memory/slurm/job_2/step_0", "9999999999\n", V1)


@pytest.mark.parametrize(
    ("path", "files", "free"),
    [
        ("/", {}, 5_120_000),
        ("/", {"proc/meminfo": None}, None),
        ("/", {"proc/self/cgroup": None} | group("", "4000000", V2), 5_120_000),
        # Version 2: the group of a container, and those around the group of a job
        ("/", group("", "4000000\n", V2), 2_600_000),
        ("/", group("", "max\n", V2), 5_120_000),
        ("/", group("", "900000\n", V2), 0),
        ("/", group("", "99000000\n", V2), 5_120_000),
        ("/", group("", "4000000\n", V2) | {"proc/meminfo": None}, 2_600_000),
        ("/", group("", "4000000\n", V2 | {"limit": "high"}), 2_600_000),
        ("/slurm/job_2/step_0", group("/slurm/job_2/step_0", "4000000\n", V2), 2_600_000),
        ("/slurm/job_2/step_0", group("/slurm", "4000000\n", V2) | STEP, 2_600_000),
        ("/slurm/job_2/step_0", group("/slurm/job_2", "4000000\n", V2) | STEP, 2_600_000),
        ("/slurm/job_2/step_0", group("/slurm/job_3", "4000000\n", V2) | STEP, 5_120_000),
        # Version 1
        ("/slurm/job_2", group("/memory/slurm/job_2", "4000000\n", V1), 2_600_000),
        ("/slurm/job_2", group("/memory/slurm/job_2", "9223372036854771712\n", V1), 5_120_000),
        ("/slurm/job_2/step_0", group("/memory/slurm", "4000000\n", V1) | STEP, 2_600_000),
        # A container that sees only its own part of the tree
        ("/docker/0f1e", group("/memory", "4000000\n", V1), 2_600_000),
        ("/kubepods/pod1/2b/inner", group("/inner", "4000000\n", V2), 2_600_000),
        ("/kubepods/pod1/2b/inner", group("/inner", "max\n", V2) | group("", "4000000\n", V2), 2_600_000),
        ("/../other", group("", "4000000\n", V2), 2_600_000),
        # Address space
        ("/", {"proc/self/limits": SPACE.format(4_048_128)}, 4_000_000),
        ("/", {"proc/self/limits": SPACE.format("unlimited")}, 5_120_000),
    ],
)
def test_free_memory_is_the_least_that_machine_groups_and_process_leave(path, files, free, tmp_path):
    machine = {
        "proc/meminfo": "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: 5000 kB\nActive(anon): 7 kB\n"
    }
    own = {"proc/self/cgroup": GROUP.format(path), "proc/self/status": "Name:\tx 3\nVmSize:\t 47 kB\n"}
    for name, text in (machine | own | files).items():
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
    assert sizes.free_memory(CPU, str(tmp_path)) == free


LIMITED = """
import os, resource, torch
from tests.helpers import warm
from torchcache2 import CachedDataset
from torchcache2.core.sizes import host_memory
from tests.helpers.storage import put
from torchcache2.tiers.shared.tier import SharedTier

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
tier, before = SharedTier(os.urandom(16), 10**6, set), len(os.listdir("/proc/self/fd"))
for number in range(40):
    put(tier, [number], namespace=bytes([number]) * 16)
print(tier.stats().faults, len(os.listdir("/proc/self/fd")) - before)
tier.close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 400_000_000,) * 2)
print(host_memory() == used + 400_000_000)
dataset = CachedDataset([torch.full((10**6,), float(i)) for i in range(40)])
print([dataset[i][0].item() == i for i in range(40)].count(True), dataset.stats().memory_bytes)
"""


def test_limits_of_a_process_bound_what_is_kept_and_open():
    faults, opened, is_bounded, right, kept = warm.run(LIMITED).words
    assert (faults, is_bounded, right) == ("0", "True", "40") and int(opened) <= 16
    assert 50_000_000 < int(kept) <= 100_000_000  # a quarter of the free address space


@pytest.mark.parametrize("size", [2**63, 2**70, "99999999999TB"])
def test_a_budget_of_more_than_all_memory_is_all_of_it(size):
    settings = CacheSettings(max_memory_cache_size=size)
    assert settings.memory_budget() == sizes.host_memory() < 2**62
    assert sizes.parse_size("remote_size", size) == 2**63 - 1
    assert CacheSettings(max_memory_cache_size=size, memory_cache_device=None).memory_budget() == 2**63 - 1


@pytest.mark.parametrize("kind", ["module", "ranks", "dataset"])
def test_rows_are_kept_with_such_a_budget(kind, monkeypatch):
    if kind == "dataset":
        dataset = CachedDataset([torch.ones(3)] * 4, memory_size=2**64)
        assert [len(dataset[i]) for i in (0, 0)] == [3, 3] and dataset.stats().hits == 1
        dataset.close()
        return
    options = {"distributed": "node"} if kind == "ranks" else {}
    model = torchcache(torch.nn.ReLU(), max_memory_cache_size=2**64, **options)
    for _ in range(2):
        model(torch.ones(2, 3))
    assert model.cache_instance.stats().hits >= 2


def test_rows_are_not_allocated_beyond_half_of_what_is_free(monkeypatch):
    monkeypatch.setattr(sizes, "free_memory", lambda device: 1 << 30)
    sizes.check_room(1 << 29)
    with pytest.raises(MemoryError, match=r"536\.9 MB of rows at once, with 1\.1 GB of memory free"):
        sizes.check_room((1 << 29) + 1)
    monkeypatch.setattr(sizes, "free_memory", lambda device: 1000)
    sizes.check_room(1 << 20)  # nobody asks what is free for a few bytes
    monkeypatch.setattr(sizes, "free_memory", lambda device: None)
    sizes.check_room(1 << 50)
