"""The content of installed packages: of their Python files, and of extension modules that were built here.

A package's ``RECORD`` has the hash of each of its files. A file that is not in it, has another size or is
newer is read. So a package counts alike wherever and whenever it was installed, and an edit counts. The
extension modules of a released version differ between Pythons and platforms: its version stands for them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from typing import NamedTuple

from xxhash import xxh3_128_hexdigest

_CODE = (".py", *EXTENSION_SUFFIXES)
_OF_BUILD = "__config__.py"  # where NumPy and SciPy note which compiler and which Python built them
_INSTALLED_FROM = b".dist-info/direct_url.json"  # a folder, a repository or a file, not an index


class Package(NamedTuple):
    """A package as it was read last.

    Attributes
    ----------
    digest : str
        Hexadecimal; empty if no file can be found.
    edited : set of str
        Modules whose files have changed since this process first read them: it may have loaded the old ones.
    """

    digest: str
    edited: set[str]
    hashes: dict[str, str]
    seen: dict[str, tuple[int, int]]  # time and size of each file


class Packages:
    """Remembers each package, until a file that somebody asks for has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], Package] = {}

    def of(self, module: str, file: str) -> Package:
        """The package of a module with this file."""
        try:
            seen = _seen(os.stat(file))
        except OSError:  # it is in an archive, or part of Python
            return Package("", set(), {}, {})
        root, *inner = module.split(".")
        place = os.path.dirname(file)
        for _ in range(len(inner) + os.path.basename(file).startswith("__init__.")):
            place = os.path.dirname(place)
        known = self._known.get((place, root))
        if known is None or known.seen.get(file) != seen:
            now = _read(place, root, file)
            for name, line in now.hashes.items() if known else ():
                if known.hashes.setdefault(name, line) != line:
                    known.edited.add(name.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
            known = now if known is None else now._replace(edited=known.edited, hashes=known.hashes)
            known.seen.setdefault(file, seen)
            self._known[place, root] = known
        return known


PACKAGES = Packages()


def _seen(status: os.stat_result) -> tuple[int, int]:
    return status.st_mtime_ns, status.st_size


def _read(place: str, root: str, file: str) -> Package:
    files = dict(_files(place, root)) or {os.path.basename(file): os.stat(file)}
    newest, is_released, recorded = _recorded(place, root)
    hashes = {}
    for name, status in sorted(files.items()):
        known = line = recorded.get(name)
        if known is None or status.st_mtime_ns > newest or not known.endswith(f",{status.st_size}"):
            line = f"{_hash(f'{place}{os.sep}{name}')},{status.st_size}"
        if not is_released or line != known or name.endswith(".py"):
            hashes[name] = str(line)
    text = "\n".join(map(",".join, hashes.items()))
    seen = {f"{place}{os.sep}{name}": _seen(status) for name, status in files.items()}
    return Package(xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")), set(), hashes, seen)


def _files(place: str, root: str) -> Iterator[tuple[str, os.stat_result]]:
    """The files with code of a package, by their paths in its place, with ``/``."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with contextlib.suppress(OSError), os.scandir(f"{place}{os.sep}{folder}") as entries:
            for entry in entries:
                if not folder and entry.name.partition(".")[0] != root:
                    continue
                if entry.name.endswith(_CODE) and entry.name != _OF_BUILD:
                    yield folder + entry.name, entry.stat()
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(f"{folder}{entry.name}/")


def _recorded(place: str, root: str) -> tuple[int, bool, dict[str, str]]:
    """When a package was installed, whether from an index, and the hash and size of each of its files."""
    newest, is_released, recorded = 0, False, dict[str, str]()
    start = root.encode()
    for name in sorted(os.listdir(place), key=lambda name: not name.startswith(root)):
        if name.endswith(".dist-info") and not (recorded and not name.startswith(root)):
            with contextlib.suppress(OSError), open(os.path.join(place, name, "RECORD"), "rb") as file:
                data = b"\n" + file.read()
                if not any(b"\n" + start + one in data for one in (b"/", b".")):
                    continue
                is_released, newest = _INSTALLED_FROM not in data, os.fstat(file.fileno()).st_mtime_ns
                for line in data.decode("utf-8", "surrogateescape").splitlines():
                    path, _, rest = line.partition(",")  # a path with a comma is read
                    if path.partition("/")[0].partition(".")[0] == root:
                        recorded[path] = rest
    return newest, is_released, recorded


def _hash(path: str) -> str:
    """The hash of a file, as a ``RECORD`` has it; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            data = hashlib.sha256(file.read()).digest()
    except OSError:
        return ""
    return f"sha256={base64.urlsafe_b64encode(data).rstrip(b'=').decode()}"
