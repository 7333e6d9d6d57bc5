"""Fixtures for the whole suite."""

import logging

import pytest
import torch


class _Records(logging.Handler):
    def __init__(self):
        super().__init__(logging.DEBUG)
        self.records = []

    def emit(self, record):
        self.records.append(record)


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
    torch.manual_seed(0)
