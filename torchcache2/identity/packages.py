"""The content of installed packages: of their Python files, and of extension modules that were built here.

A package's ``RECORD`` has the hash of each of its files. A file that is not in it, has another size or is
newer is read. So a package counts alike wherever and whenever it was installed, and an edit counts. The
extension modules of a released version differ between Pythons and platforms: its version stands for them.
"""

from __future__ import annotations

import base64
import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES

from xxhash import xxh3_128_hexdigest

_CODE = (".py", *EXTENSION_SUFFIXES)
_OF_BUILD = "__config__.py"  # where NumPy and SciPy note which compiler and which Python built them
_INSTALLED_FROM = b".dist-info/direct_url.json"  # a folder, a repository or a file, not an index


class Packages:
    """Remembers each package's digest, until a file that somebody asks for has changed."""

    def __init__(self) -> None:
        # By place and name: the digest, and time and size of each file by path.
        self._known: dict[tuple[str, str], tuple[str, dict[str, tuple[int, int]]]] = {}

    def digest(self, module: str, file: str) -> str:
        """What a module's package counts by, besides its version."""
        try:
            status = os.stat(file)
        except OSError:  # it is in an archive, or part of Python
            return ""
        root, *inner = module.split(".")
        place = os.path.dirname(file)
        for _ in range(len(inner) + os.path.basename(file).startswith("__init__.")):
            place = os.path.dirname(place)
        digest, seen = self._known.get((place, root), ("", {}))
        if seen.get(file) != _seen(status):
            files = dict(_files(place, root)) or {os.path.basename(file): status}
            text = repr(sorted(_hashes(place, root, files).items()))
            digest = xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))
            seen = {os.path.join(place, name): _seen(status) for name, status in files.items()}
            self._known[place, root] = digest, seen | {file: _seen(status)}
        return digest


PACKAGES = Packages()


def _seen(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _hashes(place: str, root: str, files: dict[str, os.stat_result]) -> dict[str, str]:
    """The hash and size of each file that counts."""
    newest, is_released, recorded = _recorded(place, root)
    found = {}
    for name, status in files.items():
        known = line = recorded.get(name, "")
        if status.st_mtime_ns > newest or not known.endswith(f",{status.st_size}"):
            line = f"{_hash(f'{place}{os.sep}{name}')},{status.st_size}"
        if not is_released or line != known or name.endswith(".py"):
            found[name] = line
    return found


def _files(place: str, root: str) -> Iterator[tuple[str, os.stat_result]]:
    """The files with code of a package, by their paths in its place, with ``/``."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(f"{place}{os.sep}{folder}") as entries:
            for entry in entries:
                if not folder and entry.name.partition(".")[0] != root:
                    continue
                if entry.name.endswith(_CODE) and entry.name != _OF_BUILD and entry.is_file():
                    yield folder + entry.name, entry.stat()
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{folder}{entry.name}/")


def _recorded(place: str, root: str) -> tuple[int, bool, dict[str, str]]:
    """When a package was installed, whether from an index, and the hash and size of each of its files."""
    newest, is_released, recorded = 0, False, dict[str, str]()
    start = root.encode()
    found = glob.glob("*.dist-info", root_dir=place)
    for name in sorted(found, key=lambda name: (not name.startswith(root), name)):
        with contextlib.suppress(OSError), open(os.path.join(place, name, "RECORD"), "rb") as file:
            data = b"\n" + file.read()
            if not any(b"\n" + start + one in data for one in (b"/", b".")):
                continue
            is_released = _INSTALLED_FROM not in data
            newest = max(newest, os.fstat(file.fileno()).st_mtime_ns)
            for line in data.decode("utf-8", "surrogateescape").splitlines():
                path, _, rest = line.partition(",")  # a path with a comma is read
                if path.partition("/")[0].partition(".")[0] == root:
                    recorded[path] = rest
            if name.startswith(root):
                break
    return newest, is_released, recorded


def _hash(path: str) -> str:
    """The hash of a file, as a ``RECORD`` has it; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = hashlib.sha256(file.read()).digest()
    except OSError:
        return ""
    return f"sha256={base64.urlsafe_b64encode(data).rstrip(b'=').decode()}"
