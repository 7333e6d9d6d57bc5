"""`Part`: what one rank does in one step of all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch

from torchcache2.core.keys import Bytes2D, Positions
from torchcache2.core.rows import Parts, Rows
from torchcache2.engine.batch import RefusedError
from torchcache2.engine.collective.apart import apart
from torchcache2.engine.collective.header import Flag
from torchcache2.engine.collective.holdings import Holdings

__all__ = ["Part", "Received", "StandBy"]

_NOWHERE: Positions = np.empty(0, np.int64)


@dataclasses.dataclass
class Received:
    """What a step has brought to this rank.

    Attributes
    ----------
    parts : list of (ndarray of int64, Rows)
        Rows, and which of the keys they have that this rank has asked for: those that it has computed itself,
        and those of other ranks.
    lacking : ndarray of int64
        Which of these keys nobody has sent: this rank computes them now.
    refused : tuple of str, optional
        Why the output must not be stored, as another rank has found: a reason and a sentence.
    refusal : RefusedError, optional
        Why this rank's own part has not stored what it has computed.
    all_pass : bool
        Whether all ranks pass their call by, so that what it calls is called by all.
    notes : list of str
        What the ranks know of calls like theirs; see `Part.note`.
    from_others, to_others : int
        How many rows this rank has received and sent.
    must_run : bool
        Whether this rank runs its forward even if it lacks nothing, since other ranks wait in it.
    """

    parts: Parts = dataclasses.field(default_factory=list)
    lacking: Positions = dataclasses.field(default_factory=lambda: _NOWHERE)
    refused: tuple[str, str] | None = None
    refusal: RefusedError | None = None
    all_pass: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    from_others: int = 0
    to_others: int = 0
    must_run: bool = False

    def context(self) -> AbstractContextManager[None]:
        """The context of the forward: unless all ranks run it, they do not all call the modules within."""
        return contextlib.nullcontext() if self.all_pass or self.must_run else apart()


class Part(Protocol):
    """What one rank does in one step. An exception in any of this is told to the other ranks."""

    caller: str  # what is called, for people
    namespace: bytes
    holdings: Holdings
    group: bytes  # of the keys of `find`; see `Keys`
    device: torch.device  # where rows are used
    is_sharded: bool  # whether the forward of a rank waits for those of the others

    @property
    def flags(self) -> Flag:
        """What is known of this rank after `find`."""
        ...

    def find(self) -> Bytes2D:
        """The distinct keys that this rank has to ask for; called again if rows were dropped meanwhile."""
        ...

    def description(self) -> Mapping[str, Any]:
        """What the namespace stands for, as JSON."""
        ...

    def note(self) -> str:
        """What is known of calls like this by now, for ranks that do not know it yet."""
        ...

    def is_enough(self, received: Received) -> bool:
        """Whether the output can be made of what is there, without a forward."""
        ...

    def compute(self, positions: Positions) -> Rows | None:
        """The rows of some of these keys; they are stored by then. None if nothing was computed."""
        ...


class StandBy:
    """The part of a rank that asks for nothing: it passes its call through, raises, or has left."""

    is_sharded = False
    group = b""

    def __init__(
        self,
        caller: str,
        holdings: Holdings,
        flags: Flag,
        *,
        device: torch.device,
        error: BaseException | None = None,
    ) -> None:
        self.caller = caller
        self.namespace = bytes(16)
        self.holdings = holdings
        self.device = device
        self.flags = flags
        self._error = error

    def find(self) -> Bytes2D:
        """No keys; raises if this rank raises."""
        if self._error is not None:
            raise self._error
        return np.empty((0, 16), np.uint8)

    def description(self) -> Mapping[str, Any]:
        """Nothing: this part has no namespace."""
        return {}

    def note(self) -> str:
        """Nothing is known."""
        return ""

    def is_enough(self, received: Received) -> bool:
        """Nothing is needed."""
        return True

    def compute(self, positions: Positions) -> Rows | None:
        """Nothing is computed."""
        return None
