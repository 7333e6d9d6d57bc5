"""No free memory, on a device or the host: whether a call has found none, or the cache itself."""

from __future__ import annotations

import re
from typing import TypeVar

import torch

from torchcache2.core.sizes import is_out_of_memory
from torchcache2.engine.collective.known import is_told
from torchcache2.engine.steps import Steps

__all__ = ["OwnMemoryError", "device_of", "told_apart"]

_OF_CALL = "_torchcache2_of_call"
T = TypeVar("T")


class OwnMemoryError(Exception):
    """Raised when the cache's own work has found no memory: the call is to be made without it.

    `error` is what was raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def told_apart(steps: Steps[T]) -> Steps[T]:
    """Run steps. An out-of-memory error of a call that they make is raised as it is.

    So is one with which a step of all ranks has ended, as no rank may go on alone.

    Raises
    ------
    OwnMemoryError
        In place of another out-of-memory error.
    """
    try:
        call = next(steps)
        while True:
            value = error = None
            try:
                value = yield call
            except BaseException as raised:
                error = raised
                if is_out_of_memory(raised):
                    setattr(raised, _OF_CALL, True)  # to keep the error would keep the tensors of the call
            call = steps.send(value) if error is None else steps.throw(error)
    except StopIteration as stop:
        result: T = stop.value
        return result
    except Exception as raised:
        if not is_out_of_memory(raised) or is_told(raised) or hasattr(raised, _OF_CALL):
            raise
        raise OwnMemoryError(raised) from None
    finally:
        value = error = None  # its traceback refers to this frame: a cycle, which would keep tensors


def device_of(error: torch.cuda.OutOfMemoryError) -> torch.device | None:
    """The device that has no memory, if the message of the error says so."""
    found = re.search(r"\bGPU (\d+)", str(error))
    return None if found is None else torch.device("cuda", int(found[1]))
