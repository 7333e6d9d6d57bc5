"""Errors that all ranks know, since a step has told them: whoever leaves `join` with one need not tell it."""

from __future__ import annotations

import contextlib

__all__ = ["is_known", "is_told", "make_known"]

_MARK = "_torchcache2_known"


def make_known(error: Exception, exchange: object, step: int) -> Exception:
    """Note on an error that a step of an exchange has ended with it in all ranks; returns the error.

    To keep the error itself would keep the tensors of the call, by its traceback.
    """
    with contextlib.suppress(AttributeError, TypeError):
        setattr(error, _MARK, (id(exchange), step))
    return error


def is_told(error: BaseException) -> bool:
    """Whether a step has ended with this error, so that no rank goes on."""
    return hasattr(error, _MARK)


def is_known(error: BaseException, exchange: object, since: int) -> bool:
    """Whether an error, or one that it followed from, is known from a step after number `since`."""
    cause: BaseException | None = error
    while cause is not None:
        of, step = getattr(cause, _MARK, (0, 0))
        if of == id(exchange) and step > since:
            return True
        cause = cause.__cause__ or cause.__context__
    return False
