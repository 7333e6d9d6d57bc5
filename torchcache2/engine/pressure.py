"""Devices without free memory: whether a call has found none, or the cache itself."""

from __future__ import annotations

import re
import weakref
from typing import TypeVar

import torch

from torchcache2.engine.collective.known import is_told
from torchcache2.engine.steps import Steps

__all__ = ["OwnMemoryError", "device_of", "told_apart"]

T = TypeVar("T")


class OwnMemoryError(Exception):
    """Raised when the cache's own work has found no memory on a device: the call is to be made without it.

    `error` is what torch has raised.
    """

    def __init__(self, error: torch.cuda.OutOfMemoryError) -> None:
        super().__init__(str(error))
        self.error = error


def told_apart(steps: Steps[T]) -> Steps[T]:
    """Run steps. An out-of-memory error of a call that they make is raised as it is.

    So is one with which a step of all ranks has ended: the others have raised, and would never come.

    Raises
    ------
    OwnMemoryError
        In place of another out-of-memory error.
    """
    failure: weakref.ref[BaseException] | None = None  # a reference would keep the tensors of the call
    try:
        call = next(steps)
        while True:
            value = error = None
            try:
                value = yield call
            except BaseException as raised:
                error = raised
                if isinstance(raised, torch.cuda.OutOfMemoryError):
                    failure = weakref.ref(raised)
            call = steps.send(value) if error is None else steps.throw(error)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except torch.cuda.OutOfMemoryError as raised:
        if is_told(raised) or (failure is not None and raised is failure()):
            raise
        raise OwnMemoryError(raised) from None
    finally:
        value = error = None  # its traceback refers to this frame: a cycle, which would keep tensors


def device_of(error: torch.cuda.OutOfMemoryError) -> torch.device | None:
    """The device that has no memory, if the message of the error says so."""
    found = re.search(r"\bGPU (\d+)", str(error))
    return None if found is None else torch.device("cuda", int(found[1]))
