"""What a process has for each of its process groups, whoever asks for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from torchcache2.core.errors import RankError

if TYPE_CHECKING:  # not all builds of torch have it
    from torch.distributed import ProcessGroup

__all__ = ["shared"]

T = TypeVar("T")


class _Made:
    # Process groups are state of the process, and torch itself keeps them so. All decorated modules of a
    # group share one exchange: with two, ranks that call different modules would wait in different ones.
    of_group: ClassVar[WeakKeyDictionary[ProcessGroup, tuple[int, Any]]] = WeakKeyDictionary()
    lock: ClassVar[threading.Lock] = threading.Lock()


def shared(group: ProcessGroup, make: Callable[[], T]) -> T:
    """What was made for a group in this process; made now, if nothing was. It goes when the group goes.

    Raises
    ------
    RankError
        In a process that was forked from the one that has made it.
    """
    if group not in _Made.of_group:
        with _Made.lock:
            if group not in _Made.of_group:
                _Made.of_group[group] = os.getpid(), make()
    pid, made = _Made.of_group[group]
    if pid != os.getpid():
        raise RankError(
            "this process was forked from a rank, and cannot speak for it: call the module in the rank itself"
        )
    result: T = made
    return result
