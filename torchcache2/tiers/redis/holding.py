"""What keeps our own Redis server: each process of its job has a pipe open, which its guardian looks at."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import ClassVar

from torchcache2.core.places import Servers
from torchcache2.core.process import AtExit
from torchcache2.files.filesystem import Descriptor, FileSystem
from torchcache2.tiers.meeting import is_at
from torchcache2.tiers.redis import guardian

_EXIT_PRIORITY = 0


class _Held:
    """The pipes that this process has open; one that is forked from it has them open, too."""

    pipes: ClassVar[dict[str, Descriptor]] = {}
    exits: ClassVar[dict[str, AtExit]] = {}


def hold(servers: Servers) -> None:
    """Keep our own server, if it is among these, until this process ends; a second call changes nothing."""
    if servers.guard:
        hold_pipe(servers.guard)


def hold_pipe(path: str) -> bool:
    """Have a pipe open until this process ends; False if there is no guardian any more."""
    pipe = _opened(path)
    if pipe is None:
        return False
    _Held.pipes[path] = pipe  # the one before is closed only now; it may be that of an earlier server
    if path not in _Held.exits:
        _Held.exits[path] = AtExit(partial(remove_if_dead, os.path.dirname(path)), _EXIT_PRIORITY)
    return True


def let_go(path: str) -> None:
    """Do not keep the server of a pipe."""
    _Held.pipes.pop(path, None)
    if (at_exit := _Held.exits.pop(path, None)) is not None:
        at_exit.cancel()


def remove_if_dead(folder: str) -> None:
    """Delete what is left of a server whose guardian was killed."""
    with contextlib.suppress(OSError):
        path = os.path.join(folder, guardian.FILE)
        try:
            file = Descriptor(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW))
        except FileNotFoundError:
            os.rmdir(folder)
            return
        fs = FileSystem()
        if fs.lock(file, exclusive=True):
            if is_at(file, path) and _opened(os.path.join(folder, guardian.PIPE)) is None:
                guardian.remove(folder)
            fs.unlock(file)


def _opened(path: str) -> Descriptor | None:
    """A pipe, open for writing; None if nobody reads from it."""
    try:
        return Descriptor(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW))
    except OSError:
        return None
