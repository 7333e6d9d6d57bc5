"""`Objects`: one process's requests to a bucket, with retries, warnings and pauses.

Also here: ranges that were fetched, until they are read (`Pieces`), and heads of segments (`read_heads`).
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import random
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torchcache2.core.errors import AwayError, DamagedError, NewerFormatError, OptionError
from torchcache2.core.logs import WarnOnce
from torchcache2.core.places import Bucket
from torchcache2.core.process import Forked, ProcessLock
from torchcache2.files.directory import TAG, check_format, stated_format
from torchcache2.files.filesystem import FileInfo
from torchcache2.files.layout import head_size
from torchcache2.tiers.base import Breaker
from torchcache2.tiers.bucket.connection import Answer, Connection, Kind, Texts, kind_of, size_of

_MOST_TAG, _MOST_TEXT = 4096, 64 << 10  # bytes
_FIRST_READ = 64 << 10  # bytes, as most heads are shorter
_FINAL = (Kind.GONE, Kind.SHORT)  # of an object that is read
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # of a local file
_MISTAKES = (TypeError, ValueError, ImportError, AttributeError)  # options that a library refuses
PIECE = 8 << 20  # bytes of one request; several at once are faster than a long one
Range = tuple[str, int, int]  # of an object: its name, and where it begins and ends
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
    tell : WarnOnce, optional
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
        tell: WarnOnce | None = None,
        *,
        patience: float = 10.0,
        tries: int = 3,
        backoff: float = 0.5,
        pause: float = 2.0,
    ) -> None:
        self.bucket = bucket
        self.tell = WarnOnce() if tell is None else tell
        self.cause: Exception | None = None
        self.faults = self.corrupt = self.bytes_up = self.bytes_down = 0
        self._patience, self._tries, self._backoff = patience, tries, backoff
        self._texts = Texts(bucket.storage_options)
        self._breaker = Breaker(pause)
        self._lock = ProcessLock()
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
        return self._ask(lambda connection: connection.listing(folder), None)

    def read(self, ranges: Sequence[Range]) -> list[bytes | None]:
        """Read ranges ``(name, start, end)``, many at once; None for those that fail: see `fetch`."""
        return [None if isinstance(one, Exception) else one for one in self.fetch(ranges)]

    def fetch(self, ranges: Sequence[Range], *, may_be_short: bool = False) -> list[bytes | Exception]:
        """Like `read`, with the error in place of None.

        `FileNotFoundError` if the object is gone, `DamagedError` if it is too short, `AwayError` if the
        bucket fails.
        """
        wanted = [one for one in ranges if one[1] < one[2]]
        answers = iter(self._each(wanted, lambda one: one.read, lambda _, error: kind_of(error) in _FINAL))
        found: list[bytes | Exception] = []
        for name, start, end in ranges:
            data = next(answers) if start < end else b""
            kind = kind_of(data) if isinstance(data, Exception) else None
            if kind is Kind.GONE:
                data = FileNotFoundError(errno.ENOENT, "there is no such object", name)
            elif kind is Kind.SHORT or (kind is None and len(data) != end - start and not may_be_short):
                data = DamagedError(f"it ends before byte {end}")
            found.append(data if isinstance(data, Exception) else bytes(data))
        with self._lock():
            self.bytes_down += sum(len(one) for one in found if isinstance(one, bytes))
        return found

    def download(self, name: str, path: str, size: int) -> Exception | None:
        """Download an object of so many bytes to a local file; the error, as that of `fetch`, if that fails.

        If the file cannot be written, it is this `OSError`.
        """
        (error,) = self._each(
            [(name, path, size)],
            lambda one: one.download,
            lambda _, error: kind_of(error) in _FINAL or getattr(error, "errno", None) in _FULL,
        )
        if error is None:
            with self._lock():
                self.bytes_down += size
        elif kind_of(error) is Kind.GONE:
            return FileNotFoundError(errno.ENOENT, "there is no such object", name)
        return error if isinstance(error, Exception) else None

    def texts(self, names: Sequence[str], most: int = _MOST_TEXT) -> dict[str, bytes]:
        """Small objects, many at once, without those that are gone, empty or have `most` bytes or more."""
        found = zip(names, self.fetch([(name, 0, most) for name in names], may_be_short=True), strict=True)
        return {name: data for name, data in found if isinstance(data, bytes) and 0 < len(data) < most}

    def write(self, name: str, content: str | bytes) -> bool:
        """Like `write_all`, for one object."""
        return self.write_all([(name, content)])[0]

    def write_all(self, contents: Sequence[tuple[str, str | bytes]]) -> list[bool]:
        """Write objects, all at once, replacing them; returns whether that worked for each.

        The content is bytes, or the path of a local file. It is no fault if that is gone.
        """
        sizes = [size_of(content) for _, content in contents]
        answers = self._each(contents, lambda one: one.write, lambda part, _: _is_gone(part[1]), writes=True)
        found = [not isinstance(one, BaseException) for one in answers]
        with self._lock():
            self.bytes_up += sum(size for size, is_there in zip(sizes, found, strict=True) if is_there)
        return found

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
            self._patiently(remove)
        except Exception as error:
            raise OSError(f"{self.bucket.url}: {self._texts.of(error)}") from None

    def close(self) -> None:
        """Close the connections; afterwards nothing in the bucket is found."""
        self.is_closed = True
        self._forget()

    def _each(
        self,
        parts: Sequence[T],
        ask: Callable[[Connection], Callable[[list[T]], list[Answer]]],
        is_final: Callable[[T, BaseException], bool],
        *,
        writes: bool = False,
    ) -> list[Answer]:
        """The answer to each part of a request.

        A part whose error is not final is asked for again, and has an `AwayError` in the end.
        """
        found: list[Answer] = [AwayError(errno.EIO, f"{self.bucket.url} fails")] * len(parts)
        left = list(range(len(parts)))

        def ask_left(connection: Connection) -> None:
            again = {}
            for i, answer in zip(left, ask(connection)([parts[i] for i in left]), strict=True):
                if isinstance(answer, BaseException) and not is_final(parts[i], answer):
                    again[i] = answer
                else:
                    found[i] = answer
            left[:] = again
            for error in again.values():
                raise error

        if left:
            self._ask(ask_left, None, writes=writes)
        return found

    def _ask(self, what: Callable[[Connection], T], failed: T, *, writes: bool = False) -> T:
        """The result of a function of the connection; `failed` if the bucket fails or pauses."""
        if self.is_closed or not self._breaker.allows():
            return failed
        try:
            return self._patiently(what)
        except Exception as error:
            if not self.is_closed:
                self._met(error, writes)
        return failed

    def _patiently(self, what: Callable[[Connection], T]) -> T:
        """Call a function of the connection until it works, or the tries are used up."""
        left = 1 if self._breaker.failures else self._tries
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
        self._breaker.worked()
        return answer

    def _met(self, error: Exception, writes: bool = False) -> None:
        """Respond to a fault: make no requests for a while, unless credentials forbid only to write."""
        self.faults += 1
        text, url = self._texts.of(error), self.bucket.url
        if not writes or kind_of(error) is Kind.FAULT:
            if self._breaker.allows():  # another thread may have met the fault at the same time
                self._breaker.failed()
            self.cause = OSError(f"{url}: {text}")
        message = "%s fails (%s): %s. It is not used for now, and tried again later"
        part = "writing" if writes else "reading"
        self.tell(f"{url} {part} {type(error).__name__}", message, url, part, text)

    def _connection(self) -> Connection:
        with self._lock():
            if self.is_closed:
                raise OSError("it is closed")
            if not self._held:
                self._held.append(Connection(self.bucket, self._patience))
            return self._held[0]

    def _forget(self) -> None:
        with self._lock():
            _close(self._held)

    def _check(self, connection: Connection) -> None:
        url = self.bucket.url
        (tag,) = connection.read([(TAG, 0, _MOST_TAG)])
        kind = kind_of(tag) if isinstance(tag, BaseException) else None
        if kind is Kind.GONE:
            try:
                connection.ask_for_bucket()
            except Exception as error:  # credentials may forbid this request
                if kind_of(error) is not Kind.REFUSED:
                    raise
            return
        if kind not in (None, Kind.SHORT):
            raise tag
        number = None if kind else stated_format(tag)
        if number is None:
            raise OptionError(f"{url} has a {TAG} of another program: give another folder")
        check_format(url, number)


def _is_gone(content: str | bytes) -> bool:
    return isinstance(content, str) and not os.path.exists(content)


def read_heads(objects: Objects, sizes: Mapping[str, int]) -> dict[str, bytes]:
    """The heads of segments, by name, many at once: their first bytes, and then the rest of longer ones.

    Without those that are gone or fail. The others are at least whole unless they are damaged; not checked.
    """
    data = dict.fromkeys(sizes, b"")
    ends = {name: min(size, _FIRST_READ) for name, size in sizes.items()}
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


def _close(held: list[Connection]) -> None:
    with contextlib.suppress(IndexError):  # another thread was faster
        while held:
            held.pop().close()


class Pieces:
    """Fetched ranges, or the errors, by name. Those to be fetched are noted first; for one thread."""

    def __init__(self) -> None:
        self.wanted: list[Range] = []
        self._found: dict[str, list[tuple[int, int, bytes | Exception]]] = {}

    def at(self, name: str, start: int) -> memoryview | Exception | None:
        """Fetched bytes from `start` on, or the error; None if they were not fetched."""
        found = self._found.get(name, ())
        place = bisect.bisect_right(found, start, key=lambda piece: piece[0]) - 1
        if place < 0 or start >= found[place][1]:
            return None
        first, _, data = found[place]
        return data if isinstance(data, Exception) else memoryview(data)[start - first :]

    def fetch(self, objects: Objects, ranges: Sequence[Range]) -> list[tuple[Range, bytes | Exception]]:
        """Fetch ranges at once, long ones in parts; also returns these."""
        parts = cut(ranges, PIECE)
        found = list(zip(parts, objects.fetch(parts), strict=True))
        for (name, start, end), data in found:
            self._found.setdefault(name, []).append((start, end, data))
        for name in {name for name, _, _ in parts}:
            self._found[name].sort(key=lambda piece: piece[0])
        return found


def cut(ranges: Sequence[Range], size: int) -> list[Range]:
    """Ranges in parts of up to `size` bytes."""
    return [(name, at, min(at + size, end)) for name, start, end in ranges for at in range(start, end, size)]


def merged(ranges: Sequence[Range], gap: int) -> list[Range]:
    """Ranges in order, neighbours up to `gap` bytes apart as one."""
    found: list[Range] = []
    for name, start, end in sorted(ranges):
        if found and found[-1][0] == name and start - found[-1][2] <= gap:
            found[-1] = name, found[-1][1], max(end, found[-1][2])
        else:
            found.append((name, start, end))
    return found
