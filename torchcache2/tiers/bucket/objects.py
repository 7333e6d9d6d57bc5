"""`Objects`: one process's requests to a bucket, with retries, warnings and pauses."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torchcache2.core.errors import AwayError, DamagedError, NewerFormatError, OptionError
from torchcache2.core.logs import ToldOnce
from torchcache2.core.places import Bucket
from torchcache2.core.process import Forked, ProcessLock
from torchcache2.files.directory import TAG, check_format, stated_format
from torchcache2.files.filesystem import FileInfo
from torchcache2.files.layout import head_size
from torchcache2.tiers.base import Breaker
from torchcache2.tiers.bucket.connection import Connection, Kind, Texts, kind_of

_MOST_TAG, _MOST_TEXT = 4096, 64 << 10  # bytes
_MISTAKES = (TypeError, ValueError, ImportError, AttributeError)  # options that a library refuses
T = TypeVar("T")


class Objects:
    """The objects below the URL of a bucket; handles faults of the bucket itself.

    Names are relative to the URL. Threads may share this; a forked child makes its own connection. Failed
    requests are tried again, whatever the reason. If that does not help, it counts a fault, warns once, and
    makes no requests for a while; nothing is found meanwhile. If credentials are refused, it reads them again
    once.

    Parameters
    ----------
    bucket : Bucket
    tell : ToldOnce, optional
        Warns once for each kind of fault.
    patience : float
        Seconds that the bucket may take to answer, besides the transfer.
    tries : int
        How often to try a request.
    backoff : float
        Seconds before the second try, ±50 %; doubles with each further try.
    pause : float
        Seconds without requests after a fault; doubles each time, up to a minute.

    Attributes
    ----------
    faults, corrupt : int
        Requests that failed; damaged objects, which their readers count here.
    cause : Exception or None
        Why the bucket is not used now, without secrets; None if it works.
    bytes_up, bytes_down : int
        Bytes written and read.
    is_closed : bool
    """

    def __init__(
        self,
        bucket: Bucket,
        tell: ToldOnce | None = None,
        *,
        patience: float = 10.0,
        tries: int = 3,
        backoff: float = 0.5,
        pause: float = 2.0,
    ) -> None:
        self.bucket = bucket
        self.tell = ToldOnce() if tell is None else tell
        self.cause: Exception | None = None
        self.faults = self.corrupt = self.bytes_up = self.bytes_down = 0
        self._patience, self._tries, self._backoff = patience, tries, backoff
        self._texts = Texts(bucket.storage_options)
        self._using, self._writing = Breaker(pause), Breaker(pause)  # credentials may forbid writing only
        self._lock = ProcessLock()
        self._shared: dict[str, Any] = {}  # see `Connection`
        self._held: list[Connection] = []  # this process's connection, once made
        self.is_closed = False
        weakref.finalize(self, _close, self._held)
        Forked.add(self._abandon)

    def _abandon(self) -> None:
        """Abandon the parent's connections in a forked child."""
        for connection in self._held:
            connection.abandon()
        self._held.clear()

    def __repr__(self) -> str:
        return f"Objects({self.bucket.url!r})"

    def check(self) -> None:
        """Raise an error if the URL cannot be that of a cache directory.

        `OptionError` if the credentials are refused, the bucket does not exist, or another program has tagged
        the folder as its cache; `NewerFormatError` if it has a later version of the format. A bucket that
        does not answer counts as a fault, without an error.
        """
        url = self.bucket.url
        try:
            self._patiently(self._check)
        except (OptionError, NewerFormatError):
            raise
        except Exception as error:
            text, kind = self._texts.of(error), kind_of(error)
            if isinstance(error, _MISTAKES):
                raise OptionError(f"{url} cannot be used: {text}") from None
            if kind is Kind.REFUSED:
                raise OptionError(f"{url} refuses the credentials ({text}): see storage_options") from None
            if kind in (Kind.NO_BUCKET, Kind.GONE):
                raise OptionError(f"{url}: there is no such bucket ({text}): make it first") from None
            self._met(error)

    def listing(self, folder: str = "") -> list[FileInfo] | None:
        """The names directly in a folder, in order; None if the bucket fails."""
        return self._ask(lambda connection: _listing(connection, folder), None)

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Read ranges ``(name, start, end)``, many at once; None for those that fail: see `fetch`."""
        return [None if isinstance(one, Exception) else one for one in self.fetch(ranges)]

    def fetch(
        self, ranges: Sequence[tuple[str, int, int]], *, may_be_short: bool = False
    ) -> list[bytes | Exception]:
        """Like `read`, with the error in place of None.

        `FileNotFoundError` if the object is gone, `DamagedError` if it is too short, `AwayError` if the
        bucket fails.
        """
        failed = AwayError(errno.EIO, f"{self.bucket.url} fails")
        found: list[bytes | Exception] = [b"" if start >= end else failed for _, start, end in ranges]
        left = [i for i, one in enumerate(found) if one is failed]

        def read(connection: Connection) -> None:
            error, again = None, []
            for i, data in zip(left, connection.read([ranges[i] for i in left]), strict=True):
                name, start, end = ranges[i]
                kind = kind_of(data) if isinstance(data, BaseException) else None
                if kind is Kind.GONE:
                    found[i] = FileNotFoundError(errno.ENOENT, "there is no such object", name)
                elif kind is Kind.SHORT or (kind is None and len(data) != end - start and not may_be_short):
                    found[i] = DamagedError(f"it ends before byte {end}")
                elif kind is None:
                    found[i] = bytes(data)
                else:
                    again.append(i)
                    error = data
            left[:] = again
            if error is not None:
                raise error

        if left:
            self._ask(read, None)
            self._count(down=sum(len(one) for one in found if isinstance(one, bytes)))
        return found

    def texts(self, names: Sequence[str], most: int = _MOST_TEXT) -> dict[str, bytes]:
        """Small objects, many at once, without those that are gone, empty or have `most` bytes or more."""
        found = zip(names, self.fetch([(name, 0, most) for name in names], may_be_short=True), strict=True)
        return {name: data for name, data in found if isinstance(data, bytes) and 0 < len(data) < most}

    def upload(self, path: str, name: str) -> bool:
        """Write a local file to an object, replacing it; returns whether that worked.

        An unreadable local file is not a fault of the bucket.
        """

        def upload(connection: Connection) -> bool:
            connection.upload(path, name)
            self._count(up=size)
            return True

        try:
            with open(path, "rb") as file:  # it may be deleted meanwhile
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return False
        return self._ask(upload, False, writes=True)

    def write(self, name: str, data: bytes) -> bool:
        """Write an object of some bytes, replacing it; returns whether that worked."""

        def write(connection: Connection) -> bool:
            connection.write(name, data)
            self._count(up=len(data))
            return True

        return self._ask(write, False, writes=True)

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects; some may be gone already.

        Raises
        ------
        OSError
            If an object cannot be deleted.
        """

        def remove(connection: Connection) -> None:
            for error in connection.remove(names):
                if error is not None and kind_of(error) is not Kind.GONE:
                    raise error

        try:
            self._patiently(remove, writes=True)
        except Exception as error:
            raise OSError(f"{self.bucket.url}: {self._texts.of(error)}") from None

    def close(self) -> None:
        """Close the connections; afterwards nothing in the bucket is found."""
        self.is_closed = True
        self._forget()

    def _ask(self, what: Callable[[Connection], T], failed: T, *, writes: bool = False) -> T:
        """The result of a function of the connection; `failed` if the bucket fails or pauses."""
        if self.is_closed or not self._allows(writes):
            return failed
        try:
            return self._patiently(what, writes=writes)
        except Exception as error:
            if not self.is_closed:
                self._met(error, writes)
        return failed

    def _patiently(self, what: Callable[[Connection], T], *, writes: bool = False) -> T:
        """Call a function of the connection until it works, or the tries are used up."""
        breakers = [self._using, self._writing] if writes else [self._using]
        left = 1 if any(breaker.failures for breaker in breakers) else self._tries
        seconds = self._backoff
        while True:
            is_new = not self._held
            try:
                answer = what(self._connection())
                break
            except (OptionError, NewerFormatError):
                raise
            except Exception as error:
                kind = kind_of(error)
                if kind is Kind.REFUSED:
                    self._shared.clear()
                    self._forget()  # a new connection reads the credentials again, as they may have expired
                    left = 0 if is_new else 1
                else:
                    left = left - 1 if kind is Kind.FAULT and not isinstance(error, _MISTAKES) else 0
                if left == 0 or self.is_closed:
                    raise
            if kind is Kind.FAULT:
                time.sleep(seconds * random.uniform(0.5, 1.5))
                seconds *= 2
        self.cause = None
        for breaker in breakers:
            breaker.worked()
        return answer

    def _allows(self, writes: bool) -> bool:
        return self._using.allows() and (not writes or self._writing.allows())

    def _met(self, error: Exception, writes: bool = False) -> None:
        """Respond to a fault: pause requests to the bucket, or only writes that the credentials forbid."""
        self.faults += 1
        text, url = self._texts.of(error), self.bucket.url
        is_of_all = not writes or kind_of(error) is Kind.FAULT
        if self._allows(writes):  # another thread may have met the fault at the same time
            (self._using if is_of_all else self._writing).failed()
        if is_of_all:
            self.cause = OSError(f"{url}: {text}")
        message = "%s fails (%s): %s. It is not used for now, and tried again later"
        part = "writing" if writes else "reading"
        self.tell(f"{url} {part} {type(error).__name__}", message, url, part, text)

    def _connection(self) -> Connection:
        with self._lock():
            if self.is_closed:
                raise OSError("it is closed")
            if not self._held:
                self._held.append(Connection(self.bucket, self._patience, self._shared))
            return self._held[0]

    def _forget(self) -> None:
        with self._lock():
            _close(self._held)

    def _check(self, connection: Connection) -> None:
        url = self.bucket.url
        if connection.is_file():
            raise OptionError(f"{url} is a file: a cache directory is a folder of its own")
        names = [info.name for info in _listing(connection, "")]
        if not names:
            try:
                connection.ask_for_bucket()
            except Exception as error:  # credentials may forbid this request
                if kind_of(error) is not Kind.REFUSED:
                    raise
        if TAG not in names:
            return
        (tag,) = connection.read([(TAG, 0, _MOST_TAG)])
        if isinstance(tag, BaseException) and kind_of(tag) not in (Kind.GONE, Kind.SHORT):
            raise tag
        number = None if isinstance(tag, BaseException) else stated_format(tag)
        if number is None:
            raise OptionError(f"{url} has a {TAG} of another program: give another folder")
        check_format(url, number)

    def _count(self, up: int = 0, down: int = 0) -> None:
        with self._lock():
            self.bytes_up += up
            self.bytes_down += down


def read_heads(objects: Objects, sizes: Mapping[str, int], first: int) -> dict[str, bytes]:
    """The heads of segments, by name, many at once: their `first` bytes, and then the rest of longer ones.

    Without those that are gone or fail. The others are at least whole unless they are damaged; not checked.
    """
    data = dict.fromkeys(sizes, b"")
    ends = {name: min(size, first) for name, size in sizes.items()}
    while ends:
        asked = [(name, len(data[name]), end) for name, end in ends.items()]
        ends = {}
        for (name, _, _), piece in zip(asked, objects.read(asked), strict=True):
            data[name] += piece or b""
            with contextlib.suppress(DamagedError):
                if piece is None:  # the object is gone, or the bucket fails
                    del data[name]
                elif (needed := head_size(data[name], sizes[name])) > len(data[name]):
                    ends[name] = needed
    return data


def _listing(connection: Connection, folder: str) -> list[FileInfo]:
    try:
        return connection.listing(folder)
    except Exception as error:
        if kind_of(error) is Kind.GONE:
            return []
        raise


def _close(held: list[Connection]) -> None:
    with contextlib.suppress(IndexError):  # another thread was faster
        while held:
            held.pop().close()
