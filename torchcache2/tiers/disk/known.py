"""`Known`: what a tier knows of the namespaces that it was asked for, under one lock."""

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
    """Where rows are, by namespace, and the writer of those that are not sealed yet.

    The `directory` shows what a bucket has too. A row may have `limit` bytes. `in_use()` are the namespaces
    that something alive in this process uses; without it, all count as used. The `lock` protects all of this.
    `numbers` are those of the next segments. There is no `writer` before the first `begin`. When `drops()`
    changes, all is forgotten.
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
        self._wanted: set[bytes] = set()  # namespaces that are held, or should be

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
        """Have the files that are there now stay closed, as another process is about to delete them."""
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
        """What is known of a namespace; this process counts as its user from now on. With the lock held."""
        located = self.located.get(namespace)
        if located is None:
            located = self.new(namespace)
            located.look()
        self._wanted.add(namespace)
        located.keep_hold()
        return located

    def new(self, namespace: bytes) -> NamespaceIndex:
        """Begin to know a namespace, at first without rows; with the lock held."""
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
        """Forget segments; returns how many rows were found in them. Other segments may have them too."""
        return self._change(namespace, lambda located: located.remove(numbers, damaged))

    def remove_files(self, namespace: bytes, names: Collection[str]) -> int:
        """Forget the segments in the files of these names; returns the same."""
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
        """Forget what is known of a namespace, and its rows that wait; with the lock held.

        Sealed rows are found again. This is needed after an interrupt, when tables may be half changed.
        """
        located = self.located.pop(namespace, None)  # this comes first: nobody may find dropped rows
        if located is not None:
            located.let_go()
        dropped = self.writer.drop(namespace) if self.writer is not None else []
        if names := {pending.name for pending in dropped if pending.name}:
            # The thread may still be writing these: it deletes the files once it sees that they are dropped.
            self.new(namespace).names = names

    def unopened(self, namespace: bytes) -> list[Exception]:
        """Why segments of a namespace could not be opened."""
        with self.lock():
            located = self.located.get(namespace)
            return [] if located is None else list(located.unopened.values())

    def let_go(self) -> Collection[bytes] | None:
        """Release namespaces that nothing alive uses; returns those in use, if known.

        Must be called without the lock: `in_use` may wait for another lock, and its owner for ours.
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
        """Hold the namespaces that something alive uses, and no others; without the lock."""
        in_use = self.let_go()
        with self.lock():
            self.begin()
            for namespace in self.located if in_use is None else in_use:
                if (located := self.located.get(namespace)) is not None:
                    self._wanted.add(namespace)
                    located.hold(is_used=False)  # another process may have made its folder since

    def held(self, namespace: bytes, enter: Callable[[], Descriptor | None]) -> Descriptor | None:
        """The open file that tells others that a namespace is in use; `enter` makes one if there is none."""
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
