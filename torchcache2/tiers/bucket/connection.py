"""`Connection`: one process's fsspec file system for a bucket; every call has a time limit.

It calls only what fsspec and its libraries document: the coroutine of each operation, in fsspec's event loop.
Also here: the meaning of these libraries' errors (`kind_of`), and their text without secrets (`Texts`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import enum
import inspect
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torchcache2.core.errors import require
from torchcache2.core.places import Bucket
from torchcache2.files.filesystem import FileInfo, ulid
from torchcache2.files.layout import SEGMENT, TEMPORARY

_AT_ONCE = 32  # requests
_CONNECT = 5.0  # seconds that a server may take to accept a connection
_SLOWEST = float(1 << 20)  # bytes a second: a connection that is slower counts as one that hangs
_REQUESTS = 50.0  # requests a second: slower ones count as hanging
_CLOSING = 2.0  # seconds
_TIMES = ("mtime", "LastModified", "last_modified", "created")  # when an object was written
Answer = Any  # to one of many requests: such as the bytes of a range, or the exception
_Call = tuple[str, tuple[Any, ...], dict[str, int]]  # a method of the file system, and its arguments


class Connection:
    """The file system of a bucket, for the process that made it.

    An asynchronous file system keeps connections open, and a forked child shares the `epoll` of their event
    loop with its parent: what the child closes, the parent loses. So a child must `abandon` the inherited
    connection before the garbage collector frees any of it, and make its own, in fsspec's new loop.

    Parameters
    ----------
    bucket : Bucket
    patience : float
        Seconds that an answer may take, besides the transfer.
    """

    _abandoned: ClassVar[list[Any]] = []

    def __init__(self, bucket: Bucket, patience: float) -> None:
        self._patience = patience
        kind = _class_of(bucket.url)
        options = {**kind._get_kwargs_from_urls(bucket.url), **bucket.storage_options}
        self._root = kind._strip_protocol(bucket.url).rstrip("/")
        self._is_async = bool(kind.async_impl)
        self._client: Any = None
        if not self._is_async:
            self._fs: Any = kind(**options, skip_instance_cache=True)
            return
        options |= {"asynchronous": True, **_time_limits(kind.protocol, options, patience)}
        self._fs = kind(**options, skip_instance_cache=True)
        self._fs.retries = 1  # of s3fs: our callers retry, and watch the clock
        self._asyn = require("fsspec.asyn", "remote", "a URL")
        thread = self._asyn.iothread[0]
        if thread is not None and not thread.is_alive():  # older fsspec keeps a parent's loop
            self._asyn.reset_lock()
        self._loop = self._asyn.get_loop()
        if hasattr(self._fs, "set_session"):  # s3fs takes a while before its first request
            self._client = self._wait(self._fs.set_session, seconds=_CONNECT + patience)

    def ask_for_bucket(self) -> None:
        """Raise `FileNotFoundError` if there is no bucket: it is the first part of the path.

        On S3, a listing raises this; elsewhere the listing is just empty.
        """
        if self._is_async and "s3" not in self._fs.protocol:
            self._wait(self._fs._info, self._root.lstrip("/").partition("/")[0], seconds=self._patience)

    def listing(self, folder: str) -> list[FileInfo]:
        """The files and folders in a folder, in order."""
        self._fs.invalidate_cache()
        path = self._path(folder)
        try:
            if self._is_async:
                infos = self._wait(self._fs._ls, path, detail=True, seconds=3 * self._patience)
            else:
                infos = self._fs.ls(path, detail=True)
        except Exception as error:
            if kind_of(error) is not Kind.GONE:
                raise
            return []
        found = set()
        for info in infos:
            whole = str(info["name"])
            parent, _, name = whole.rstrip("/").rpartition("/")
            # Objects whose names end with a slash stand for folders: skip them.
            if parent.strip("/") == path.strip("/") and not info.get("islink"):
                if info["type"] == "file" and not whole.endswith("/"):
                    found.add(FileInfo(name, False, int(info["size"] or 0), _mtime(info)))
                elif info["type"] == "directory":
                    found.add(FileInfo(name, True, 0, 0.0))
        return sorted(found)

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> list[Answer]:
        """Read ranges ``(name, start, end)``, many at once: for each its bytes, fewer, or the exception."""
        size = sum(end - start for _, start, end in ranges)
        return self._together(
            [("cat_file", (self._path(name),), {"start": start, "end": end}) for name, start, end in ranges],
            size,
        )

    def write(self, contents: Sequence[tuple[str, str | bytes]]) -> list[Answer]:
        """Write objects, all at once, of bytes or from local files: for each the exception, if any."""
        if not self._is_async:
            return [_tried(self._place, *one) for one in contents]
        size = sum(map(size_of, (content for _, content in contents)))
        return self._together([_writing(self._path(name), content) for name, content in contents], size)

    def download(self, files: Sequence[tuple[str, str, int]]) -> list[Answer]:
        """Download objects ``(name, path, size)`` to local files: for each the exception, if any."""
        calls: list[_Call] = [("get_file", (self._path(name), path), {}) for name, path, _ in files]
        return self._together(calls, sum(size for *_, size in files))

    def remove(self, names: Sequence[str]) -> list[Answer]:
        """Delete objects, many at once: for each None, or the exception."""
        return self._together([("rm_file", (self._path(name),), {}) for name in names])

    def close(self) -> None:
        """Close the connections."""
        if sessions := self._sessions():
            self._client, closing = None, asyncio.run_coroutine_threadsafe(_end(sessions), self._loop)
            if threading.current_thread() is not self._asyn.iothread[0]:  # else the garbage collector calls
                with contextlib.suppress(Exception):
                    closing.result(_CLOSING)

    def abandon(self) -> None:
        """In a forked child, keep all inherited connections alive, and close none."""
        sessions = self._sessions()
        self._abandoned.append((self, [getattr(one, "connector", None) for one in sessions]))
        for session in sessions:
            if hasattr(session, "detach"):  # aiohttp: marks it as closed, leaving its sockets open
                session.detach()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _wait(self, function: Any, *args: Any, seconds: float, **options: Any) -> Any:
        try:
            return self._asyn.sync(self._loop, function, *args, timeout=seconds, **options)
        except asyncio.TimeoutError:
            raise TimeoutError(f"no answer within {seconds:.1f} s") from None

    def _together(self, calls: Sequence[_Call], size: int = 0) -> list[Answer]:
        """Call methods of the file system at once, which move so many bytes: their results or exceptions."""
        if not self._is_async:
            return [_tried(getattr(self._fs, method), *args, **options) for method, args, options in calls]

        async def together() -> list[Answer]:
            gate = asyncio.Semaphore(_AT_ONCE)

            async def one(method: str, args: tuple[Any, ...], options: dict[str, int]) -> Answer:
                async with gate:
                    return await getattr(self._fs, f"_{method}")(*args, **options)

            return await asyncio.gather(*[one(*call) for call in calls], return_exceptions=True)

        seconds = self._patience + size / _SLOWEST + len(calls) / _REQUESTS
        found: list[Answer] = self._wait(together, seconds=seconds) if calls else []
        return found

    def _place(self, name: str, content: str | bytes) -> None:
        """Write a file; under a temporary name first, if readers could see it half written."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        is_visible = "file" in self._fs.protocol
        temporary = path + TEMPORARY if path.endswith(SEGMENT) else f"{path}.{ulid()}"
        method, args, _ = _writing(temporary if is_visible else path, content)
        try:
            getattr(self._fs, method)(*args)
            if is_visible:
                os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def _sessions(self) -> list[Any]:
        """The objects that have connections, in s3fs, gcsfs and adlfs."""
        found = [self._client]
        for name in ("session", "service_client", "credential"):
            with contextlib.suppress(RuntimeError):  # of gcsfs, which has not connected yet
                found.append(getattr(self._fs, name, None))
        return [one for one in found if one is not None]


async def _end(sessions: list[Any]) -> None:
    for one in sessions:
        closing = one.close() if hasattr(one, "close") else None
        if inspect.isawaitable(closing):
            with contextlib.suppress(Exception):  # a failing session needs nothing more
                await asyncio.wait_for(closing, _CLOSING)


def size_of(content: str | bytes) -> int:
    """Bytes to be written: of a local file, which may be gone, or these."""
    if isinstance(content, bytes):
        return len(content)
    with contextlib.suppress(OSError):
        return os.path.getsize(content)
    return 0


def _writing(path: str, content: str | bytes) -> _Call:
    return (
        ("pipe_file", (path, content), {})
        if isinstance(content, bytes)
        else ("put_file", (content, path), {})
    )


def _class_of(url: str) -> Any:
    """The file system of a URL."""
    scheme = url.partition("://")[0]
    if scheme in ("gs", "gcs"):
        # gcsfs registers another class for these schemes, which first asks for the bucket's type by gRPC.
        # Emulators do not answer that, and it fails in forked children.
        return require("gcsfs.core", "gcs", "a URL").GCSFileSystem
    return require("fsspec", "remote", "a URL").get_filesystem_class(scheme)


def _time_limits(protocols: Any, options: Mapping[str, Any], patience: float) -> dict[str, Any]:
    """Options that make a library give up hanging connections; the user's options have priority."""
    if "s3" in protocols:
        config: dict[str, Any] = {"connect_timeout": _CONNECT, "read_timeout": patience}
        config |= {"max_pool_connections": _AT_ONCE, "retries": {"max_attempts": 0}}
        return {"config_kwargs": {**config, **(options.get("config_kwargs") or {})}}
    if "gs" in protocols:
        aiohttp = require("aiohttp", "gcs", "a URL")
        limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT, sock_read=patience)
        return {"requests_timeout": options.get("requests_timeout", limits)}
    return {}


def _mtime(info: Mapping[str, Any]) -> float:
    """When an object was written, in seconds since 1970; 0 if unknown."""
    for name in _TIMES:
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, (int, float)):
            return float(value)
    return 0.0


def _tried(function: Callable[..., Any], *args: Any, **options: Any) -> Answer:
    try:
        return function(*args, **options)
    except Exception as error:
        return error


# What an error means, and how it reads.


class Kind(enum.Enum):
    """What an error means."""

    GONE = "there is no such object"
    SHORT = "the object ends before"
    NO_BUCKET = "there is no such bucket"
    REFUSED = "the credentials are not accepted, or not for this"
    FAULT = "anything else, which may work in a moment"


_STATUS = dict.fromkeys((401, 403, 405, 501), Kind.REFUSED) | dict.fromkeys((404, 410), Kind.GONE)
_CODES = {"NoSuchBucket": Kind.NO_BUCKET, "ContainerNotFound": Kind.NO_BUCKET, "InvalidRange": Kind.SHORT}
_STATUS[416] = Kind.SHORT
_CODES["InvalidObjectState"] = Kind.GONE  # the object is in an archive
_CODES |= dict.fromkeys(("ExpiredToken", "InvalidToken", "TokenRefreshRequired"), Kind.REFUSED)
# By name, as these libraries are imported only when used.
_REFUSED_CLASS = re.compile("Credential|Auth|TokenRetrieval|Unauthorized")
_HARMLESS = re.compile(r"url|region|project|endpoint|host|account_name|bucket", re.IGNORECASE)
_SHORTEST, _LONGEST = 4, 300


def kind_of(error: BaseException) -> Kind:
    """The meaning of an error, or of one of its causes; unknown errors are faults."""
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and len(chain) < 10:
        chain.append(cause)
    for meaning in (_said, _of_class):
        for one in chain:
            if (kind := meaning(one)) is not None:
                return kind
    return Kind.FAULT


def _said(error: BaseException) -> Kind | None:
    """The meaning of a server's error code or HTTP status."""
    response = getattr(error, "response", None)
    code: Any = getattr(error, "error_code", None)
    status = [getattr(error, name, None) for name in ("code", "status", "status_code")]
    if isinstance(response, Mapping):  # of botocore
        code = response.get("Error", {}).get("Code") or code
        status.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
    elif response is not None:
        status.append(getattr(response, "status_code", None))
    if isinstance(code, str) and code in _CODES:
        return _CODES[code]
    for number in status:
        if str(number).isdecimal():
            return _STATUS.get(int(str(number)), Kind.FAULT)
    return None


def _of_class(error: BaseException) -> Kind | None:
    if isinstance(error, (FileNotFoundError, IsADirectoryError, NotADirectoryError)):
        return Kind.GONE
    names = [base.__name__ for base in type(error).__mro__]
    if "TransportError" in names:  # of google.auth: the network fails
        return Kind.FAULT
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):
        return Kind.REFUSED
    return Kind.REFUSED if any(map(_REFUSED_CLASS.search, names)) else None


class Texts:
    """Texts of errors, without the secrets in some options."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        # Like messages, on one line. A secret read from a file may end with a newline.
        plain = {" ".join(secret.split()) for secret in _secrets(options)} - {""}
        self._secrets = sorted(plain, key=len, reverse=True)

    def of(self, error: BaseException) -> str:
        """The text of an error in one line, without secrets."""
        text = " ".join(str(error).split())
        for secret in self._secrets:
            text = text.replace(secret, "…")
        text = re.sub(r"//[^/@\s]*@", "//…@", text)  # a name and a password
        text = re.sub(r"(://[^?\s'\"]*)\?[^\s'\"]*", r"\1?…", text)  # signatures
        return f"{type(error).__name__}: {text[:_LONGEST]}" if text else type(error).__name__


def _secrets(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secrets(inner, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for inner in value:
            yield from _secrets(inner, name)
    elif isinstance(value, (str, bytes)) and len(value) >= _SHORTEST and not _HARMLESS.search(name):
        text = value if isinstance(value, str) else value.decode(errors="replace")
        yield text
        for part in text.split(";") if ";" in text else ():  # of a connection string
            key, _, inside = part.partition("=")
            yield from _secrets(inside, key)
