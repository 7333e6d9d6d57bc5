"""`Session`: how one process asks a bucket: patiently, and not at all for a while when that does not help."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import sys
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from torchcache2.core.logs import ToldOnce
from torchcache2.core.places import Bucket
from torchcache2.core.process import ProcessLock
from torchcache2.tiers.breaker import Breaker
from torchcache2.tiers.remote.instances import Instance
from torchcache2.tiers.remote.refusals import Kind, Texts, kind_of

READING, WRITING = b"reading", b"writing"  # credentials may allow one of them only
T = TypeVar("T")


class Session(Breaker):
    """The file system of a bucket, which threads may share. A forked child makes one of its own.

    What fails because of the network or the server is tried again. If that does not help, it counts as a
    fault, there is one warning, and the bucket is left out for a while; credentials that are refused are
    read again once. The parameters are those of `Objects`.

    Attributes
    ----------
    texts : Texts
        How errors read without the bucket's secrets.
    """

    def __init__(
        self, bucket: Bucket, tell: ToldOnce | None, patience: float, tries: int, backoff: float, pause: float
    ) -> None:
        super().__init__(tell, pause)
        self.texts = Texts(bucket.storage_options)
        self._bucket = bucket
        self._patience, self._tries, self._backoff = patience, tries, backoff
        self._causes: dict[bytes | None, Exception] = {}  # None: neither reading nor writing works
        self._lock = ProcessLock()
        self._held: list[Instance] = []  # that of this process, when there is one
        self._is_closed = False
        weakref.finalize(self, _close, self._held)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=functools.partial(_forked, weakref.ref(self)))

    @property
    def cause(self) -> Exception | None:
        """Why reading does not work; None since it does."""
        return self._causes.get(None) or self._causes.get(READING)

    def ask(self, what: Callable[[Instance], T], failed: T, part: bytes = READING) -> T:
        """What a function of an instance returns; `failed` if the bucket fails or is left out."""
        if self._is_closed or not self.allows(part):
            return failed
        try:
            return self.patiently(what, part)
        except Exception as error:
            if not self._is_closed:
                self.met(error, part)
        return failed

    def patiently(self, what: Callable[[Instance], T], part: bytes) -> T:
        """Try a function of an instance until it works; raises what does not pass."""
        left = 1 if self._causes.keys() & {None, part} else self._tries
        seconds = self._backoff
        while True:
            is_new = not self._held
            try:
                answer = what(self._instance())
                break
            except Exception as error:
                kind = kind_of(error)
                if kind is Kind.REFUSED:
                    self._forget()  # a new instance reads the credentials again, as they may have expired
                    left = 0 if is_new else 1
                else:
                    left = left - 1 if kind is Kind.PASSING else 0
                if left == 0 or self._is_closed:
                    raise
            if kind is Kind.PASSING:
                time.sleep(seconds * random.uniform(0.5, 1.5))
                seconds *= 2
        for works in (None, part):
            self._causes.pop(works, None)
        self.worked(part)
        return answer

    def met(self, error: Exception, part: bytes) -> None:
        """Respond to a fault: the bucket is left out for a while, or what the credentials do not allow."""
        self.faults += 1
        text = self.texts.of(error)
        stops = None if kind_of(error) is Kind.PASSING else part
        if self.allows(part):  # another thread may have found out at the same time
            self.failed(stops, is_lasting=True)
        self._causes[stops] = OSError(f"{self._bucket.url}: {text}")
        message = "%s fails (%s): %s. It is left out, and tried again later"
        what = f"{self._bucket.url} {part!r} {type(error).__name__}"
        self.tell(what, message, self._bucket.url, part.decode(), text)

    def close(self) -> None:
        """Close the connections; from now on everything fails."""
        self._is_closed = True
        self._forget()

    def _instance(self) -> Instance:
        with self._lock():
            if self._is_closed:
                raise OSError("it is closed")
            if not self._held:
                self._held.append(Instance(self._bucket, self._patience))
            return self._held[0]

    def _forget(self) -> None:
        with self._lock():
            _close(self._held)


def _close(held: list[Instance]) -> None:
    with contextlib.suppress(IndexError):  # another thread was faster
        while held:
            held.pop().close()


def _forked(reference: weakref.ref[Session]) -> None:
    """Let go of what the parent has opened: this process is a new child."""
    if "fsspec.asyn" in sys.modules:
        sys.modules["fsspec.asyn"].reset_lock()  # versions before 2026 leave the loop of the parent in place
    session = reference()
    if session is not None:
        for instance in session._held:
            instance.abandon()
        session._held.clear()
