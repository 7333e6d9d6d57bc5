"""What several files here share."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture(scope="module")
def mesh():
    """A mesh of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
