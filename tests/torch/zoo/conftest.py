"""Models of other libraries, of today: they are neither for the oldest torch nor for other devices."""

import importlib.metadata


def pytest_ignore_collect(config):
    """Leave this folder out where what it imports is missing."""
    version = importlib.metadata.version("transformers")
    return True if config.getoption("--device") or int(version.split(".")[0]) < 5 else None
