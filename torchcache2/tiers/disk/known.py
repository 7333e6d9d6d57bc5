"""`Known`: the indexes of the namespaces that a tier uses, under one lock."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Collection

from torchcache2.core.process import ProcessLock
from torchcache2.files.directory import CacheDirectory
from torchcache2.files.filesystem import Descriptor, Descriptors
from torchcache2.tiers.disk.health import Health
from torchcache2.tiers.disk.index import NamespaceIndex
from torchcache2.tiers.writer import Writer


class Known:
    """Where rows are, by namespace, and the writer of unsealed rows.

    The `directory` includes segments of a bucket. A row may have up to `limit` bytes. `in_use()` returns the
    namespaces that something alive in this process uses; None: all. The `lock` protects all of this.
    `numbers` yields numbers for new segments. `begin` makes the `writer`. When `drops()` changes, forget
    everything.
    """

    def __init__(
        self,
        directory: CacheDirectory,
        health: Health,
        limit: int,
        in_use: Callable[[], Collection[bytes]] | None,
        make_writer: Callable[[], Writer],
        drops: Callable[[], int] = int,
    ) -> None:
        self.lock = ProcessLock(threading.RLock)
        self.located: dict[bytes, NamespaceIndex] = {}
        self.descriptors = Descriptors(directory.fs)
        self.writer: Writer | None = None
        self.closed = False
        self.directory = directory
        self._health = health
        self.limit = limit
        self._in_use = in_use
        self._make_writer = make_writer
        self._drops = drops
        self._dropped = drops()
        self.numbers = itertools.count()
        self._wanted: set[bytes] = set()  # namespaces to hold

    def begin(self) -> None:
        """Make a writer if this process has none, as after a fork; with the lock held."""
        torn = self.lock.was_torn()
        if self.writer is None or self.writer.pid != os.getpid():
            self._begin(torn)
        if self._dropped != (drops := self._drops()):
            self._dropped = drops
            for namespace in list(self.located):
                self.start_anew(namespace)
                self._ignore_files(namespace)

    def _ignore_files(self, namespace: bytes) -> None:
        """Do not open the files there now: another process is about to delete them."""
        with contextlib.suppress(OSError):
            files = self.directory.contents(namespace.hex()).segments
            self.ignore(namespace, {file.name for file in files})

    def _begin(self, torn: bool) -> None:
        if torn:
            # Another thread of the parent was changing the tables when it forked.
            self.located = {}
            self.descriptors = Descriptors(self.directory.fs)
        elif self.writer is not None:
            for located in self.located.values():
                located.forget_pending()  # the parent will write them
        self.writer = self._make_writer()

    def namespace(self, namespace: bytes) -> NamespaceIndex:
        """The index of a namespace, which this process uses from now on; call with the lock."""
        located = self.located.get(namespace)
        if located is None:
            located = self.new(namespace)
            located.look()
        self._wanted.add(namespace)
        located.keep_hold()
        return located

    def new(self, namespace: bytes) -> NamespaceIndex:
        """Make the index of a namespace, still without rows; call with the lock."""
        located = self.located[namespace] = NamespaceIndex(
            namespace, self.directory, self.descriptors, self.numbers, self.limit, self._health.fault
        )
        return located

    def ignore(self, namespace: bytes, names: Collection[str]) -> None:
        """Never open files of these names; with the lock held."""
        located = self.located.get(namespace)  # it may have no rows, but names already
        if located is None:
            located = self.new(namespace)
        located.names.update(names)

    def remove(self, namespace: bytes, numbers: Collection[int], damaged: Collection[int] = ()) -> int:
        """Forget segments; returns how many rows they had. Other segments may have the same rows."""
        return self._change(namespace, lambda located: located.remove(numbers, damaged))

    def remove_files(self, namespace: bytes, names: Collection[str]) -> int:
        """Forget the segments with these file names; returns how many rows they had."""
        return self._change(namespace, lambda located: located.remove_files(names))

    def _change(self, namespace: bytes, change: Callable[[NamespaceIndex], int]) -> int:
        with self.lock():
            located = self.located.get(namespace)
            if located is None:
                return 0
            try:
                return change(located)
            except BaseException:
                self.start_anew(namespace)
                raise

    def start_anew(self, namespace: bytes) -> None:
        """Forget the index and the unsealed rows of a namespace; call with the lock.

        Sealed rows are found again. Needed after an interrupt, when tables may be half changed.
        """
        located = self.located.pop(namespace, None)  # first, so that no thread finds dropped rows
        if located is not None:
            located.let_go()
        dropped = self.writer.drop(namespace) if self.writer is not None else []
        if names := {pending.name for pending in dropped if pending.name}:
            # The writer may still be writing these: it deletes the files once it sees the drop.
            self.new(namespace).names = names

    def unopened(self, namespace: bytes) -> list[Exception]:
        """Why segments of a namespace could not be opened."""
        with self.lock():
            located = self.located.get(namespace)
            return [] if located is None else list(located.unopened.values())

    def let_go(self) -> Collection[bytes] | None:
        """Release namespaces that nothing alive uses; returns those in use, if known.

        Call without the lock: `in_use` may wait for a lock whose owner waits for ours.
        """
        if self._in_use is None:
            return None
        in_use = self._in_use()
        with self.lock():
            self.begin()
            for namespace in self._wanted.difference(in_use):
                self._wanted.discard(namespace)
                if (located := self.located.get(namespace)) is not None:
                    located.let_go()
        return in_use

    def hold_what_is_used(self) -> None:
        """Hold exactly the namespaces that something alive uses; call without the lock."""
        in_use = self.let_go()
        with self.lock():
            self.begin()
            for namespace in self.located if in_use is None else in_use:
                if (located := self.located.get(namespace)) is not None:
                    self._wanted.add(namespace)
                    located.hold(is_used=False)  # another process may have made its folder since

    def held(self, namespace: bytes, enter: Callable[[], Descriptor | None]) -> Descriptor | None:
        """The open file that marks a namespace as in use; `enter` opens it if need be."""
        self.let_go()
        with self.lock():
            located = self.located.get(namespace)
            held = located.held() if located is not None else None
        if held is None:
            held = enter()
            with self.lock():
                located = self.located.get(namespace)
                if namespace in self._wanted and located is not None:
                    located.hold()
        return held
