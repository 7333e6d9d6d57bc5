"""`Instance`: a file system of fsspec that one process has made; no call of it waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torchcache2.core.errors import require
from torchcache2.core.places import Bucket
from torchcache2.core.private import GCS_RETRIED, S3_CALL, S3_LISTING, S3_SESSION, SESSIONS
from torchcache2.files.filesystem import FileInfo, ulid
from torchcache2.files.layout import SEGMENT, TEMPORARY
from torchcache2.tiers.remote.libraries import (
    AT_ONCE,
    CONNECT,
    class_of,
    keep_finalizers_off,
    mtime,
    time_limits,
)
from torchcache2.tiers.remote.refusals import Kind, kind_of

_SLOWEST = float(1 << 20)  # bytes a second: a connection that is slower counts as one that hangs
_REQUESTS = 50.0  # likewise, requests a second
_CLOSING = 2.0  # seconds
_REMOVED = 1000  # objects, with one request; S3 takes no more
Answer = Any  # the bytes of a range, or the exception


class Instance:
    """The file system of a bucket, for the process that has made it.

    A file system that is asynchronous has a session with open connections, whose event loop a forked child
    shares with its parent: what the child closes there, its parent loses. So a child has to `abandon` the
    instances of its parent before anything of them is collected, and makes its own.

    Parameters
    ----------
    bucket : Bucket
    patience : float
        Seconds that an answer may take, besides those for its bytes.
    """

    # What botocore knows of S3 takes a tenth of a second to load. It is the same for all sessions, and forked
    # children have it too.
    _tables: ClassVar[dict[Any, Any]] = {}

    def __init__(self, bucket: Bucket, patience: float) -> None:
        self._pid = os.getpid()
        self._patience = patience
        self._asyn = require("fsspec.asyn", "remote", "a URL")
        kind = class_of(bucket.url)
        options = {**kind._get_kwargs_from_urls(bucket.url), **bucket.storage_options}
        self._is_async = bool(kind.async_impl)
        if self._is_async:
            # It is closed by `close`, and not by its finalizers: these would run in a forked child, too.
            options |= {"asynchronous": True, "loop": None}
            options |= time_limits(kind.protocol, options, patience)
        self._fs: Any = kind(**options, skip_instance_cache=True)
        self._root = kind._strip_protocol(bucket.url).rstrip("/")
        # This library tries again itself, and looks at the clock.
        self._fs.retries = 1
        for name in GCS_RETRIED:
            method: Any = getattr(kind, name, None)
            if hasattr(method, "__wrapped__"):
                setattr(self._fs, name, functools.partial(method.__wrapped__, self._fs))
        if self._is_async:
            keep_finalizers_off(self._fs)
        if hasattr(self._fs, "set_session"):  # of s3fs, which takes a while before it asks anything
            self._share_tables()
            self._wait(self._fs.set_session, seconds=CONNECT + patience)

    def is_file(self) -> bool:
        """Whether the URL is that of a file, where there are folders."""
        return not self._is_async and bool(self._fs.isfile(self._root))

    def ask_for_bucket(self) -> None:
        """Raise `FileNotFoundError` if there is no bucket: it is the first part of the path.

        S3 says so when it is asked for a listing; others have nothing in it.
        """
        if self._is_async and "s3" not in self._fs.protocol:
            self._wait(self._fs._info, self._root.lstrip("/").partition("/")[0], seconds=self._patience)

    def listing(self, folder: str) -> list[FileInfo]:
        """The files and folders in a folder, in order; `FileNotFoundError` if there are none."""
        self._fs.invalidate_cache()
        path = self._path(folder)
        if "s3" in self._fs.protocol:  # `_ls` lists the folder above, too, if there is nothing in this one
            infos = self._wait(getattr(self._fs, S3_LISTING, self._fs._ls), path, seconds=3 * self._patience)
        elif self._is_async:
            infos = self._wait(self._fs._ls, path, detail=True, seconds=3 * self._patience)
        else:
            infos = self._fs.ls(path, detail=True)
        found = set()
        for info in infos:
            whole = str(info["name"])
            parent, _, name = whole.rstrip("/").rpartition("/")
            # An object may have the name of the folder, or that of one in it, with a slash at the end.
            if parent.strip("/") == path.strip("/") and not info.get("islink"):
                if info["type"] == "file" and not whole.endswith("/"):
                    found.add(FileInfo(name, False, int(info["size"] or 0), mtime(info)))
                elif info["type"] == "directory":
                    found.add(FileInfo(name, True, 0, 0.0))
        return sorted(found)

    def read(self, ranges: Sequence[tuple[str, int, int]]) -> list[Answer]:
        """Read ``(name, start, end)``, many at once: for each its bytes, or fewer, or the exception."""
        parts = [(self._path(name), start, end) for name, start, end in ranges]
        if not self._is_async:
            return [_tried(self._fs.cat_file, *part) for part in parts]
        seconds = self._seconds(sum(end - start for _, start, end in parts), len(parts))
        return self._together(
            lambda path, start, end: self._fs._cat_file(path, start=start, end=end), parts, seconds
        )

    def download(self, name: str, path: str) -> None:
        """Write an object to a local file."""
        if self._is_async:
            # Libraries look at each read of a connection: this is for those that do not.
            self._wait(self._fs._get_file, self._path(name), path, seconds=60 * self._patience)
            return
        data = self._fs.cat_file(self._path(name))  # an open file of `memory://` has one position for all
        with open(path, "wb") as file:
            file.write(data)

    def upload(self, path: str, name: str) -> None:
        """Write a local file to an object."""
        if self._is_async:
            seconds = self._seconds(os.path.getsize(path))
            self._wait(self._fs._put_file, path, self._path(name), seconds=seconds)
        else:
            self._place(name, lambda place: self._fs.put_file(path, place))

    def write(self, name: str, data: bytes) -> None:
        """Write an object of some bytes."""
        if self._is_async:
            self._wait(self._fs._pipe_file, self._path(name), data, seconds=self._seconds(len(data)))
        else:
            self._place(name, lambda place: self._fs.pipe_file(place, data))

    def remove(self, names: Sequence[str]) -> list[Answer]:
        """Delete objects, many at once: for each None, or the exception."""
        left = [self._path(name) for name in names]
        if not self._is_async:
            return [_tried(self._fs.rm_file, path) for path in left]
        found: dict[str, Answer] = dict.fromkeys(left)
        seconds = self._seconds(0, len(left))
        if "s3" in self._fs.protocol and len(left) > 1:
            parts = [left[start : start + _REMOVED] for start in range(0, len(left), _REMOVED)]
            left = []
            answers = self._together(self._remove_some, [(part,) for part in parts], seconds)
            for part, answer in zip(parts, answers, strict=True):
                if isinstance(answer, BaseException):
                    found.update(dict.fromkeys(part, answer))
                else:
                    left += answer
        if left:
            errors = self._together(self._fs._rm_file, [(path,) for path in left], seconds)
            found.update(zip(left, errors, strict=True))
        return [found[self._path(name)] for name in names]

    def close(self) -> None:
        """Close the connections."""
        if self._is_async and self._pid == os.getpid():
            future = asyncio.run_coroutine_threadsafe(self._end(), self._asyn.get_loop())
            if threading.current_thread() is not self._asyn.iothread[0]:  # where garbage may be collected
                with contextlib.suppress(Exception):  # there is nothing to do for a session that fails
                    future.result(_CLOSING)

    def abandon(self) -> None:
        """Have a forked child keep what it has inherited, as it is, until its process ends."""
        if self._is_async:
            keep_finalizers_off(self._fs)
            # Nothing else keeps an object from being collected when the process ends.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._fs))

    def _share_tables(self) -> None:
        """Have a session of botocore, unless the user has given one, take its tables from those before it."""
        if self._fs.session is None:
            sessions = require("aiobotocore.session", "s3", "a URL")
            session = self._fs.session = sessions.AioSession(**self._fs.kwargs)
            folder = session.get_config_variable("data_path")
            tables = self._tables.setdefault(folder, session.get_component("data_loader"))
            session.register_component("data_loader", tables)

    async def _remove_some(self, paths: list[str]) -> list[str]:
        """Delete objects of S3 with one request; those that are left, which are to be tried one by one."""
        bucket, keys = (
            self._fs.split_path(paths[0])[0],
            {self._fs.split_path(path)[1]: path for path in paths},
        )
        objects = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            answer = await getattr(self._fs, S3_CALL)("delete_objects", Bucket=bucket, Delete=objects)
        except Exception as error:
            if kind_of(error) is Kind.PASSING:
                raise
            return paths  # not all servers know this request
        return [keys[error["Key"]] for error in answer.get("Errors", [])]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _seconds(self, size: int, requests: int = 1) -> float:
        """How long a call may take that moves some bytes."""
        return self._patience + size / _SLOWEST + requests / _REQUESTS

    def _wait(self, function: Any, *args: Any, seconds: float, **options: Any) -> Any:
        try:
            return self._asyn.sync(self._asyn.get_loop(), function, *args, timeout=seconds, **options)
        except self._asyn.FSTimeoutError:
            raise _late(seconds) from None

    def _together(
        self, function: Callable[..., Any], parts: Sequence[tuple[Any, ...]], seconds: float
    ) -> list[Answer]:
        """Call a coroutine function for each of `parts`, many at once; each has its result or exception.

        fsspec's own functions for that leave requests running when they are cancelled.
        """

        async def wait() -> list[Answer]:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(part: tuple[Any, ...]) -> Answer:
                async with gate:
                    return await function(*part)

            tasks = [asyncio.ensure_future(one(part)) for part in parts]
            try:
                await asyncio.wait(tasks, timeout=seconds)
            finally:
                late = [task for task in tasks if not task.done()]
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late, timeout=_CLOSING)
            return [_outcome(task, seconds) for task in tasks]

        found: list[Answer] = self._wait(wait, seconds=seconds + 2 * _CLOSING)
        return found

    def _place(self, name: str, write: Callable[[str], Any]) -> None:
        """Write a file in a folder; under another name first, if others may see it before it is whole."""
        path = self._path(name)
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        if "file" not in self._fs.protocol:
            write(path)
            return
        temporary = path + TEMPORARY if path.endswith(SEGMENT) else f"{path}.{ulid()}"
        try:
            write(temporary)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    async def _end(self) -> None:
        for name in SESSIONS:
            close = getattr(getattr(self._fs, name, None), "close", None)
            closing = close() if close else None
            if inspect.isawaitable(closing):
                await closing
        creator = getattr(self._fs, S3_SESSION, None)
        if creator is not None:
            self._fs.set_session = _closed  # another thread would have it open a new one
            await creator.__aexit__(None, None, None)


def _tried(function: Callable[..., Any], *args: Any) -> Answer:
    try:
        return function(*args)
    except Exception as error:
        return error


async def _closed(*args: Any, **options: Any) -> None:
    raise RuntimeError("it is closed")


def _late(seconds: float) -> TimeoutError:
    return TimeoutError(f"no answer within {seconds:.1f} s")


def _outcome(task: asyncio.Task[Any], seconds: float) -> Answer:
    if not task.done() or task.cancelled():
        return _late(seconds)
    return task.exception() or task.result()
