"""`Objects`: what one process asks of a bucket, and how its faults are met."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from torchcache2.core.errors import OptionError
from torchcache2.core.logs import ToldOnce
from torchcache2.core.places import Bucket
from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import TAG, check_format, stated_format
from torchcache2.files.errors import NewerFormatError
from torchcache2.files.filesystem import FileInfo
from torchcache2.tiers.remote.instances import Instance
from torchcache2.tiers.remote.refusals import Kind, kind_of
from torchcache2.tiers.remote.session import READING, WRITING, Session

_MOST_TAG, _MOST_TEXT = 4096, 64 << 10  # bytes
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Objects:
    """The objects below the URL of a bucket; faults of the bucket are met inside.

    A name is relative to the URL. Threads may share this, and a forked child has a session of its own. What
    fails because of the network or the server is tried again; if that does not help, it is a fault, there is
    one warning, and the bucket is left out for a while: nothing is asked of it, and nothing is had.

    Parameters
    ----------
    bucket : Bucket
    tell : ToldOnce, optional
        Warns once for each kind of fault.
    patience : float
        Seconds that the bucket may take to answer, besides those for the bytes.
    tries : int
        How often something is tried.
    backoff : float
        Seconds before the second try; each further time twice as long. Up to half of it more or less.
    pause : float
        Seconds for which the bucket is left out first; each further time twice as long, up to a minute.

    Attributes
    ----------
    corrupt : int
        Damaged objects that were met: whoever reads them counts them here.
    bytes_up, bytes_down : int
        What was written and read.
    is_opening : bool
        Whether somebody waits for the heads of segments, so that downloads have to wait.
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
        self.corrupt = self.bytes_up = self.bytes_down = 0
        self.is_opening = False
        self._session = Session(bucket, tell, patience, tries, backoff, pause)
        self._lock = ProcessLock()

    def __repr__(self) -> str:
        return f"Objects({self.bucket.url!r})"

    @property
    def tell(self) -> ToldOnce:
        """Warns once for each kind of fault."""
        return self._session.tell

    @tell.setter
    def tell(self, tell: ToldOnce) -> None:
        self._session.tell = tell

    @property
    def faults(self) -> int:
        """How often the bucket did not answer, or answered with an error."""
        return self._session.faults

    @property
    def cause(self) -> Exception | None:
        """Why the bucket is left out, without secrets; None since reading works again."""
        return self._session.cause

    def check(self) -> None:
        """Raise an error if the URL cannot be that of a cache directory.

        That is an `OptionError` if the credentials are refused, there is no such bucket, or another program
        has tagged the folder as its cache; a `NewerFormatError` if a later version of the format is there. A
        bucket that does not answer is a counted fault and no error.
        """
        url = self.bucket.url
        try:
            self._session.patiently(self._check, READING)
        except (OptionError, NewerFormatError):
            raise
        except Exception as error:
            text = self._session.texts.of(error)
            kind = kind_of(error)
            if kind is Kind.PASSING:
                self._session.met(error, READING)
            elif kind is Kind.REFUSED:
                raise OptionError(f"{url} refuses the credentials ({text}): see storage_options") from None
            elif kind in (Kind.NO_BUCKET, Kind.GONE):
                raise OptionError(f"{url}: there is no such bucket ({text}): make it first") from None
            else:
                raise OptionError(f"{url} cannot be used: {text}") from None

    def listing(self, folder: str = "") -> list[FileInfo] | None:
        """The names directly in a folder, in order; None if the bucket fails."""
        return self._session.ask(lambda instance: _listing(instance, folder), None)

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
        """Read ``(name, start, end)``, many at once.

        None for what is not had as a whole: the object is gone or ends before, or the bucket fails.
        """
        found: list[bytes | None] = [b"" if start >= end else None for _, start, end in ranges]
        left = [i for i, data in enumerate(found) if data is None]

        def read(instance: Instance) -> None:
            failed, again = None, []
            for i, data in zip(left, instance.read([ranges[i] for i in left]), strict=True):
                if not isinstance(data, BaseException):
                    found[i] = bytes(data) if len(data) == ranges[i][2] - ranges[i][1] else None
                elif kind_of(data) is not Kind.GONE:
                    again.append(i)
                    failed = data
            left[:] = again
            if failed is not None:
                raise failed

        if left:
            self._session.ask(read, None)
            self._count(down=sum(len(data) for data in found if data))
        return found

    def texts(self, names: Sequence[str]) -> dict[str, bytes]:
        """Small objects, many at once; those that are gone, empty or larger than 64 kB are left out."""
        found = dict[str, bytes]()

        def read(instance: Instance) -> None:
            for name, data in zip(names, instance.read([(one, 0, _MOST_TEXT) for one in names]), strict=True):
                if not isinstance(data, BaseException):
                    found[name] = bytes(data)
                elif kind_of(data) is not Kind.GONE:
                    raise data

        if names:
            self._session.ask(read, None)
            self._count(down=sum(map(len, found.values())))
        return {name: data for name, data in found.items() if 0 < len(data) < _MOST_TEXT}

    def download(self, name: str, path: str) -> bool:
        """Write an object to a local file, which is replaced; whether that has worked.

        If not, as the object is gone or the bucket fails, there may be a part of it.

        Raises
        ------
        OSError
            If the file cannot be written, which is no fault of the bucket.
        """
        local = list[OSError]()

        def download(instance: Instance) -> bool:
            try:
                instance.download(name, path)
                self._count(down=os.path.getsize(path))
                return True
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _LOCAL:
                    local.append(error)
                elif kind_of(error) is not Kind.GONE:
                    raise
                return False

        with open(path, "wb"):
            pass
        is_there = self._session.ask(download, False)
        if local:
            raise local[0]
        return is_there

    def upload(self, path: str, name: str) -> bool:
        """Write a local file to an object, which is replaced; whether that has worked.

        It is no fault of the bucket if the file cannot be read.
        """

        def upload(instance: Instance) -> bool:
            instance.upload(path, name)
            self._count(up=size)
            return True

        try:
            with open(path, "rb") as file:  # somebody may delete it
                size = os.fstat(file.fileno()).st_size
        except OSError:
            return False
        return self._session.ask(upload, False, WRITING)

    def write(self, name: str, data: bytes) -> bool:
        """Write an object of some bytes, which is replaced; whether that has worked."""

        def write(instance: Instance) -> bool:
            instance.write(name, data)
            self._count(up=len(data))
            return True

        return self._session.ask(write, False, WRITING)

    def remove(self, names: Sequence[str]) -> None:
        """Delete objects; some may be gone already.

        Raises
        ------
        OSError
            If an object cannot be deleted.
        """

        def remove(instance: Instance) -> None:
            for error in instance.remove(names):
                if error is not None and kind_of(error) is not Kind.GONE:
                    raise error

        try:
            self._session.patiently(remove, WRITING)
        except Exception as error:
            raise OSError(f"{self.bucket.url}: {self._session.texts.of(error)}") from None

    def close(self) -> None:
        """Close the connections; from now on the bucket has nothing."""
        self._session.close()

    def _check(self, instance: Instance) -> None:
        url = self.bucket.url
        if instance.is_file():
            raise OptionError(f"{url} is a file: a cache directory is a folder of its own")
        names = [info.name for info in _listing(instance, "")]
        if not names:
            try:
                instance.ask_for_bucket()
            except Exception as error:  # credentials may not allow that question
                if kind_of(error) is not Kind.REFUSED:
                    raise
        if TAG not in names:
            return
        (tag,) = instance.read([(TAG, 0, _MOST_TAG)])
        if isinstance(tag, BaseException) and kind_of(tag) is not Kind.GONE:
            raise tag
        number = None if isinstance(tag, BaseException) else stated_format(tag)
        if number is None:
            raise OptionError(f"{url} has a {TAG} of another program: give another folder")
        check_format(url, number)

    def _count(self, up: int = 0, down: int = 0) -> None:
        with self._lock():
            self.bytes_up += up
            self.bytes_down += down


def _listing(instance: Instance, folder: str) -> list[FileInfo]:
    try:
        return instance.listing(folder)
    except Exception as error:
        if kind_of(error) is Kind.GONE:
            return []
        raise
