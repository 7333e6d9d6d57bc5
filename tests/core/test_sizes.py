"""How much memory is free."""

import io

import pytest
import torch

from torchcache2.core import sizes

CPU = torch.device("cpu")
FILES = {
    "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n",
    "/sys/fs/cgroup/memory.max": "4000000\n",
    "/sys/fs/cgroup/memory.current": "3900000\n",
    "/sys/fs/cgroup/memory.stat": "anon 900000\nfile 3000000\ninactive_file 2000000\nactive_file 500000\n",
}


@pytest.mark.parametrize(
    ("changed", "free"),
    [
        ({}, 4_000_000 - (3_900_000 - 2_500_000)),  # what files take is given up when memory is needed
        ({"/sys/fs/cgroup/memory.max": "max\n"}, 5_120_000),
        ({"/sys/fs/cgroup/memory.max": "900000\n"}, 0),
        ({"/sys/fs/cgroup/memory.max": "99000000\n"}, 5_120_000),
        ({"/sys/fs/cgroup/memory.max": None}, 5_120_000),
        ({"/proc/meminfo": None}, None),
    ],
)
def test_free_memory_is_the_least_of_the_machine_and_its_container(changed, free, monkeypatch):
    def opened(path, **_):
        text = (FILES | changed)[path]
        if text is None:
            raise FileNotFoundError(path)
        return io.StringIO(text)

    monkeypatch.setattr(sizes, "open", opened, raising=False)
    assert sizes.free_memory(CPU) == free
