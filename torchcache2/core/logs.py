"""Logging: the ``torchcache2`` logger, configured by environment variables or from code.

Only the ``torchcache2`` logger is configured, never the root logger. It does not propagate, so that
applications with handlers do not print every line twice.
"""

from __future__ import annotations

import logging
import os
import reprlib
import sys
from collections.abc import Callable, Collection
from typing import Any, TextIO

from torchcache2.core.errors import OptionError

logger = logging.getLogger("torchcache2")

DEFAULT_LEVEL = logging.WARNING
DEFAULT_FMT = "[torchcache2] - %(asctime)s - %(levelname)s - %(message)s"
DEFAULT_DATEFMT = "%Y-%m-%d %H:%M:%S"
_MOST_NAMES, _LONGEST = 3, 80
_LEVELS = "DEBUG, INFO, WARNING, ERROR, CRITICAL"


class WarnOnce:
    """Logs each kind of event only the first time.

    `is_first(what)` returns whether no other process has logged it; None: each process logs.
    """

    def __init__(self, is_first: Callable[[str], bool] | None = None) -> None:
        self._told: dict[str, object] = {}
        self._is_first = is_first

    def __call__(
        self, what: str, message: str, *args: object, log: Callable[..., None] = logger.warning
    ) -> None:
        """Log a message, unless one with the same `what` was logged before."""
        mine = object()
        # `setdefault` is atomic, so only one of two threads logs.
        is_mine = self._told.setdefault(what, mine) is mine
        if is_mine and (self._is_first is None or self._is_first(what)):
            log(message, *args)


def listed(names: Collection[str]) -> str:
    """At most three names, long ones shortened, and how many more there are."""
    shown = [
        name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…" for name in list(names)[:_MOST_NAMES]
    ]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def shown(value: object) -> str:
    """A value for a message, shortened if long; for modules and tensors, only type and shape."""
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxother, self.maxlong = 500, 300, 100  # paths must be whole

    def repr1(self, x: Any, level: int) -> str:
        torch: Any = sys.modules.get("torch")  # importing it takes seconds
        if torch is not None and isinstance(x, (torch.nn.Module, torch.Tensor)):
            is_plain = type(x) in (torch.Tensor, torch.nn.Parameter)
            return f"<{type(x).__qualname__}{f' {tuple(x.shape)}' if is_plain else ''}>"
        is_builtin = type(x).__module__ == "builtins"  # the base class decides by type names alone
        return super().repr1(x, level) if is_builtin else self.repr_instance(x, level)


_SHORT = _Short()


def set_logger_config(
    level: int | str | None = None,
    fmt: str | None = None,
    datefmt: str | None = None,
    stream: TextIO | None = None,
    filename: str | os.PathLike[str] | None = None,
) -> None:
    """Configure the ``torchcache2`` logger, replacing its handlers.

    Omitted arguments come from the environment variable, else from the default.

    Parameters
    ----------
    level : int or str, optional
        ``TORCHCACHE_LOG_LEVEL``; default ``WARNING``. An unknown level causes a warning and becomes the
        default.
    fmt, datefmt : str, optional
        ``TORCHCACHE_LOG_FMT`` and ``TORCHCACHE_LOG_DATEFMT``, as in `logging.Formatter`.
    stream : file object, optional
        Where lines go; default: standard error as it is when the line is written.
    filename : path, optional
        ``TORCHCACHE_LOG_FILE``; lines are also appended to this file. If it cannot be opened, a warning says
        so.
    """
    environ = os.environ
    fmt = fmt or environ.get("TORCHCACHE_LOG_FMT") or DEFAULT_FMT
    datefmt = datefmt or environ.get("TORCHCACHE_LOG_DATEFMT") or DEFAULT_DATEFMT
    filename = filename or environ.get("TORCHCACHE_LOG_FILE") or None
    if level is None:
        level = environ.get("TORCHCACHE_LOG_LEVEL") or DEFAULT_LEVEL

    problems = []
    if not isinstance(level, (int, str)):
        raise OptionError(f"level={shown(level)}: expected an int or one of {_LEVELS}")
    number = _level_number(level)
    if number is None:
        problems.append(f"no log level {level!r}: use one of {_LEVELS}; using WARNING")
        number = DEFAULT_LEVEL
    handlers: list[logging.Handler] = [_StderrHandler() if stream is None else logging.StreamHandler(stream)]
    if filename is not None:
        try:
            handlers.append(logging.FileHandler(filename, mode="a", encoding="utf-8"))
        except OSError as error:
            problems.append(f"cannot append the log to {os.fspath(filename)!r}: {error}")

    formatter = logging.Formatter(_checked(fmt, problems), datefmt)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(number)
    logger.propagate = False
    for problem in problems:
        logger.warning(problem)


set_logger_config.__module__ = "torchcache2"  # the path in pickles, wherever this file is


def _level_number(level: int | str) -> int | None:
    if isinstance(level, int):
        return level
    text = level.strip()
    if text.isdecimal():
        return int(text)
    number = logging.getLevelName(text.upper())
    return number if isinstance(number, int) else None


def _checked(fmt: str, problems: list[str]) -> str:
    try:
        logging.Formatter(fmt).format(logging.makeLogRecord({}))
    except (KeyError, TypeError, ValueError) as error:
        problems.append(f"log format {fmt!r} is not valid ({error}); using the default")
        return DEFAULT_FMT
    return fmt


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 takes none
    """Writes to `sys.stderr` as it is now, so that redirection and notebooks work."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr
