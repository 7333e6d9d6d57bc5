"""What the tests of an accelerator share. They run under `--device` only; see `make test-gpu`."""

import contextlib

import pytest
import torch


@pytest.fixture
def device(request):
    """Where the tensors of the tests are, with its number."""
    return torch.empty(0, device=request.config.getoption("--device")).device


@pytest.fixture
def streams(device):
    """Makes contexts that run on a stream of their own; on the CPU there are no streams."""

    def make():
        if device.type != "cuda":
            return contextlib.nullcontext()
        return torch.cuda.stream(torch.cuda.Stream(device))

    return make
