"""Fixtures for the whole suite. Torch is imported where it is used: who only starts others need not."""

import collections
import gc
import logging
import os
import sys
import threading
from pathlib import Path

import hypothesis
import pytest

# Until tests run, whatever the environment says: to compile all tests takes each process 8 seconds.
sys.dont_write_bytecode = False

hypothesis.settings.register_profile("suite", deadline=None)  # a slow machine is no fault
hypothesis.settings.load_profile("suite")

# Tests that take long, or that share processes or imports which do.
_FIRST = ("tests/pages/", "tests/project/test_sphinx.py", "tests/torch/zoo/")


def pytest_addoption(parser):
    parser.addoption("--device", help="where tensors of the tests are, such as cuda; see `make test-gpu`")


def pytest_configure(config):
    if device := config.getoption("--device"):
        _make_tensors_on(device)
    else:  # kernels run in Triton's interpreter, which has to be asked for before anything imports Triton
        os.environ["TRITON_INTERPRET"] = "1"


def _make_tensors_on(device):
    import torch

    try:
        torch.ones(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the second of a torch that was built without CUDA
        raise pytest.UsageError(f"there is no device {device} for the tests here: {error}") from None
    torch.set_default_device(device)  # also for tensors that are made when a file of tests is imported
    run = threading.Thread.run

    def run_on_device(thread):
        torch.set_default_device(device)  # each thread has a default device of its own
        run(thread)

    threading.Thread.run = run_on_device


def pytest_ignore_collect(collection_path, config):
    """Leave `tests/gpu` out of a run that has no device."""
    is_gpu = collection_path == Path(__file__).parent / "gpu"
    return True if is_gpu and not config.getoption("--device") else None


def _rest_of_one_in(items):
    lists = collections.defaultdict(list)  # the values of each parameter, in the order in which they appear
    for item in items:
        if mark := item.get_closest_marker("one_in"):
            total = 0
            for name, value in item.callspec.params.items():
                values = lists[item.nodeid.partition("[")[0], name]
                if id(value) not in values:
                    values.append(id(value))
                total += values.index(id(value))
            if total % mark.args[0]:
                yield item


def _suits(item, kind):
    if item.get_closest_marker("soak") and not os.environ.get("SOAK"):
        return False
    if item.get_closest_marker("cuda_only"):
        return kind == "cuda"
    return kind == "cpu" or not item.get_closest_marker("cpu_only")


@pytest.hookimpl(tryfirst=True)  # before pytest asks for the markers of `-m`
def pytest_collection_modifyitems(config, items):
    kind = (config.getoption("--device") or "cpu").partition(":")[0]
    items[:] = [item for item in items if _suits(item, kind)]
    for item in _rest_of_one_in(items):
        item.add_marker("slow")
    # A process that has run all of its tests takes some from the end of another's: there are the short ones.
    items.sort(key=lambda item: not item.nodeid.startswith(_FIRST))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    # All that is imported and collected stays, so that looking for garbage meanwhile is a waste.
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.fixture(autouse=True, scope="session")
def _no_bytecode():
    """A module that a test writes twice within a second would run from the bytecode of the first one."""
    sys.dont_write_bytecode = True


@pytest.fixture(autouse=True, scope="module")
def _frozen():
    """What was imported so far is left out of collections, which otherwise take most of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def log():
    """What the torchcache2 logger has said during the test."""
    logger = logging.getLogger("torchcache2")
    handler, level = _Records(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield handler.records
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _seeded(request):
    import torch

    if device := request.config.getoption("--device"):
        torch.set_default_device(device)  # a test before may have set another one
    # `torch.manual_seed` is slow without an accelerator: torch notes for each kind from where it was called.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def make(path):
    """Makes handles of one directory that seal at `flush`, or when a segment is full."""
    from tests.helpers.storage import NEVER, Unsynced
    from torchcache2.tiers.disk.tier import DiskTier

    tiers = []

    def one(*args, where=path, **options):
        tiers.append(DiskTier(where, *args, **{"delay": NEVER, "fs": Unsynced()} | options))
        return tiers[-1]

    yield one
    for tier in tiers:
        tier.close()


@pytest.fixture
def at_once(monkeypatch):
    """New segments are looked for at every miss."""
    monkeypatch.setattr("torchcache2.tiers.disk.index._LOOK_EVERY", 0.0)
