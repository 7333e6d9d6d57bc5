"""PyPI torchcache, imported such that the test runner's logging survives it."""

import logging


def _import():
    # It configures the root logger when it is imported, and closes the handlers that it finds there.
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        from torchcache import torchcache
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return torchcache


torchcache = _import()
