"""Families of models, which `make soak` goes through: one model of each, found by name."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Callable, Iterator

import torch
from torch import nn

from tests.torch.zoo.checks import Entry

MOST_PARAMETERS = 40_000_000


class SkippedError(Exception):
    """A family that is left out; why."""


@dataclasses.dataclass(frozen=True)
class Family:
    """A library's models of one kind.

    Attributes
    ----------
    library, name : str
    entry : callable
        Finds a model, and how it is called. Raises `SkippedError` where there is none.
    """

    library: str
    name: str
    entry: Callable[[], Entry]

    def __str__(self) -> str:
        return f"{self.library} {self.name}"


def size(build: Callable[[], nn.Module]) -> int:
    """How many parameters a model would have."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in build().parameters())


def check_size(build: Callable[[], nn.Module]) -> None:
    """Skip what is too large for a test."""
    count = size(build)
    if count > MOST_PARAMETERS:
        raise SkippedError(f"too large: {count / 1e6:,.0f} M parameters")


@contextlib.contextmanager
def time_box(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, in seconds of the processor."""

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
