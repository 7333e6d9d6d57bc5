"""Fixtures for the whole suite."""

import gc
import logging
import sys

import hypothesis
import pytest
import torch

from tests.helpers.storage import NEVER, Unsynced
from torchcache2.tiers.disk import catalog as located_module
from torchcache2.tiers.disk.tier import DiskTier

hypothesis.settings.register_profile("suite", deadline=None)  # a slow machine is no fault
hypothesis.settings.load_profile("suite")

# Tests that take long, or that share processes which do.
_FIRST = ("tests/pages/", "tests/project/test_sphinx.py", "tests/torch/zoo/test_names.py")


def pytest_collection_modifyitems(items):
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
def _seeded():
    # `torch.manual_seed` keeps a stack trace for each device that is absent, at every test.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def make(path):
    """Makes handles of one directory that seal at `flush`, or when a segment is full."""
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
    monkeypatch.setattr(located_module, "_LOOK_EVERY", 0.0)
